"""Offline rows for `benchmarks.cpu_colocation`: an endless stream of fresh document sets.

Each set is a job of its own: a Parquet file and a job file that are read, planned and rendered by
the code that the daemon runs, and hinted by its `Hinter`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from batchrun.daemon.dispatcher import OFFLINE_PRIORITY, Hinter
from batchrun.daemon.job import ActiveJob
from batchrun.daemon.opening import open_job
from batchrun.engine.client import EngineClient
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.submit import prepare_job
from batchrun.samples.prose import sentence_pool
from batchrun.store import jobs
from batchrun.store.database import Store
from batchrun.types import Outcome, OutcomeKind, Request


@dataclass(frozen=True, slots=True)
class Trickle:
    """How much may be in the engine and how fast it may come (design 6.1, "Window").

    A row of `long_row_tokens` or more is long. Each tick brings at least one row if there is room.
    The same for every server: vLLM's `run-batch` sends all rows at once, and vLLM takes them in
    the order of arrival, so rows beyond this window would only wait there.
    """

    max_requests: int = 256
    max_tokens: int = 2_000_000
    tick_s: float = 0.1
    tick_tokens: int = 50_000
    tick_long_rows: int = 4
    long_row_tokens: int = 4_096


@dataclass(frozen=True, slots=True)
class DoneRow:
    """A row that ended. Instants are on the monotonic clock."""

    sent_at_s: float
    ended_at_s: float
    outcome: Outcome


@dataclass(slots=True)
class Feeder:
    """Feeds one engine from a stream until it is cancelled; then aborts what is in flight."""

    client: EngineClient
    stream: RowStream
    trickle: Trickle = field(default_factory=Trickle)
    done: list[DoneRow] = field(default_factory=list)
    in_flight_since_s: dict[asyncio.Task[None], float] = field(default_factory=dict)
    in_flight_tokens: int = 0

    async def run(self) -> None:
        """Send rows for ever; cancel to end."""
        try:
            while True:
                for row in await self._next_tick():
                    self._send(row)
                await asyncio.sleep(self.trickle.tick_s)
        finally:
            await self._abort()

    def failed(self) -> Sequence[Outcome]:
        """Outcomes that are no answer."""
        return [row.outcome for row in self.done if row.outcome.kind is not OutcomeKind.OK]

    def oldest_in_flight_s(self, now_s: float) -> float:
        """How long the oldest row that has no answer yet has been in the engine."""
        return max(
            (now_s - sent_at_s for sent_at_s in self.in_flight_since_s.values()), default=0.0
        )

    async def _next_tick(self) -> list[OfflineRow]:
        limits = self.trickle
        rows: list[OfflineRow] = []
        tokens = num_long = 0
        while True:
            row = await self.stream.peek()
            tokens += row.prompt_tokens
            num_long += row.prompt_tokens >= limits.long_row_tokens
            is_over = tokens > limits.tick_tokens or num_long > limits.tick_long_rows
            if (rows and is_over) or not self._has_room(len(rows) + 1, tokens):
                return rows
            rows.append(self.stream.take())

    def _has_room(self, num_more: int, more_tokens: int) -> bool:
        num_requests = len(self.in_flight_since_s) + num_more
        fits = self.in_flight_tokens + more_tokens <= self.trickle.max_tokens
        return num_requests == 1 or (fits and num_requests <= self.trickle.max_requests)

    def _send(self, row: OfflineRow) -> None:
        self.in_flight_tokens += row.prompt_tokens
        task = asyncio.create_task(self._execute(row))
        self.in_flight_since_s[task] = time.monotonic()
        task.add_done_callback(self.in_flight_since_s.pop)

    async def _execute(self, row: OfflineRow) -> None:
        sent_at_s = time.monotonic()
        try:
            outcome = await self.client.execute(row.request)
            self.done.append(DoneRow(sent_at_s, time.monotonic(), outcome))
            if outcome.kind is not OutcomeKind.OK:
                await asyncio.sleep(self.trickle.tick_s)
        finally:
            self.in_flight_tokens -= row.prompt_tokens

    async def _abort(self) -> None:
        tasks = list(self.in_flight_since_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


POOL_SENTENCES = 4_000
JOB_FILE = """\
name: set-{number}
model: {model}
input:
  path: set-{number}.parquet
  messages:
    - {{role: user, content: "{{{{ document }}}}\\n\\nQuestion: {{{{ question }}}}\\nAnswer:"}}
request: {{max_tokens: {output_tokens}, temperature: 0, ignore_eos: true}}
output: {{path: set-{number}-out.jsonl}}
"""


class RowOrder(StrEnum):
    """How rows are sent. `PLANNED` and `GROUPED` are one order, from batchrun's pool or by hand."""

    PLANNED = "planned"
    SHUFFLED = "shuffled"
    GROUPED = "grouped"


@dataclass(frozen=True, slots=True)
class SetShape:
    """One set of documents: the trial's of design 6.5. Pairs are bounds of a uniform draw."""

    num_documents: int = 30
    document_tokens: tuple[int, int] = (6_000, 12_000)
    num_questions: int = 8
    output_tokens: int = 16


@dataclass(frozen=True, slots=True)
class OfflineRow:
    """A request ready to be sent, and about how long its prompt is."""

    request: Request
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class RowDraft:
    """A row of a set before it became a request."""

    document: str
    question: str
    prompt_tokens: int


DrawSentence = Callable[[random.Random], tuple[str, int]]
"""A sentence and its tokens."""


class SetWriter:
    """Draws document sets from seeds and submits each as a job. `tokenizer_path` is the model's."""

    def __init__(self, folder: Path, store: Store, tokenizer_path: Path, shape: SetShape) -> None:
        self._folder = folder
        self._store = store
        self._shape = shape
        self._sentences = sentence_pool(random.Random(11), POOL_SENTENCES)
        encoded = Tokenizer.from_file(str(tokenizer_path)).encode_batch(self._sentences)
        self._num_tokens = [len(each.ids) for each in encoded]

    def submit(self, seed: int, number: int, model: str) -> tuple[ActiveJob, list[int]]:
        """The job of set `number` of a seed, and the prompt tokens of its rows. Blocking, 1 s."""
        rows = draw_rows(self._shape, random.Random(f"{seed}/{number}"), self._sentence)
        name = f"{seed}-{number}"
        table = pa.table({
            "document": [row.document for row in rows],
            "question": [row.question for row in rows],
        })
        self._folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, self._folder / f"set-{name}.parquet")
        path = self._folder / f"set-{name}.yaml"
        path.write_text(
            JOB_FILE.format(number=name, model=model, output_tokens=self._shape.output_tokens)
        )
        new = prepare_job(load_job_file(path, cwd=self._folder), links=self._folder)
        record = jobs.create(self._store, new, now_s=time.time())
        job = open_job(self._store, record, links=self._folder)
        return job, [row.prompt_tokens for row in rows]

    def _sentence(self, rng: random.Random) -> tuple[str, int]:
        at = rng.randrange(POOL_SENTENCES)
        return self._sentences[at], self._num_tokens[at]


def draw_rows(shape: SetShape, rng: random.Random, sentence: DrawSentence) -> list[RowDraft]:
    """The rows of a set, shuffled."""
    rows: list[RowDraft] = []
    for _ in range(shape.num_documents):
        wanted = rng.randint(*shape.document_tokens)
        texts, num_tokens = [], 0
        while num_tokens < wanted:
            text, tokens = sentence(rng)
            texts.append(text)
            num_tokens += tokens
        document = " ".join(texts)
        for _ in range(shape.num_questions):
            question, tokens = sentence(rng)
            rows.append(RowDraft(document, question, num_tokens + tokens))
    rng.shuffle(rows)
    return rows


class RowStream:
    """The rows of a seed's sets, one set after the other, in one order, without end.

    With a `nonce` every row carries a hint and goes as the daemon sends it; without one it
    carries vLLM's priority.
    """

    def __init__(
        self, writer: SetWriter, seed: int, order: RowOrder, model: str, nonce: str | None = None
    ) -> None:
        self._writer = writer
        self._seed = seed
        self._order = order
        self._model = model
        self._nonce = nonce
        self._next_set = 0
        self._ready: Iterator[OfflineRow] = iter(())
        self._waiting: OfflineRow | None = None
        self._hinter = Hinter(epoch=1 + seed)

    async def prepare(self) -> None:
        """Make the first set, before a window begins."""
        await self.peek()

    async def peek(self) -> OfflineRow:
        """The row to send next."""
        while self._waiting is None:
            self._waiting = next(self._ready, None)
            if self._waiting is None:
                number, self._next_set = self._next_set, self._next_set + 1
                made = await asyncio.to_thread(self._writer.submit, self._seed, number, self._model)
                self._ready = self._rows_of(*made)
        return self._waiting

    def take(self) -> OfflineRow:
        """The row that `peek` gave. Raises IndexError before a `peek`."""
        if self._waiting is None:
            raise IndexError("peek first")
        row, self._waiting = self._waiting, None
        return row

    def _rows_of(self, job: ActiveJob, prompt_tokens: list[int]) -> Iterator[OfflineRow]:
        is_shuffled = self._order is RowOrder.SHUFFLED
        numbers = range(job.plan.num_rows) if is_shuffled else job.plan.order.rows.tolist()
        rows = job.rows.read_rows(list(numbers))
        job.rows.close()
        for number, values in zip(numbers, rows, strict=True):
            body = job.template.render(values, row_number=number)
            body["priority"] = OFFLINE_PRIORITY
            job.queue.prefer(np.array([number]))
            job.queue.take(number)
            if self._nonce is not None:
                self._hinter.add_hint(body, job, number, self._nonce)
            request = Request(job.record.id, number, 1, 1, job.spec.endpoint, body)
            yield OfflineRow(request, prompt_tokens[number])
