"""Where a row may go: the engines, with what is in flight on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchrun.config import WindowConfig
from batchrun.daemon.engine_link import EngineLink
from batchrun.daemon.faults import SOLO, Backpressure, Trials, accuse_rows
from batchrun.daemon.job import ActiveJob
from batchrun.engine.client import KvConfig
from batchrun.engine.engine import Engine
from batchrun.pool.window import Window
from batchrun.routing.router import Call, Load, Router
from batchrun.types import EngineState
from batchrun.wire import RowKey, read_last_steps

SCHEDULER_WINDOW = (256, 2_000_000)
PLAIN_WINDOW = (32, 400_000)
"""(rows, prompt tokens) where batchrun.yaml says nothing."""
GATEWAYS_LEARN_S = 2.0
"""Gateways look at the list of engines four times a second; one may be busy."""
LEAVING_S = 300.0


@dataclass(slots=True)
class Slot:
    """One engine as the dispatcher sees it, with what is in flight on it.

    `hint_nonce`, `link` and `last_steps` are set where batchrun's scheduler runs inside it: rows
    then carry hints, the engine can be watched and steered, and a dead one leaves a file that says
    what it ran. `kv` is None until the engine has told it. While `is_down` it gets no rows;
    `accused` are the rows that it may have died of, None until that was looked into. While it
    `is_set_apart` only suspects go to it; since `apart_since_s` (monotonic) the gateways know it.
    """

    engine: Engine
    uses_priority: bool
    window: Window
    hint_nonce: str | None = None
    link: EngineLink | None = None
    last_steps: Path | None = None
    kv: KvConfig | None = None
    pressure: Backpressure = field(default_factory=Backpressure)
    default_model: str | None = None
    is_down: bool = False
    accused: Sequence[Assignment] | None = None
    is_set_apart: bool = False
    apart_since_s: float | None = None
    in_flight: dict[RowKey, Assignment] = field(default_factory=dict)
    _limits: dict[RowKey, int] = field(default_factory=dict)

    @property
    def is_usable(self) -> bool:
        """Whether rows may be sent."""
        return self.engine.state is EngineState.READY and not self.is_down

    @property
    def block_tokens(self) -> int | None:
        """Tokens in a block of its KV; None where it does not tell."""
        return None if self.kv is None else self.kv.block_tokens

    @property
    def num_running(self) -> int:
        """Offline rows that the engine runs now, as far as it tells."""
        telemetry = None if self.link is None else self.link.telemetry
        return 0 if telemetry is None else telemetry.offline.num_running

    def is_left_alone(self, now_s: float) -> bool:
        """Whether online calls and other rows have left an engine that is set apart (monotonic).

        Calls that do not end are not waited for longer than `LEAVING_S`.
        """
        if self.apart_since_s is None or len(self._limits) < len(self.in_flight):
            return False
        apart_s = now_s - self.apart_since_s
        return apart_s >= (LEAVING_S if self._num_calls() else GATEWAYS_LEARN_S)

    def _num_calls(self) -> int:
        """Calls that the engine has beside our rows, as far as it tells: online ones, and those
        that run as offline work."""
        telemetry = None if self.link is None else self.link.telemetry
        if telemetry is None:
            return 0
        online, offline = telemetry.online, telemetry.offline
        num_flex = max(0, offline.num_running + offline.num_waiting - len(self.in_flight))
        return online.num_running + online.num_waiting + num_flex

    def take(self, assignment: Assignment, now_s: float) -> None:
        """A row goes to the engine. `now_s` is monotonic."""
        self.in_flight[assignment.key] = assignment
        limit = assignment.trials.limits.get(assignment.row)
        if limit is not None:
            self._limits[assignment.key] = limit
        self.window.add(assignment.tokens, now_s)

    def release(self, assignment: Assignment) -> None:
        """The row is in the engine no longer."""
        del self.in_flight[assignment.key]
        self._limits.pop(assignment.key, None)
        self.window.remove(assignment.tokens)

    def accuse(self) -> Sequence[Assignment]:
        """The engine died: find the rows that it may have died of, all of them suspects now."""
        last = frozenset() if self.last_steps is None else read_last_steps(self.last_steps)
        self.accused = [self.in_flight[key] for key in accuse_rows(self.in_flight, last)]
        return self.accused

    def came_back(self) -> None:
        """The engine answers: rows may go to it."""
        self.is_down, self.accused = False, None

    def has_room_for(self, place: Place, now_s: float) -> bool:
        """Whether a row that asks for this may go now (monotonic)."""
        if not (self._lets_in(place.limit) and self.pressure.allows(len(self.in_flight), now_s)):
            return False
        return self.window.has_room(place.tokens, self.num_running, is_urgent=place.is_urgent)

    def has_room_to_lend(self, place: Place, now_s: float) -> bool:
        """Whether a row of another engine's prefix group may go now (monotonic).

        Where batchrun's scheduler runs, what waits beyond a small choice adds nothing.
        """
        if not self.has_room_for(place, now_s):
            return False
        is_bound = self.hint_nonce is not None and place.limit is None and not place.is_urgent
        return not is_bound or self.window.has_room_to_lend(place.tokens, self.num_running)

    def _lets_in(self, limit: int | None) -> bool:
        """Whether the suspects among the rows in flight allow another row, of this limit."""
        limits = self._limits.values()
        if limit is None:
            return SOLO not in limits
        if limit == SOLO and self.in_flight:
            return False
        return len(limits) < min([limit, *limits])


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

    @property
    def key(self) -> RowKey:
        """What the engine knows the row by."""
        return self.job.record.id, self.row

    @property
    def trials(self) -> Trials:
        """The suspects of its job."""
        return self.job.trials


def window_of(config: WindowConfig, *, runs_scheduler: bool) -> Window:
    """The window of one engine.

    batchrun's scheduler chooses among many candidates; vLLM's own runs them as they come.
    """
    requests, tokens = SCHEDULER_WINDOW if runs_scheduler else PLAIN_WINDOW
    return Window(config.requests or requests, config.tokens or tokens)


@dataclass(frozen=True, slots=True)
class Place:
    """What a row asks for: its prefix group, its prompt tokens, and how it is to run.

    `limit` is that of a suspect (see `Trials`); an urgent row has some room beyond the window.
    """

    group: int
    tokens: int
    limit: int | None = None
    is_urgent: bool = False


def choose_slot(slots: Sequence[Slot], place: Place, router: Router, now_s: float) -> Slot | None:
    """The engine that the router ranks first, or the best of the others when that one is full and
    this one has little to do.

    None when no engine has room. `now_s` is monotonic.
    """
    loads = {
        index: Load(slot.window.num_rows, slot.window.num_tokens)
        for index, slot in enumerate(slots)
        if slot.is_usable and not slot.is_set_apart
    }
    call = Call(place.tokens, is_offline=True, group=place.group)
    ranked = [slots[index] for index in router.rank(call, loads, now_s)]
    if ranked and ranked[0].has_room_for(place, now_s):
        return ranked[0]
    return next((slot for slot in ranked if slot.has_room_to_lend(place, now_s)), None)
