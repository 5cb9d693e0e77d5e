"""What daemon and engine tell each other beside HTTP: telemetry one way, orders and answers back.

MessagePack over ZeroMQ, on two unix sockets of the engine in a folder that only their owner can
enter. Fields may be added; unknown ones are ignored, since an engine may outlive the batchrun that
started it. `LastSteps` is what an engine leaves to the daemon when it dies.
"""

from __future__ import annotations

import hmac
import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

CHANNEL_VARIABLE = "BATCHRUN_CHANNEL"
"""The environment variable that tells an engine the path of its sockets, without their endings."""
TELEMETRY_SUFFIX = ".telemetry"
ORDERS_SUFFIX = ".orders"

MAX_MESSAGE_BYTES = 65_536
MAX_JOBS = 1_024
REST_BYTES, HEAD_BYTES = 1_024, 2
"""What orders take at most beside names of jobs, and one of these beside its characters."""
MAX_CALLS_SENT = 1_000
MAX_TOLD = 2**31
"""Of what an engine tells of its size."""

PolicyName = Annotated[str, Meta(max_length=64)]
JobName = Annotated[str, Meta(max_length=128)]
JobNames = Annotated[tuple[JobName, ...], Meta(max_length=MAX_JOBS)]


class ClassTelemetry(Struct):
    """One class of requests: `num_running`, `num_waiting` and `longest_wait_s` are of now, the
    rest counts since the engine's start.

    `num_prompt_tokens` and `num_hit_tokens` are of first admissions only.
    """

    num_running: int = 0
    num_waiting: int = 0
    longest_wait_s: float = 0.0
    num_admissions: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_computed_tokens: int = 0


class LatencyTelemetry(Struct):
    """Online first tokens and gaps between tokens: counts, and sums of their seconds."""

    num_first_tokens: int = 0
    ttft_s: float = 0.0
    num_gaps: int = 0
    gaps_s: float = 0.0


class SloTelemetry(Struct):
    """How online requests fare against their bounds.

    `slack_s` is the least time that was left when an online token came (negative: it came too
    late) or is left for one that is awaited, since the last report; None without online work.
    The counts are since the engine's start; a late token is one after arrival + TTFT + i * TPOT.
    `num_overdue` are the calls that wait now for a first token that is late already,
    `num_left_out` those that the order of calls has given up: they are late or are sure to be.
    """

    slack_s: float | None = None
    num_tokens: int = 0
    num_late_tokens: int = 0
    num_late_first_tokens: int = 0
    num_overdue: int = 0
    num_left_out: int = 0


class KvTelemetry(Struct, frozen=True):
    """Who holds the KV blocks. The tiers are None where vLLM's own free queue is in place.

    `online_blocks` are those that online requests hold, shared ones counted once; what else is in
    use is offline. The tiers share `free_blocks` out, from the first evicted to the last: empty,
    cached but unneeded, of finished calls (flex ones too), wanted by planned rows, prefixes that
    online requests hit again and again. `empty_blocks` counts content that is cached twice too, and
    may be too high by a block for each running request. `reserve_blocks` are meant for online
    requests, what they hold now included.
    """

    total_blocks: int = 0
    online_blocks: int = 0
    offline_blocks: int = 0
    free_blocks: int = 0
    empty_blocks: int | None = None
    unneeded_blocks: int | None = None
    finished_online_blocks: int | None = None
    wanted_blocks: int | None = None
    online_prefix_blocks: int | None = None
    reserve_blocks: int = 0
    forecast_blocks: int | None = None


class StepTelemetry(Struct):
    """Steps since the engine's start; `predicted_s` and `measured_s` are sums over the
    `num_timed_steps`, of which the largest, the last of those, had `largest_tokens`."""

    num_steps: int = 0
    num_timed_steps: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    longest_s: float = 0.0
    largest_s: float = 0.0
    largest_tokens: int = 0


class CostTelemetry(Struct, frozen=True):
    """TTFT and TPOT of the online calls of the last five minutes, at p50 and p99, and what the
    same calls would have had without offline work, as predicted (`alone`). None without calls.

    `online_cost` is the most that the former may be times the latter; None: nobody says.
    `num_calls` is how many got their first token, the last 512 at most.
    """

    online_cost: float | None = None
    num_calls: int = 0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    alone_ttft_p50_s: float | None = None
    alone_ttft_p99_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p99_s: float | None = None
    alone_tpot_p50_s: float | None = None
    alone_tpot_p99_s: float | None = None


Count = Annotated[int, Meta(ge=0)]


class FeltCalls(Struct, frozen=True):
    """How online calls of an engine came to their callers, counted by the gateway since it began:
    those whose first token was seen, and answers of two tokens and more; late: beyond their bound
    for TTFT, for TPOT."""

    num_first: Count = 0
    num_late_first: Count = 0
    num_answers: Count = 0
    num_late_answers: Count = 0

    def follows(self, before: FeltCalls) -> bool:
        """Whether these counts can be later ones of the same gateway."""
        return (
            self.num_first >= before.num_first
            and self.num_late_first >= before.num_late_first
            and self.num_answers >= before.num_answers
            and self.num_late_answers >= before.num_late_answers
        )


class MarginTelemetry(Struct, frozen=True):
    """What steps beside rows leave of the bounds of calls, in seconds of the default ones."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


class Telemetry(Struct, frozen=True):
    """What an engine says of itself, a few times a second. Instants are UTC epoch seconds.

    `start_id` differs with every start: counts begin again with it. `num_answers` of calls have
    ended since their length first counted; `num_longer_answers` were longer than nine of ten were
    expected to be. At most `max_running` requests run at once; 0: it does not tell. While vLLM is
    paused, only what runs gets steps (`pause` 1), or nothing does (2).
    """

    start_id: str
    sent_at: float
    policy: str
    token_budget: Annotated[int, Meta(ge=0, le=MAX_TOLD)]
    is_offline_on: bool
    online: ClassTelemetry = field(default_factory=ClassTelemetry)
    offline: ClassTelemetry = field(default_factory=ClassTelemetry)
    shared: LatencyTelemetry = field(default_factory=LatencyTelemetry)
    """Online tokens of steps that held offline work too."""
    alone: LatencyTelemetry = field(default_factory=LatencyTelemetry)
    slo: SloTelemetry = field(default_factory=SloTelemetry)
    cost: CostTelemetry = CostTelemetry()
    step: StepTelemetry = field(default_factory=StepTelemetry)
    kv: KvTelemetry = KvTelemetry()
    margin: MarginTelemetry = MarginTelemetry()
    num_answers: int = 0
    num_longer_answers: int = 0
    num_malformed_hints: int = 0
    num_policy_errors: int = 0
    num_malformed_orders: int = 0
    online_queue: PolicyName = "auto"
    max_running: Annotated[int, Meta(ge=0, le=MAX_TOLD)] = 0
    pause: Annotated[int, Meta(ge=0, le=2)] = 0


class Orders(Struct, frozen=True):
    """All that the daemon wants of an engine, every time: the newest orders alone count.

    `nonce` is the hints' secret. `epoch` is the start of the daemon and `number` counts its
    orders. `policy`, `token_budget` and `online_queue` None: as the engine was started; a policy or
    a queue that it does not have, it refuses. `renew` and `forget` name the jobs whose hints count
    for another lease, or no longer. `is_recording`: keep arrival and lengths of online calls; with
    `calls_from` the answer has those from this number on. `felt`: what the gateway saw of its
    calls, None where it told nothing.
    """

    nonce: Annotated[str, Meta(max_length=256)]
    epoch: Annotated[int, Meta(ge=0)]
    number: Annotated[int, Meta(ge=0)]
    policy: PolicyName | None = None
    token_budget: int | None = None
    is_offline_on: bool = True
    renew: JobNames = ()
    forget: JobNames = ()
    is_recording: bool = False
    calls_from: Annotated[int, Meta(ge=0)] | None = None
    online_queue: PolicyName | None = None
    felt: FeltCalls | None = None


def num_that_fit(jobs: Sequence[str], others: Iterable[str]) -> int:
    """How many of the first of these jobs orders have room for that name the others too."""
    left_bytes = MAX_MESSAGE_BYTES - REST_BYTES - sum(len(job) + HEAD_BYTES for job in others)
    sizes_bytes = accumulate(len(job) + HEAD_BYTES for job in jobs)
    return min(MAX_JOBS, sum(size_bytes <= left_bytes for size_bytes in sizes_bytes))


class RecordedCall(Struct, frozen=True, array_like=True):
    """An online call that has ended; `arrived_at` in UTC epoch seconds."""

    arrived_at: float
    num_prompt_tokens: int
    num_output_tokens: int


class RecordedCalls(Struct, frozen=True):
    """Online calls in the order of their ends, numbered from 0; the first here is `first_number`.

    `id` differs with every start of the engine and of recording: numbers begin again with it.
    There may be more than the `MAX_CALLS_SENT` of one answer. `oldest_open_at` is the arrival of
    the first of the calls that are recorded and have not ended, None without any.
    """

    id: str
    first_number: int
    calls: tuple[RecordedCall, ...] = ()
    oldest_open_at: float | None = None


class Answer(Struct, frozen=True):
    """What is in force from the engine's next step on; with `error`, the orders changed nothing.

    `number` is that of the orders, 0 when they could not be read. `recording` answers orders that
    ask for calls.
    """

    number: int
    policy: str
    token_budget: int
    is_offline_on: bool
    error: str | None = None
    recording: RecordedCalls | UnsetType = UNSET
    online_queue: PolicyName = "auto"


class OrdersError(ValueError):
    """Orders that cannot be read or were not sent by this engine's daemon; one line."""


def encode(message: Telemetry | Orders | Answer) -> bytes:
    """A message as it goes over the wire."""
    return msgspec.msgpack.encode(message)


def read_orders(message: bytes, nonce: str) -> Orders:
    """Orders from the wire. Raises OrdersError unless they carry the nonce and are well formed."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise OrdersError(f"orders of {len(message)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        orders = msgspec.msgpack.decode(message, type=Orders)
    except (msgspec.DecodeError, RecursionError) as error:
        raise OrdersError(f"malformed orders: {error}") from error
    if not nonce or not hmac.compare_digest(orders.nonce.encode(), nonce.encode()):
        raise OrdersError("orders without this engine's nonce")
    return orders


Message = TypeVar("Message", Telemetry, Answer)


def read_message(message: bytes, kind: type[Message]) -> Message:
    """Telemetry or an answer from the wire. Raises ValueError when malformed or too long."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(message)} bytes")
    try:
        return msgspec.msgpack.decode(message, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


RowKey = tuple[str, int]
"""Job id and row."""

NUM_STEPS = 3
"""Two steps may be under way at once, and the output of a third one be read."""
NUM_SLOTS = NUM_STEPS + 1
MAX_LABEL_BYTES = 128
SUFFIX = ".steps"
_HEADER = struct.Struct("<QQ")
_EMPTY = _HEADER.pack(0, 0)


def make_label(job: str, row: int) -> bytes:
    """A row as `LastSteps.note` takes it."""
    return b"%b %d" % (job.encode(), row)


class LastSteps:
    """Which rows an engine scheduled in its last steps, in a file that outlives the engine.

    The scheduler writes to memory that is mapped to the file, so every death but the machine's
    leaves what was written last. `NUM_SLOTS` slots are used in turn, one for each step that had
    work; each is a header (number of the step, bytes of text) and one line per row, `JOB ROW`. The
    header is written last: a slot that was being written at the death counts as empty, and the
    `NUM_STEPS` steps before it are whole. Raises OSError when the file cannot be made at `path`;
    one that is there is replaced: an engine that still has it may write on without harm.
    """

    def __init__(self, path: Path, max_rows: int) -> None:
        """With room for `max_rows` rows a step."""
        self._slot_bytes = _HEADER.size + max_rows * MAX_LABEL_BYTES
        self._num_steps = 0
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # A hole in its place would end the engine, by SIGBUS, on a disk that is full.
            os.posix_fallocate(descriptor, 0, NUM_SLOTS * self._slot_bytes)
            self._memory = mmap.mmap(descriptor, NUM_SLOTS * self._slot_bytes)
        finally:
            os.close(descriptor)

    def note(self, labels: Iterable[bytes]) -> None:
        """A step with these offline rows, or with none, goes to the engine. What has no room in
        the slot is left out."""
        text = b"\n".join(labels)[: self._slot_bytes - _HEADER.size]
        slot = self._num_steps % NUM_SLOTS * self._slot_bytes
        self._num_steps += 1
        start = slot + _HEADER.size
        self._memory[slot:start] = _EMPTY
        self._memory[start : start + len(text)] = text
        self._memory[slot:start] = _HEADER.pack(self._num_steps, len(text))

    def close(self) -> None:
        """The file stays."""
        self._memory.close()


def read_last_steps(path: Path) -> frozenset[RowKey]:
    """The rows of the last `NUM_STEPS` steps of an engine that is dead; none where nothing can be
    known. Blocking, but short."""
    try:
        content = path.read_bytes()
    except OSError:
        return frozenset()
    slot_bytes = len(content) // NUM_SLOTS
    slots = [content[slot_bytes * number :][:slot_bytes] for number in range(NUM_SLOTS)]
    steps = sorted((_read_slot(slot) for slot in slots), reverse=True)
    return frozenset(key for _, text in steps[:NUM_STEPS] for key in _read_rows(text))


def _read_slot(slot: bytes) -> tuple[int, bytes]:
    if len(slot) < _HEADER.size:
        return 0, b""
    number, num_bytes = _HEADER.unpack_from(slot)
    return number, slot[_HEADER.size :][:num_bytes]


def _read_rows(text: bytes) -> Iterable[RowKey]:
    for line in text.decode(errors="replace").splitlines():
        job, _, row = line.rpartition(" ")
        if row.isdecimal():
            yield job, int(row)
