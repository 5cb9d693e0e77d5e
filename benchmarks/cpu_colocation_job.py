"""Offline rows for `benchmarks.cpu_colocation`: an endless stream of fresh document sets.

Each set is a job of its own: a Parquet file and a job file that are read, planned and rendered by
the code that the daemon runs, and hinted by its `Hinter`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from batchrun.daemon.dispatcher import OFFLINE_PRIORITY, Hinter
from batchrun.daemon.job import ActiveJob
from batchrun.daemon.opening import open_job
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.submit import prepare_job
from batchrun.samples.prose import sentence_pool
from batchrun.store import jobs
from batchrun.store.database import Store
from batchrun.types import Request

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
