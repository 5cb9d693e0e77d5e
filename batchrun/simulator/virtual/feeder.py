"""Who sends requests to a virtual engine: online users, and a daemon with a job."""

from __future__ import annotations

import math
import random
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import BlockHash

from batchrun.hints import NodeHint, RowHint, write_hint
from batchrun.simulator.virtual.engine import Arrival, hash_blocks
from batchrun.simulator.virtual.scenarios import Job, JobRow, OnlineCall, TokenIds, draw_token_ids
from batchrun.simulator.virtual.setup import NONCE
from batchrun.types import USUAL_OUTPUT_TOKENS

MAX_HASHED_DOCUMENTS = 256
SYSTEM_SEED = 7_000
"""The system prompt has draws of its own: a seed means the same calls with and without it."""


class OnlineSource:
    """Users who call when the trace says so, with prompts nobody else sends, behind the system
    prompt that all begin with, if any."""

    def __init__(self, calls: Sequence[OnlineCall], seed: int) -> None:
        self._calls = calls
        self._rng = random.Random(7 + seed)
        num_system = max((call.num_system_tokens for call in calls), default=0)
        self._system = draw_token_ids(random.Random(SYSTEM_SEED + seed), num_system).tolist()
        self._next = 0

    @property
    def next_due_s(self) -> float:
        """The next call."""
        return self._calls[self._next].arrival_at_s if self._next < len(self._calls) else math.inf

    def take_due(self, now_s: float) -> list[Arrival]:
        """The calls made by now."""
        due: list[Arrival] = []
        while self.next_due_s <= now_s:
            call = self._calls[self._next]
            own = draw_token_ids(self._rng, call.num_prompt_tokens).tolist()
            prompt = self._system[: call.num_system_tokens] + own
            name = f"online-{self._next}"
            due.append(Arrival(name, True, call.arrival_at_s, prompt, call.num_output_tokens))
            self._next += 1
        return due

    def on_finished(self, request_id: str) -> None:
        """Users do not wait for one another."""


@dataclass(frozen=True, slots=True)
class Window:
    """How much of a job may be in the engine, and how fast it may come (vllm-notes section 6).

    A row of `long_row_tokens` or more is long. Each tick brings at least one row if there is room.
    """

    max_requests: int = 256
    max_tokens: int = 2_000_000
    tick_s: float = 0.1
    tick_tokens: int = 50_000
    tick_long_rows: int = 4
    long_row_tokens: int = 4_096


DAEMON_WINDOW = Window()


class JobFeeder:
    """A daemon that sends the rows of a job in their order, each with its hint.

    With a `window` it keeps a bounded part of the job in the engine and refills it as rows end;
    without one it sends everything at once. `id_digits` pads the numbers in request ids: vLLM's
    priority queue breaks ties of the arrival time by id, so unpadded ids run as text sorts. The
    rows' `max_tokens` are their true lengths; with a `context_tokens` they have none, and vLLM's
    limit is what the prompt leaves of the context.
    """

    def __init__(
        self,
        job: Job,
        *,
        window: Window | None,
        block_tokens: int = 16,
        id_digits: int = 7,
        context_tokens: int | None = None,
    ) -> None:
        self._job = job
        self._window = window
        self._context_tokens = context_tokens
        self._id_digits = id_digits
        self._hints = _Hints(job)
        self._hashes = _DocumentHashes(job.documents, block_tokens)
        self._next_rank = 0
        self._next_tick_s = 0.0
        self._was_full = False
        self._tokens_by_id: dict[str, int] = {}
        self._output_tokens: dict[str, int] = {}
        self._num_ended = self._num_ended_tokens = 0
        self._window_tokens = 0

    @property
    def next_due_s(self) -> float:
        """The next tick that brings a row; infinity while the window is full."""
        return self._next_tick_s if self._has_room() else math.inf

    def take_due(self, now_s: float) -> list[Arrival]:
        """The rows sent by now."""
        due: list[Arrival] = []
        if self._was_full:
            self._next_tick_s = max(self._next_tick_s, now_s)
        while self.next_due_s <= now_s:
            if self._window is None:
                due.append(self._send(0.0))
            else:
                due += self._tick(self._window)
                self._next_tick_s += self._window.tick_s
        self._was_full = not self._has_room()
        return due

    def on_finished(self, request_id: str) -> None:
        """A row that ended makes room."""
        self._window_tokens -= self._tokens_by_id.pop(request_id, 0)
        if request_id in self._output_tokens:
            self._num_ended += 1
            self._num_ended_tokens += self._output_tokens.pop(request_id)

    def _tick(self, window: Window) -> list[Arrival]:
        rows: list[Arrival] = []
        tokens = num_long = 0
        while self._has_room():
            row_tokens = self._job.num_prompt_tokens(self._job.rows[self._next_rank])
            is_long = row_tokens >= window.long_row_tokens
            is_over = tokens + row_tokens > window.tick_tokens
            if rows and (is_over or num_long + is_long > window.tick_long_rows):
                break
            rows.append(self._send(self._next_tick_s))
            tokens += row_tokens
            num_long += is_long
        return rows

    def _has_room(self) -> bool:
        if self._next_rank >= len(self._job.rows):
            return False
        window = self._window
        if window is None or not self._tokens_by_id:
            return True
        row = self._job.rows[self._next_rank]
        return (
            len(self._tokens_by_id) < window.max_requests
            and self._window_tokens + self._job.num_prompt_tokens(row) <= window.max_tokens
        )

    def _send(self, arrival_at_s: float) -> Arrival:
        rank = self._next_rank
        row = self._job.rows[rank]
        document = self._job.documents[row.document]
        prompt = document.tolist() + row.question.tolist()
        request_id = f"row-{rank:0{self._id_digits}d}"
        self._tokens_by_id[request_id] = len(prompt)
        self._output_tokens[request_id] = row.num_output_tokens
        self._window_tokens += len(prompt)
        self._next_rank += 1
        context = self._context_tokens
        return Arrival(
            request_id,
            False,
            arrival_at_s,
            prompt,
            row.num_output_tokens if context is None else context - len(prompt),
            self._hints.text(row, rank, self._expected_output_tokens()),
            self._hashes.of(row.document),
            num_output_tokens=None if context is None else row.num_output_tokens,
        )

    def _expected_output_tokens(self) -> int:
        """What the daemon expects of an answer: the mean of those so far."""
        num = self._num_ended
        return round(self._num_ended_tokens / num) if num else USUAL_OUTPUT_TOKENS


class _Hints:
    """The hint of every row (design section 2), by the order in which the rows are sent.

    A document is one node, numbered from 1. Its rows still to come are those sent after this one;
    after the last of them the count is 0 and the rank is the row's own.
    """

    def __init__(self, job: Job) -> None:
        self._ranks: dict[int, list[int]] = {}
        self._place: list[int] = []
        for rank, row in enumerate(job.rows):
            ranks = self._ranks.setdefault(row.document, [])
            self._place.append(len(ranks))
            ranks.append(rank)

    def text(self, row: JobRow, rank: int, output_tokens: int) -> str:
        """The JSON that travels in `vllm_xargs` under the key `batchrun`."""
        ranks, place = self._ranks[row.document], self._place[rank]
        num_to_come = len(ranks) - place - 1
        next_rank = ranks[place + 1] if num_to_come else rank
        hint = RowHint(
            epoch=1,
            job="job",
            row=row.number,
            rank=rank,
            nodes=(NodeHint(row.document + 1, num_to_come, next_rank),),
            output_tokens=output_tokens,
        )
        return write_hint(hint, NONCE)


class _DocumentHashes:
    """The block hashes of each document's full blocks, hashed once while it is in use."""

    def __init__(self, documents: Sequence[TokenIds], block_tokens: int) -> None:
        self._documents = documents
        self._block_tokens = block_tokens
        self._known: OrderedDict[int, list[BlockHash]] = OrderedDict()

    def of(self, document: int) -> list[BlockHash]:
        known = self._known
        if document not in known:
            content = array("I", self._documents[document].tobytes())
            known[document] = hash_blocks(content, self._block_tokens)
            if len(known) > MAX_HASHED_DOCUMENTS:
                known.popitem(last=False)
        known.move_to_end(document)
        return known[document]
