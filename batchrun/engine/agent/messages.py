"""What daemon and agent tell each other: MessagePack over one WebSocket, a message a frame.

Fields may be added; unknown ones are ignored, since an agent may outlive the batchrun that started
it. Times are in seconds; instants are UTC epoch seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from batchrun.types import EnginePhase, Outcome
from batchrun.wire import MAX_MESSAGE_BYTES, RowKey

PREFIX = "/batchrun/agent/v1"
"""Where the agent's own routes begin; everything else is the engine's."""
LINK, STATE, LOG, DRAIN, STOP, RESTART = (
    PREFIX + name for name in ("/link", "/state", "/log", "/drain", "/stop", "/restart")
)

MAX_FRAME_BYTES = 160 << 20
"""A reply of an engine has 64 MiB at most, a row's body 128; a batch is sent once it is larger than
16."""
MAX_BATCH_BYTES = 16 << 20
MAX_ROW_BYTES = 128 << 20
"""Of the body of a row."""
HEARTBEAT_S = 5.0
"""Either end takes the other for gone when nothing has come from it for so long, nor in half as
long again what answers a ping."""
SIGN_S = 1.0
"""So often each says something: while it sends a large frame, its pings wait behind that."""

T = TypeVar("T")
WireMessage = Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)]


OWN = "own "
"""So begins the name of a store that one machine alone has."""


class Leadership(NamedTuple):
    """The store of a daemon, and in which term it leads there; sent with the question for `LINK`.
    An older daemon does not tell."""

    store: str = ""
    term: int = 0

    def may_follow(self, other: Leadership) -> bool:
        """Whether a daemon may take an agent over from the other, which is there: not where that
        one has led since, nor from one of another store, whose end it waits for."""
        return self.store == other.store and self.term >= other.term

    def was_succeeded_by(self, other: Leadership) -> bool:
        """Whether the other has led since on the same database."""
        is_shared = self.store == other.store and not self.store.startswith(OWN)
        return is_shared and self.term < other.term


class AgentState(Struct, frozen=True, tag="state"):
    """The agent and its engine, sent when it changes.

    `start_id` differs with every start of the agent, `started` with every start of the engine.
    `phase` and `stage` are the engine's. `place` is the machine and its network, as `here` names
    it: whoever is in the same place reaches the engine itself at `engine_url`, with the key that
    follows from the agent's secret where it `needs_key`. `last_steps` are the rows of the last
    steps of an engine that went down. `is_emptied`: the daemon wants calls to go elsewhere, where
    they can; None: the agent is too old to be told. `is_attached`: somebody else started it.
    """

    start_id: str
    version: str
    name: str
    phase: EnginePhase
    stage: str
    started: int
    engine_url: str
    place: str
    runs_scheduler: bool = False
    is_draining: bool = False
    last_steps: tuple[RowKey, ...] = ()
    needs_key: bool = False
    is_emptied: bool | None = None
    is_attached: bool = False


class HeardTelemetry(Struct, frozen=True, tag="telemetry"):
    """A message of the engine's scheduler, as `wire` has it."""

    message: WireMessage


class HeardAnswer(Struct, frozen=True, tag="answer"):
    """The scheduler's answer to orders, as `wire` has it."""

    message: WireMessage


class SendOrders(Struct, frozen=True, tag="orders"):
    """Orders for the engine's scheduler, as `wire` has them."""

    message: WireMessage


class EmptyEngine(Struct, frozen=True, tag="empty"):
    """Whether the engine is to be emptied, for as long as this daemon is there."""

    is_on: bool


class SentRow(Struct, frozen=True, array_like=True):
    """A row for the engine. `body` is the JSON that it gets; `timeout_s` None: it may take as long
    as it likes. What was made from another `content` is not this row's."""

    job_id: str
    row: int
    attempt: int
    epoch: int
    endpoint: str
    body: bytes
    timeout_s: float | None = None
    content: str = ""

    @property
    def key(self) -> RowKey:
        return self.job_id, self.row


class SendRows(Struct, frozen=True, tag="rows"):
    """Rows to run. One that the agent has already, of the same content, is not run again."""

    rows: tuple[SentRow, ...]


class ForgetRows(Struct, frozen=True, tag="forget"):
    """Rows that are not wanted any more, or whose outcomes are committed."""

    keys: tuple[RowKey, ...]


class HeldRows(Struct, frozen=True, tag="held"):
    """All rows that the agent has, running or with an outcome, when a daemon comes, and the
    `contents` that they were made from; an older agent does not tell these."""

    keys: tuple[RowKey, ...]
    contents: tuple[str, ...] = ()


class EndedRows(Struct, frozen=True, tag="ended"):
    """Outcomes, kept until they are forgotten."""

    outcomes: tuple[Outcome, ...]


FromAgent = AgentState | HeardTelemetry | HeardAnswer | HeldRows | EndedRows
FromDaemon = SendOrders | SendRows | ForgetRows | EmptyEngine

_FROM_AGENT: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
_FROM_DAEMON: msgspec.msgpack.Decoder[FromDaemon] = msgspec.msgpack.Decoder(FromDaemon)
encode = msgspec.msgpack.Encoder().encode


def in_batches(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Items in messages of at most so many, that are not too large."""
    batch: list[T] = []
    num_bytes = 0
    for item in items:
        batch.append(item)
        num_bytes += size_of(item)
        if num_bytes > MAX_BATCH_BYTES or len(batch) == most:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def read_from_agent(frame: bytes) -> FromAgent:
    """A message of an agent. Raises ValueError when it is none."""
    try:
        return _FROM_AGENT.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"a message that cannot be read: {error}") from error


def read_state(document: bytes) -> AgentState:
    """What `STATE` answers. Raises ValueError when it is none."""
    try:
        return msgspec.json.decode(document, type=AgentState)
    except msgspec.DecodeError as error:
        raise ValueError(f"a state that cannot be read: {error}") from error


def read_from_daemon(frame: bytes) -> FromDaemon:
    """A message of a daemon. Raises ValueError when it is none."""
    try:
        return _FROM_DAEMON.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"a message that cannot be read: {error}") from error


def here() -> str:
    """This machine since its start, and the network that its processes see."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot_id} {Path('/proc/self/ns/net').stat().st_ino}"
