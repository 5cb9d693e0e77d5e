"""The vocabulary: frozen values that cross module borders. Nobody mutates what it is handed.

Data travels one way: store row -> `Request` -> pool -> engine -> `Outcome` -> store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

JsonObject = Mapping[str, object]

DEFAULT_MODEL = "default"
"""The model of rows that name none: the first one of the first engine."""
USUAL_OUTPUT_TOKENS = 128
"""A first guess of an answer's length, while none of the same job is known."""

DEFAULT_CLASS = "default"
"""The SLO class of online calls that name none."""

OFFLINE_OFF = "waiting: offline work is off (`batchrun offline on`)"
"""The stage of a job that would run otherwise."""


class JobState(StrEnum):
    """The life of a job; `store/jobs.py` draws the transitions and holds one function for each."""

    VALIDATING = "validating"
    RUNNING = "running"
    PAUSED = "paused"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        """Whether the job never changes again."""
        return self in TERMINAL_JOB_STATES


TERMINAL_JOB_STATES = frozenset({
    JobState.COMPLETED,
    JobState.FAILED,
    JobState.CANCELLED,
    JobState.EXPIRED,
})


class RequestClass(StrEnum):
    """Latency-bound with an SLO, or throughput-bound with at most a deadline."""

    ONLINE = "online"
    OFFLINE = "offline"


class EnginePhase(StrEnum):
    """The life of one engine as the daemon sees it."""

    STARTING = "starting"
    READY = "ready"
    UNREACHABLE = "unreachable"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class OutcomeKind(StrEnum):
    """What one execution of a row means for the row and its job."""

    OK = "ok"
    """A 2xx with a usable body: the row is done."""
    ROW_ERROR = "row_error"
    """The row itself is at fault (400, 413, 422, template error): it ends with its error."""
    RETRY = "retry"
    """Nobody's fault (5xx, lost connection, finish_reason abort): try again with backoff."""
    BUSY = "busy"
    """The engine takes no more now (429, 503): the row waits, and the engine gets fewer rows."""
    JOB_ERROR = "job_error"
    """The setting is at fault (401, 403, 404): every row would fail alike; the job pauses."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt on its way to an engine.

    `endpoint` is the path with `/v1`; `body` is the OpenAI body, `model` included; `attempt`
    starts at 1; `epoch` is the daemon start that sends it, so that ids never repeat. `content`
    names the input that the row comes from.
    """

    job_id: str
    row: int
    attempt: int
    epoch: int
    endpoint: str
    body: JsonObject
    content: str = ""

    @property
    def request_id(self) -> str:
        """The `X-Request-Id` the engine sees."""
        return f"batchrun-{self.epoch}-{self.job_id}-{self.row}-{self.attempt}"


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a row has no answer. `status_code` is None when there was no HTTP reply.

    `type` and `param` are those of the engine's error, where it gave any.
    """

    code: str
    message: str
    status_code: int | None = None
    type: str | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts that the engine returned for one row, and in how many answers; 0 where it told
    none."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_choices: int = 0


MAX_TOLD_TOKENS = (1 << 31) - 1


def token_count(value: object) -> int:
    """A number of tokens, out of what an engine told; 0 for what can be none."""
    return value if type(value) is int and 0 <= value <= MAX_TOLD_TOKENS else 0


def token_count_in(digits: str) -> int:
    """As `token_count`, of a number that is told as text."""
    is_number = digits.isdecimal() and len(digits) <= len(str(MAX_TOLD_TOKENS))
    return token_count(int(digits)) if is_number else 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one execution of a row; `attempt` is 0 when the row could not even be sent.

    `body` is the engine's JSON reply, byte for byte, when `kind` is OK (else None);
    `error` is set otherwise. `duration_s` is the time from send to last byte.
    `retry_after_s` is the engine's `Retry-After`, when it sent one. `content` is the request's,
    where an agent kept the outcome.
    """

    job_id: str
    row: int
    attempt: int
    kind: OutcomeKind
    body: bytes | None = None
    error: RowError | None = None
    finish_reason: str | None = None
    usage: Usage = Usage()
    duration_s: float = 0.0
    retry_after_s: float | None = None
    content: str = ""


class ProgressSink(Protocol):
    """Told of the progress of something slow. Called seldom (a few times a second)."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`total` is 0 when unknown; `done` and `total` are in the stage's own unit."""
        ...
