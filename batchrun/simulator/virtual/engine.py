"""vLLM's engine loop on a virtual clock: the real scheduler, a worker that only takes time.

As `EngineCore.step_with_batch_queue` with two steps in flight (vLLM 0.32): arrivals are taken in,
step N+1 is scheduled while step N runs, then the loop waits for the end of N and processes its
output. An arrival during N therefore enters step N+2. One step in flight is `EngineCore.step`.
Steps run one after the other; the same inputs give the same run to the last token.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable
from zlib import crc32

from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from xxhash import xxh3_128_digest

from batchrun.hints import HINT_KEY
from batchrun.simulator.virtual.setup import EngineShape, StepItem, StepLaw, build_scheduler

FIRST_TOKEN_ID, LAST_TOKEN_ID = 5, 2000
"""Token ids of prompts and outputs: no special token among them."""
STOP_TOKEN_ID = 2
"""Ends an answer that stops by itself."""

BlockHashes = list[BlockHash]

ONLINE_PRIORITY, OFFLINE_PRIORITY = 0, 10


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A request as it reaches the engine. Offline work carries a `hint`, online work none.

    The answer has `num_output_tokens` (None: all of `max_output_tokens`). `prefix_hashes` are the
    block hashes of its leading blocks, where they are known already.
    """

    request_id: str
    is_online: bool
    arrival_at_s: float
    prompt_token_ids: list[int]
    max_output_tokens: int
    hint: str | None = None
    prefix_hashes: Sequence[BlockHash] = ()
    num_output_tokens: int | None = None


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The life of one request. Instants are virtual seconds; None: has not happened.

    `token_times_s[i]` is when output token i left the engine. `num_hit_tokens` are the prompt
    tokens found in the KV cache at the first admission. The answer stops by itself with the
    token at `stop_position` of the text, if any. `request` is let go at the end.
    """

    request_id: str
    is_online: bool
    arrival_at_s: float
    num_prompt_tokens: int
    token_seed: int
    request: Request | None
    stop_position: int | None = None
    admitted_at_s: float | None = None
    finished_at_s: float | None = None
    finish_reason: str | None = None
    num_hit_tokens: int = 0
    num_ended_preemptions: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)

    @property
    def num_preemptions(self) -> int:
        """How often the request lost its blocks so far."""
        return self.request.num_preemptions if self.request else self.num_ended_preemptions


class BlockHasher:
    """vLLM's `block_hasher` of one request, with the hashes of its leading blocks given.

    The rows of a document share one list: hashing 1,250 blocks takes 0.9 ms, copying them 4 us.
    """

    __slots__ = ("_block_tokens", "_prefix_hashes")

    def __init__(self, block_tokens: int, prefix_hashes: Sequence[BlockHash]) -> None:
        self._block_tokens = block_tokens
        self._prefix_hashes = prefix_hashes

    def __call__(self, request: Request) -> list[BlockHash]:
        """The hashes of the full blocks that have none yet."""
        num_known = len(request.block_hashes)
        num_full = request.num_tokens // self._block_tokens
        if num_known >= num_full:
            return []
        new = list(self._prefix_hashes[:num_full]) if num_known == 0 else []
        parent = new[-1] if new else request.block_hashes[-1] if num_known else b""
        start = (num_known + len(new)) * self._block_tokens
        tokens = request.all_token_ids[start : num_full * self._block_tokens]
        return new + hash_blocks(array("I", tokens), self._block_tokens, parent)


def hash_blocks(token_ids: array[int], block_tokens: int, parent: bytes = b"") -> list[BlockHash]:
    """The chained hashes of the full blocks of `token_ids`, which follow the block `parent`."""
    content = memoryview(token_ids).cast("B")
    stride = block_tokens * token_ids.itemsize
    hashes: list[BlockHash] = []
    for start in range(0, len(content) - stride + 1, stride):
        parent = xxh3_128_digest(parent + content[start : start + stride])
        hashes.append(BlockHash(parent))
    return hashes


def begin(arrival: Arrival, block_tokens: int) -> RequestRecord:
    """The record of a request that has just arrived, with vLLM's request in it."""
    extra_args = None if arrival.hint is None else {HINT_KEY: arrival.hint}
    request = Request(
        request_id=arrival.request_id,
        prompt_token_ids=arrival.prompt_token_ids,
        sampling_params=SamplingParams(
            max_tokens=arrival.max_output_tokens,
            temperature=0,
            ignore_eos=True,
            extra_args=extra_args,
            stop_token_ids=None if arrival.num_output_tokens is None else [STOP_TOKEN_ID],
        ),
        pooling_params=None,
        arrival_time=arrival.arrival_at_s,
        priority=ONLINE_PRIORITY if arrival.is_online else OFFLINE_PRIORITY,
        block_hasher=BlockHasher(block_tokens, arrival.prefix_hashes),
    )
    num_prompt, num_output = len(arrival.prompt_token_ids), arrival.num_output_tokens
    return RequestRecord(
        request_id=arrival.request_id,
        is_online=arrival.is_online,
        arrival_at_s=arrival.arrival_at_s,
        num_prompt_tokens=num_prompt,
        token_seed=crc32(arrival.request_id.encode()),
        request=request,
        stop_position=None if num_output is None else num_prompt + num_output - 1,
    )


def token_id(record: RequestRecord, position: int) -> int:
    """The token that a request generates at a position of its text: the same at every try."""
    if position == record.stop_position:
        return STOP_TOKEN_ID
    return _generated(record.token_seed, position)


def answer_of(request_id: str, num_prompt_tokens: int, num_output_tokens: int) -> list[int]:
    """The answer that a request will get which stops by itself after so many tokens."""
    seed, stop = crc32(request_id.encode()), num_prompt_tokens + num_output_tokens - 1
    return [*(_generated(seed, place) for place in range(num_prompt_tokens, stop)), STOP_TOKEN_ID]


def _generated(seed: int, position: int) -> int:
    mixed = (seed ^ position * 2_654_435_761) * 2_246_822_519 & 0xFFFF_FFFF
    return FIRST_TOKEN_ID + (mixed >> 7) % (LAST_TOKEN_ID - FIRST_TOKEN_ID + 1)


@dataclass(slots=True)
class StepTotals:
    """Sums over the steps so far. A step that computes nothing counts as empty only.

    `online_share_sum` adds, per step, the share of its time that its online tokens cost: by the
    law without noise, [T(step) - T(step without them)] / T(step); 1 when nothing else ran, 0 for
    a step without time.
    Under Eq. 7 it can be negative: short online decodes lower the mean context of the batch.
    """

    num_steps: int = 0
    num_empty_steps: int = 0
    busy_s: float = 0.0
    online_share_sum: float = 0.0
    num_online_computed_tokens: int = 0
    num_offline_computed_tokens: int = 0

    def charge(self, law: StepLaw, online: list[StepItem], offline: list[StepItem]) -> float:
        """Count one step and return its duration in seconds."""
        duration_s = law.step_s(online + offline)
        self.num_steps += 1
        self.busy_s += duration_s
        self.num_online_computed_tokens += sum(item[0] for item in online)
        self.num_offline_computed_tokens += sum(item[0] for item in offline)
        if not offline:
            self.online_share_sum += 1.0
        elif online:
            expected = law.expected
            rest_s, whole_s = expected.step_s(offline), expected.step_s(online + offline)
            self.online_share_sum += 1.0 - rest_s / whole_s if whole_s else 0.0
        return duration_s


NO_TOKENS: list[int] = []

StepListener = Callable[[float, float, list[StepItem], list[StepItem]], None]
"""Told of each step that computes: its start and duration in seconds, and what it computed of
online and of offline requests."""


class TrafficSource(Protocol):
    """Who sends requests: the online users, or a daemon with a job."""

    @property
    def next_due_s(self) -> float:
        """When the next request arrives; infinity while none is to come."""

    def take_due(self, now_s: float) -> Sequence[Arrival]:
        """Hand over all requests that have arrived by now, once."""

    def on_finished(self, request_id: str) -> None:
        """Told of the end of every request, its own or not."""


@runtime_checkable
class ClockReader(Protocol):
    """A scheduler that reads a clock."""

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Take the time from here; arrivals are on the same scale."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How the engine's own work takes time.

    `planning_s` is charged per `schedule()`, and has passed when the scheduler reads the clock:
    stock vLLM takes 0.2 to 2 ms for 10 to 250 requests. `request_s` is charged as well for each
    request in the step before: the gap that a calibration measures (`StepGap`). `idle_poll_s` is
    vLLM's sleep after an empty step.
    """

    steps_in_flight: int = 2
    planning_s: float = 0.0005
    idle_poll_s: float = 0.001
    request_s: float = 0.0


DEFAULT_TIMING = Timing()


@dataclass(slots=True, eq=False)
class _Launched:
    output: SchedulerOutput
    result: ModelRunnerOutput
    end_s: float


class VirtualEngine:
    """One engine. `records` holds every request that ever arrived, by id.

    With `forgets_ended` it holds those that have not ended, and nothing grows with a run's length.
    `start_listeners` are called with the record of every request whose first token comes,
    `end_listeners` with that of every one that ends, its request still there.
    A scheduler that reads a clock (`ClockReader`) gets the virtual one before its first step.
    """

    def __init__(
        self,
        scheduler_cls: type[Scheduler],
        shape: EngineShape,
        law: StepLaw,
        sources: Sequence[TrafficSource] = (),
        timing: Timing = DEFAULT_TIMING,
        *,
        forgets_ended: bool = False,
    ) -> None:
        self.scheduler = build_scheduler(scheduler_cls, shape, is_async=timing.steps_in_flight > 1)
        self.now_s = 0.0
        self.records: dict[str, RequestRecord] = {}
        self.start_listeners: list[Callable[[RequestRecord], None]] = []
        self.end_listeners: list[Callable[[RequestRecord], None]] = []
        self.step_listener: StepListener | None = None
        self.totals = StepTotals()
        self._shape = shape
        self._law = law
        self._sources = sources
        self._timing = timing
        self._forgets_ended = forgets_ended
        self._in_flight: deque[_Launched] = deque()
        self._worker_free_at_s = 0.0
        self._num_before = 0
        if isinstance(self.scheduler, ClockReader):
            self.scheduler.use_clock(lambda: self.now_s)

    def run_until(self, end_s: float) -> None:
        """Run until the clock reaches `end_s` (infinity: until all work is done).

        The last step may end later.
        """
        while self.now_s < end_s:
            if self.step():
                continue
            wake_s = min(self.next_due_s(), end_s)
            if wake_s == math.inf:
                return
            self.now_s = max(self.now_s, wake_s)

    def next_due_s(self) -> float:
        """When the next request arrives; infinity while none is to come."""
        return min((source.next_due_s for source in self._sources), default=math.inf)

    def step(self) -> bool:
        """One turn of the engine loop; False when there is nothing to do now."""
        self._take_arrivals()
        is_launched = False
        if self.scheduler.has_requests():
            is_launched = self._launch()
            is_full = len(self._in_flight) >= self._timing.steps_in_flight
            if is_full or not (is_launched or self.scheduler.has_requests()):
                self._collect()
        elif self._in_flight:
            self._collect()
        else:
            return False
        if not is_launched and self.scheduler.has_requests():
            self.now_s += self._timing.idle_poll_s
        return True

    def add(self, arrival: Arrival) -> None:
        """Take a request in, now."""
        record = begin(arrival, self._shape.block_tokens)
        self.records[arrival.request_id] = record
        assert record.request is not None
        self.scheduler.add_request(record.request)

    def abort(self, request_id: str) -> None:
        """End a request as a lost client does."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        record = self.records[request_id]
        if record.finished_at_s is None:
            self._finish(record, "abort")

    def _take_arrivals(self) -> None:
        for source in self._sources:
            if source.next_due_s <= self.now_s:
                for arrival in source.take_due(self.now_s):
                    self.add(arrival)

    def _launch(self) -> bool:
        """Schedule a step and put it behind those in flight; False when it computes nothing."""
        self.now_s += self._timing.planning_s + self._timing.request_s * self._num_before
        output = self.scheduler.schedule()
        start_s = max(self.now_s, self._worker_free_at_s)
        self._num_before = len(output.num_scheduled_tokens)
        if output.total_num_scheduled_tokens == 0:
            self.totals.num_empty_steps += 1
            result = ModelRunnerOutput(req_ids=[], req_id_to_index={})
            self._in_flight.append(_Launched(output, result, start_s))
            return False
        for new in output.scheduled_new_reqs:
            self._admit(self.records[new.req_id], new.num_computed_tokens)
        result, duration_s = self._execute(output, start_s)
        self._worker_free_at_s = start_s + duration_s
        self._in_flight.append(_Launched(output, result, self._worker_free_at_s))
        return True

    def _admit(self, record: RequestRecord, num_hit_tokens: int) -> None:
        if record.admitted_at_s is None:
            record.admitted_at_s = self.now_s
            record.num_hit_tokens = num_hit_tokens

    def _execute(self, output: SchedulerOutput, start_s: float) -> tuple[ModelRunnerOutput, float]:
        """What the worker will answer, and how long it takes."""
        online: list[StepItem] = []
        offline: list[StepItem] = []
        sampled: list[list[int]] = []
        req_ids = list(output.num_scheduled_tokens)
        records = self.records
        for req_id, new in output.num_scheduled_tokens.items():
            record = records[req_id]
            request = record.request
            assert request is not None
            context = request.num_computed_tokens
            item = (new, context, new == 1 and context > record.num_prompt_tokens)
            (online if record.is_online else offline).append(item)
            is_chunk = request.is_prefill_chunk
            sampled.append(NO_TOKENS if is_chunk else [token_id(record, context)])
        index = {req_id: i for i, req_id in enumerate(req_ids)}
        result = ModelRunnerOutput(req_ids, index, sampled)
        duration_s = self.totals.charge(self._law, online, offline)
        if self.step_listener is not None:
            self.step_listener(start_s, duration_s, online, offline)
        return result, duration_s

    def _collect(self) -> None:
        """Wait for the oldest step in flight and process its output."""
        launched = self._in_flight.popleft()
        self.now_s = max(self.now_s, launched.end_s)
        by_client = self.scheduler.update_from_output(launched.output, launched.result)
        for outputs in by_client.values():
            for output in outputs.outputs:
                self._deliver(output)

    def _deliver(self, output: EngineCoreOutput) -> None:
        record = self.records[output.request_id]
        tokens = output.new_token_ids
        record.output_token_ids += tokens
        is_first = bool(tokens) and not record.token_times_s
        record.token_times_s += [self.now_s] * len(tokens)
        if is_first:
            for listener in self.start_listeners:
                listener(record)
        if output.finish_reason is not None:
            self._finish(record, str(output.finish_reason))

    def _finish(self, record: RequestRecord, reason: str) -> None:
        record.finished_at_s = self.now_s
        record.finish_reason = reason
        record.num_ended_preemptions = record.num_preemptions
        for listener in self.end_listeners:
            listener(record)
        record.request = None
        if self._forgets_ended:
            del self.records[record.request_id]
        for source in self._sources:
            source.on_finished(record.request_id)
