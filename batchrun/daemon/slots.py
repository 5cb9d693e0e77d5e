"""Where a row may go: the engines, with what is in flight on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from batchrun.config import WindowConfig
from batchrun.daemon.active_job import ActiveJob
from batchrun.daemon.backpressure import Backpressure
from batchrun.daemon.engine_link import EngineLink
from batchrun.engine import Engine, KvConfig
from batchrun.pool import Window
from batchrun.types import EngineState

SCHEDULER_WINDOW = (256, 2_000_000)
PLAIN_WINDOW = (32, 400_000)
"""(rows, prompt tokens) where batchrun.yaml says nothing."""


@dataclass(slots=True)
class Slot:
    """One engine as the dispatcher sees it, with what is in flight on it.

    `hint_nonce` and `link` are set where batchrun's scheduler runs inside it: rows then carry
    hints, and the engine can be watched and steered. `kv` is None until the engine has told it.
    """

    engine: Engine
    uses_priority: bool
    window: Window
    hint_nonce: str | None = None
    link: EngineLink | None = None
    kv: KvConfig | None = None
    pressure: Backpressure = field(default_factory=Backpressure)
    default_model: str | None = None
    is_suspect: bool = False
    is_solo: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether rows may be sent."""
        return self.engine.state is EngineState.READY and not self.is_suspect

    @property
    def block_tokens(self) -> int | None:
        """Tokens in a block of its KV; None where it does not tell."""
        return None if self.kv is None else self.kv.block_tokens

    @property
    def num_running(self) -> int:
        """Offline rows that the engine runs now, as far as it tells."""
        telemetry = None if self.link is None else self.link.telemetry
        return 0 if telemetry is None else telemetry.offline.num_running


@dataclass(frozen=True, slots=True)
class Assignment:
    """A row that was taken from its job's queue for an engine; its prompt has `tokens`.

    `is_urgent`: it goes before the rows that wait in the engine, because of its job's deadline.
    """

    job: ActiveJob
    row: int
    slot: Slot
    tokens: int
    is_urgent: bool = False


def window_of(config: WindowConfig, *, runs_scheduler: bool) -> Window:
    """The window of one engine.

    batchrun's scheduler chooses among many candidates; vLLM's own runs them as they come.
    """
    requests, tokens = SCHEDULER_WINDOW if runs_scheduler else PLAIN_WINDOW
    return Window(config.requests or requests, config.tokens or tokens)


@dataclass(frozen=True, slots=True)
class Place:
    """What a row asks for: its prefix group, its prompt tokens, and how it is to run.

    A `solo` row waits for an engine with nothing in flight; an urgent one has some room beyond the
    window.
    """

    group: int
    tokens: int
    is_solo: bool = False
    is_urgent: bool = False


def choose_slot(slots: Sequence[Slot], place: Place, now_s: float) -> Slot | None:
    """The engine that this prefix group goes to, or the least loaded when that one is full.

    None when no engine has room. `now_s` is monotonic.
    """
    usable = [slot for slot in slots if slot.is_usable]
    if not usable:
        return None
    preferred = usable[place.group % len(usable)]
    if _has_room(preferred, place, now_s):
        return preferred
    others = sorted(usable, key=lambda slot: slot.window.num_tokens)
    return next((slot for slot in others if _has_room(slot, place, now_s)), None)


def _has_room(slot: Slot, place: Place, now_s: float) -> bool:
    window = slot.window
    if window.num_rows and (place.is_solo or slot.is_solo):
        return False
    is_allowed = slot.pressure.allows(window.num_rows, now_s)
    return is_allowed and window.has_room(place.tokens, slot.num_running, is_urgent=place.is_urgent)
