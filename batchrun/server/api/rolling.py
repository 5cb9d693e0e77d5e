"""`batchrun engine restart --rolling`: engines one at a time, each emptied first."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from batchrun.config import Deployment
from batchrun.daemon.daemon import Daemon
from batchrun.daemon.engine_link import Slot
from batchrun.daemon.fleets import Fleets, begin_draining, empty, end_draining
from batchrun.daemon.in_flight import GATEWAYS_LEARN_S
from batchrun.daemon.supervisor import build_model, make_managed
from batchrun.engine.agent.engine import AgentEngine
from batchrun.engine.command import ManagedSettings
from batchrun.engine.engine import AttachedEngine, ManagedEngine
from batchrun.engine.fleet_messages import ReplicaSpec
from batchrun.engine.replicas import ReplicaEngine
from batchrun.errors import BatchrunError, ConfigError, EngineError, StateError
from batchrun.home import Home
from batchrun.types import EnginePhase

log = logging.getLogger(__name__)

LOOK_S = 0.5
ROLLING = "its restart"
AGENT_BACK_S = 60.0
"""An agent that begins anew is silent for no longer."""
PLACED_S = 300.0
"""Ray has placed a replica anew, and its agent answers, within so long."""
TOLD_S = 60.0
"""An engine that is there says within so long which models it has."""
COMING = frozenset({EnginePhase.STARTING, EnginePhase.RESTARTING})
ALONE = (
    "not restarted, for each alone has a model: {}; have another ready that has it, use `batchrun"
    " down` and `batchrun up`, or restart an agent where it runs"
)


@dataclass(slots=True)
class Rolling:
    """Restarts the engines of a deployment as `reread` finds them described now.

    Leaves one out that alone has a model, and stops at the first that does not come back; `failure`
    says so. What was told of each engine is in `told`, in the order of its happening.
    """

    daemon: Daemon
    fleets: Fleets
    home: Home
    reread: Callable[[], Deployment]
    told: list[str] = field(default_factory=list)
    failure: str | None = None
    _alone: list[str] = field(default_factory=list)
    _before: dict[str, frozenset[str]] = field(default_factory=dict)
    _beginning: asyncio.Lock = field(default_factory=asyncio.Lock)
    _running: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether none goes on."""
        return self._running is None or self._running.done()

    async def begin(self, drain_s: float) -> None:
        """Begin; calls that an engine has for longer than `drain_s` are broken off. Raises
        StateError while another goes on, ConfigError for what needs all engines to end."""
        if self._beginning.locked() or not self.is_over:
            raise StateError("a rolling restart goes on already; wait for its end")
        async with self._beginning:
            deployment = await asyncio.to_thread(self.reread)
            settings = self._settings(deployment)
            specs = await asyncio.to_thread(self.fleets.reread, deployment)
            await asyncio.to_thread(build_model, deployment, self.home)
            self.told, self.failure, self._alone = [], None, []
            slots = self.daemon.slots
            self._before = {slot.engine.name: frozenset(slot.models or ()) for slot in slots}
            self._running = asyncio.create_task(self._roll(settings | specs, drain_s))

    def _settings(self, deployment: Deployment) -> dict[str, ManagedSettings | ReplicaSpec]:
        """Of the engines that batchrun starts here, by name."""
        found: dict[str, ManagedSettings | ReplicaSpec] = {}
        for slot in self.daemon.slots:
            engine = slot.engine
            if not isinstance(engine, ManagedEngine):
                continue
            new = make_managed(deployment, self.home, engine.name, slot.hint_nonce)
            if new is None or (new.base_url, new.api_key) != (
                engine.settings.base_url,
                engine.settings.api_key,
            ):
                raise ConfigError(
                    f"engine {engine.name}: has another address, key, policy or kind in "
                    "batchrun.yaml by now; that takes `batchrun down` and `batchrun up`"
                )
            found[engine.name] = new
        return found

    async def _roll(
        self, settings: Mapping[str, ManagedSettings | ReplicaSpec], drain_s: float
    ) -> None:
        try:
            for slot in sorted(self.daemon.slots, key=_may_have_calls):
                new = settings.get(slot.engine.name)
                if isinstance(new, ReplicaSpec) and not _has_agent(slot):
                    self.fleets.prepare(slot.engine.name, new)
                if slot.engine.state is EnginePhase.STOPPED or not _has_agent(slot):
                    continue
                if isinstance(slot.engine, AttachedEngine):
                    self._tell(slot, "is not started by batchrun, and is left as it is")
                    continue
                await self._restart(slot, new, drain_s)
        except BatchrunError as error:
            self.failure = "; ".join(filter(None, (self.failure, str(error))))
            log.error("the rolling restart ends: %s", error)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}; the daemon's log says where"
            log.exception("the rolling restart ends")

    async def _restart(
        self, slot: Slot, settings: ManagedSettings | ReplicaSpec | None, drain_s: float
    ) -> None:
        name = slot.engine.name
        if not await self._may_leave(slot):
            return
        begin_draining(slot, ROLLING)
        try:
            self._tell(slot, "gets no more calls and rows")
            num_left = await empty(slot, drain_s)
            what = "restarts"
            if isinstance(slot.engine, AgentEngine) and slot.engine.is_attached:
                what = "has its agent restarted, and is left as it is"
            self._tell(slot, f"{what}{', calls it may have are broken off' if num_left else ''}")
            if isinstance(slot.engine, AgentEngine):
                before = _start_of(slot.engine)
                if isinstance(settings, ReplicaSpec):
                    await self._place_anew(name, settings)
                else:
                    await slot.engine.client.begin_anew()
                await _until_back(slot.engine, before)
            elif isinstance(slot.engine, ManagedEngine) and isinstance(settings, ManagedSettings):
                await _restart_here(slot.engine, settings)
        finally:
            end_draining(slot, ROLLING)
            self.daemon.dispatcher.wake()
        slot.came_back()
        self._tell(slot, "is ready" if _is_wanted(slot.engine) else "is not wanted any more")
        await asyncio.sleep(GATEWAYS_LEARN_S)

    async def _may_leave(self, slot: Slot) -> bool:
        """Whether it serves nothing now, or others can take its calls, once those are there."""
        began_s = None
        while _may_have_calls(slot):
            others = [each for each in self.daemon.slots if each is not slot and not each.is_lost]
            others = [each for each in others if self._share_models(each, slot)]
            lacking = self._find_lacking(slot, others)
            if lacking or not others:
                self._leave_alone(slot, "engine has", lacking)
                return False
            ready = [each for each in others if each.is_usable]
            told = [each for each in ready if each.models is not None]
            lacking = self._find_lacking(slot, told)
            if told and not lacking:
                return True
            are_coming = any(each.engine.state in COMING and _has_agent(each) for each in others)
            if began_s is None:
                began_s = time.monotonic()
                self._tell(slot, "waits for another that may have its model")
            is_late = time.monotonic() - began_s > TOLD_S
            if not are_coming and (is_late or not ready):
                self._leave_alone(slot, "that is ready is known to have", lacking)
                return False
            await asyncio.sleep(LOOK_S)
        return True

    def _leave_alone(self, slot: Slot, others: str, lacking: Sequence[str]) -> None:
        which = ", ".join(lacking) or "its model"
        self._tell(slot, f"runs on: no other {others} {which}")
        self._alone.append(slot.engine.name)
        self.failure = ALONE.format(", ".join(self._alone))

    def _find_lacking(self, slot: Slot, others: Sequence[Slot]) -> list[str]:
        """Models of an engine that none of the others may have."""
        theirs = [self._models_of(each) for each in others]
        return sorted(self._models_of(slot).difference(*theirs)) if all(theirs) else []

    def _share_models(self, one: Slot, other: Slot) -> bool:
        """Whether one may take calls of the other: they have a model in common, or had one before
        either got another. An engine that tells none may have any."""
        mine, its = self._models_of(one), self._models_of(other)
        return not (mine and its) or bool(mine & its)

    def _models_of(self, slot: Slot) -> frozenset[str]:
        return self._before.get(slot.engine.name, frozenset()).union(slot.models or ())

    async def _place_anew(self, name: str, spec: ReplicaSpec) -> None:
        try:
            async with asyncio.timeout(PLACED_S):
                await self.fleets.renew(name, spec)
        except TimeoutError as error:
            raise EngineError(
                f"engine {name}: Ray does not end it within {PLACED_S:g} s"
            ) from error

    def _tell(self, slot: Slot, what: str) -> None:
        line = f"engine {slot.engine.name}: {what}"
        log.info("%s", line)
        self.told.append(line)


def _may_have_calls(slot: Slot) -> bool:
    """Whether it runs, as far as is known. Those that do not are restarted first."""
    return slot.engine.state not in COMING | {EnginePhase.FAILED}


async def _restart_here(engine: ManagedEngine, settings: ManagedSettings) -> None:
    before = engine.started
    engine.begin_anew(settings)
    while engine.started == before or engine.state is not EnginePhase.READY:
        if engine.num_failed_starts:
            raise EngineError(f"engine {engine.name} does not come back: {engine.stage}")
        await asyncio.sleep(LOOK_S)


def _start_of(engine: AgentEngine) -> str | None:
    return None if engine.client.state is None else engine.client.state.start_id


def _has_agent(slot: Slot) -> bool:
    """False for a replica that is nowhere now: it comes with its new settings."""
    return not isinstance(slot.engine, ReplicaEngine) or slot.engine.client.state is not None


def _is_wanted(engine: object) -> bool:
    """False for a replica that was given up meanwhile."""
    return not isinstance(engine, ReplicaEngine) or engine.is_wanted


async def _until_back(engine: AgentEngine, before: str | None) -> None:
    """Until the engine is ready in the next start of its agent, or is not wanted any more. Raises
    EngineError when that start fails, or the agent is silent for `AGENT_BACK_S`."""
    answered_s, begun = time.monotonic(), None
    while _is_wanted(engine):
        known, now_s = engine.client.state, time.monotonic()
        is_lost = now_s - answered_s > AGENT_BACK_S
        if known is not None:
            answered_s = now_s
        if known is not None and known.start_id != before:
            if known.phase is EnginePhase.READY:
                return
            begun = begun or known.start_id
            is_lost = known.phase is EnginePhase.FAILED or known.start_id != begun
        if is_lost:
            raise EngineError(f"engine {engine.name} does not come back: {engine.stage}")
        await asyncio.sleep(LOOK_S)
