"""Has fleets follow the tide: each minute, how many replicas hold the calls that are to come and
the deadlines of jobs, and why; where `follow` is `on`, the fleet gets as many.

What calls bring is what gateways tell of them, what an engine holds follows from its profile and
the lengths of the last calls.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np
from msgspec.structs import astuple

from batchrun.config import Deployment
from batchrun.daemon.daemon import Daemon
from batchrun.daemon.engine_link import Slot
from batchrun.daemon.fleets import Fleets
from batchrun.daemon.plugin import existing_profile, online_slo, profile_path, read_profile
from batchrun.daemon.prices import prices_of, speed_of
from batchrun.engine.fleet_messages import DRAIN_S
from batchrun.engine_config import EngineConfig, ReplicasConfig
from batchrun.errors import ConfigError, StoreError
from batchrun.estimator.engine_capacity import (
    CallLengths,
    EngineRoom,
    EngineTrial,
    FleetCapacity,
    Promise,
    fleet_capacity,
)
from batchrun.estimator.tide import (
    DAY,
    MINUTE_S,
    CapacityCorrection,
    FleetDecision,
    FleetNeeds,
    FleetSizer,
    JobNeed,
    TideForecast,
    TideSettings,
)
from batchrun.home import Home
from batchrun.routing.engine_book import Prices
from batchrun.server.web.calls_of_all import (
    GAP_S,
    SAVE_MINUTES,
    CallsOfAll,
    keep_minutes,
    read_minutes,
    this_minute,
)
from batchrun.server.web.gateway_figures import EngineCalls
from batchrun.store.database import Store
from batchrun.types import EnginePhase
from batchrun.wire import FeltCalls

log = logging.getLogger(__name__)

LEAST_CALLS = 200
"""Where the lengths of fewer are known, they are taken to be those of `USUAL`."""
USUAL = CallLengths(*(np.array([tokens]) for tokens in (1_024, 0, 128)))
STORE_WAIT_S = 5.0
OLD_S = 180.0
"""What was decided longer ago is not said any more: nobody tells of calls."""
CAPACITY_S = 3_600.0
"""What an engine holds is found anew after so long."""
JsonObject = dict[str, Any]


@dataclass(slots=True)
class FollowedFleet:
    """One fleet: what is known of its engines and calls."""

    config: EngineConfig
    replicas: ReplicasConfig
    trial: EngineTrial
    prices: Prices
    forecast: TideForecast = field(init=False)
    sizer: FleetSizer = field(init=False)
    capacity: FleetCapacity | None = None
    correction: CapacityCorrection = field(default_factory=CapacityCorrection)
    _felt: tuple[int, int, int, int] | None = None
    _totals: dict[str, EngineCalls] | None = None
    _found_at_s: float = -math.inf

    def __post_init__(self) -> None:
        settings = self.replicas
        self.forecast = TideForecast(math.ceil(settings.start_s / MINUTE_S) + 1)
        limits = TideSettings(settings.min, settings.most, settings.offline_min)
        self.sizer = FleetSizer(limits)

    def restore(self, store: Store, now_minute: int) -> None:
        """Take up the minutes of an earlier leader. Those between are as the one before them.
        Blocking."""
        loads, num_missed = read_minutes(store, self._minutes, now_minute)
        for load in loads + loads[-1:] * num_missed:
            self.forecast.add(load)

    def keep(self, store: Store, now_minute: int) -> None:
        """Have an heir know the minutes before this one. Blocking."""
        keep_minutes(store, self._minutes, self.forecast.loads, now_minute)

    @property
    def _minutes(self) -> str:
        return f"fleet {self.config.name}"

    def take(
        self, totals: Mapping[str, EngineCalls], elapsed_s: float, *, are_all_heard: bool
    ) -> None:
        """What gateways have counted by now; the first time it only begins to count. Where one of
        them has not told its calls, there are no fewer than before."""
        its = {name: totals[name] for name in self.config.replica_names if name in totals}
        if self._totals is not None:
            work_s = sum(self._work_s(now, self._totals.get(name)) for name, now in its.items())
            load = work_s / max(elapsed_s, 1.0)
            if elapsed_s > GAP_S and self.forecast.loads:
                load = self.forecast.loads[-1]  # Nobody counted these minutes.
            elif not are_all_heard and self.forecast.loads:
                load = max(load, self.forecast.loads[-1])
            for _ in range(max(1, min(round(elapsed_s / MINUTE_S), DAY))):
                self.forecast.add(load)
        self._totals = its

    def hear(self, ready: Sequence[Slot]) -> None:
        """What its engines tell of how much they run at once and take into a step."""
        for link in (slot.link for slot in ready):
            if link is not None and link.max_running and link.budget_tokens:
                told = {"max_running": link.max_running, "budget_tokens": link.budget_tokens}
                self.trial = replace(self.trial, room=replace(self.trial.room, **told))

    def feel(self, felt: Mapping[str, FeltCalls], num_ready: int) -> None:
        """How calls came to their callers by now, as counted since this daemon leads."""
        its = [felt[name] for name in self.config.replica_names if name in felt]
        now = tuple(sum(column) for column in zip(*map(astuple, its), strict=True)) or (0, 0, 0, 0)
        before, self._felt = self._felt, now
        if before is None or self.capacity is None or not num_ready or not self.forecast.loads:
            return
        first, late, answers, slow = (a - b for a, b in zip(now, before, strict=True))
        if not first:
            return
        of_first, of_others = self.capacity.hopeless
        missed = max(late / first - of_first, slow / answers - of_others if answers else 0.0)
        held = self.capacity.work(num_ready) * self.correction.factor
        self.correction.learn(self.forecast.loads[-1] / held, first, max(missed, 0.0) * first)

    def _work_s(self, now: EngineCalls, before: EngineCalls | None) -> float:
        """Engine-seconds of the calls that have ended since."""
        names = ("num_calls", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens")
        num_calls, *tokens = (int(getattr(now, n)) - getattr(before, n, 0) for n in names)
        if num_calls <= 0:
            return 0.0
        each = (np.array([num / num_calls]) for num in tokens)
        return num_calls * float(self.prices.added_s(*each)[0])

    async def find_capacity(self, lengths: CallLengths, now_s: float) -> None:
        """What engines hold of such calls, if that is due. It takes some seconds of a thread."""
        if now_s < self._found_at_s + CAPACITY_S:
            return
        if len(lengths) >= LEAST_CALLS:
            self._found_at_s = now_s
        elif self.capacity is not None:
            return
        else:
            lengths = USUAL
        trial = replace(self.trial, lengths=lengths)
        # As `_work_s` prices the calls of a minute: those of mean length.
        tokens = lengths.prompt_tokens, lengths.cached_tokens, lengths.output_tokens
        work_s = float(self.prices.added_s(*(np.array([each.mean()]) for each in tokens))[0])
        most = self.replicas.most
        self.capacity = await asyncio.to_thread(fleet_capacity, trial, work_s, most)


class ReplicaFollower:
    """All fleets of a deployment that follow their calls, or say what they would do."""

    def __init__(
        self,
        deployment: Deployment,
        home: Home,
        daemon: Daemon,
        fleets: Fleets,
        calls: CallsOfAll,
    ) -> None:
        """Raises as `fleets_to_follow` does."""
        self._daemon, self._fleets, self._calls = daemon, fleets, calls
        self._followed = fleets_to_follow(deployment, home)
        self._looked_s: float | None = None
        self._decided_s = math.inf

    async def run(self) -> None:
        """Look each minute, until cancelled."""
        for fleet in self._followed:
            await self._restore(fleet)
        while self._followed:
            now_s = time.monotonic()
            try:
                await self.look(now_s)
            except Exception:
                log.exception("fleets keep their numbers: the look at their calls failed")
            self._forget_old(now_s)
            if this_minute() % SAVE_MINUTES == 0:
                for fleet in self._followed:
                    await asyncio.to_thread(fleet.keep, self._daemon.store, this_minute())
            await asyncio.sleep(max(0.0, now_s + MINUTE_S - time.monotonic()))

    async def _restore(self, fleet: FollowedFleet) -> None:
        while True:
            try:
                await asyncio.to_thread(fleet.restore, self._daemon.store, this_minute())
            except StoreError as error:
                log.error("fleet %s knows no minutes yet: %s", fleet.config.name, error)
                await asyncio.sleep(STORE_WAIT_S)
            else:
                return

    async def look(self, now_s: float) -> None:
        """A minute has ended at `now_s` (monotonic): decide for each fleet, and do it where it is
        to follow. Where no gateway tells anything nothing changes."""
        if not await self._calls.look(now_s):
            self._forget_old(now_s)
            return
        elapsed_s = MINUTE_S if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        for fleet in self._followed:
            fleet.take(self._calls.totals, elapsed_s, are_all_heard=self._calls.are_all_heard)
            ready = self._ready(fleet)
            fleet.hear(ready)
            fleet.feel(self._calls.felt, len(ready))
            await fleet.find_capacity(self._lengths(fleet), now_s)
            self._decide(fleet, now_s)
        self._decided_s = now_s
        for fleet in self._followed:
            await self._keep(fleet)

    def _forget_old(self, now_s: float) -> None:
        past_s = now_s - self._decided_s
        if past_s > OLD_S:
            since = datetime.fromtimestamp(time.time() - past_s).astimezone()
            says = f"its number stays: nothing is heard of calls since {since:%H:%M}"
            self._fleets.advice.update({
                each.config.name: {"says": says} for each in self._followed
            })

    def _decide(self, fleet: FollowedFleet, now_s: float) -> None:
        assert fleet.capacity is not None
        name = fleet.config.name
        target = self._fleets.target(name)
        asked = self._asked(fleet)
        capacity = fleet.capacity.times(fleet.correction.factor)
        is_on = fleet.replicas.follow == "on"
        before = self._fleets.advice.get(name, {}).get("replicas", target)
        # A fleet that is only told of goes on from what it would have by now.
        num_wanted = target if is_on else before
        decision = fleet.sizer.decide(now_s, num_wanted, asked, capacity)
        view = self._fleets.advice[name] = _view(
            decision, fleet.correction.factor, max(capacity.hopeless), is_on=is_on
        )
        if decision.replicas != before:
            log.info("fleet %s %s", name, view["says"])
        if is_on and decision.replicas != target:
            self._fleets.resize(name, decision.replicas, self._daemon.slots, DRAIN_S)

    async def _keep(self, fleet: FollowedFleet) -> None:
        """Calls need replicas also while nothing can be written."""
        name = fleet.config.name
        number = self._fleets.target(name)
        try:
            if fleet.replicas.follow == "on":
                await self._fleets.keep(name, number)
        except StoreError as error:
            log.error(
                "fleet %s: whoever leads next would not know that it is to have %d replicas: %s; "
                "it is written again in a minute",
                *(name, number, error),
            )

    def _asked(self, fleet: FollowedFleet) -> FleetNeeds:
        """The forecast, and the jobs that the fleet's engines may run. For one that is due before
        another replica could be there none is bought."""
        needs, has_rows = [], False
        slots = self._ready(fleet)
        jobs = self._daemon.active.values() if self._daemon.dispatcher.is_offline_on else ()
        for job in jobs:
            if job.id in self._daemon.dispatcher.waiting:
                continue
            if slots and not any(slot.serves(job.model) for slot in slots):
                continue
            has_rows |= not job.queue.is_finished
            left_s = job.left_s
            if fleet.replicas.start_s < left_s < math.inf:
                work_s = self._part(fleet, job.model) * job.left_work_s / speed_of(fleet.prices)
                calls = fleet.forecast.mean_ahead(int(left_s / MINUTE_S))
                needs.append(JobNeed(job.record.name, work_s, left_s, calls))
        return FleetNeeds(fleet.forecast.forecast(), needs, has_rows)

    def _part(self, fleet: FollowedFleet, model: str) -> float:
        """The fleet's share of a job's rows: engines outside it that serve the model have theirs,
        by the speed that they showed."""
        name, its, speed = fleet.config.name, self._ready(fleet), speed_of(fleet.prices)
        wanted = self._fleets.advice.get(name, {}).get("replicas", self._fleets.target(name))
        theirs = sum(
            slot.load.speed if slot.load.is_speed_known else speed
            for slot in self._daemon.slots
            if slot not in its and slot.is_usable and not slot.is_set_apart and slot.serves(model)
        )
        own = max(int(wanted), 1) * speed
        return own / (own + theirs)

    def _ready(self, fleet: FollowedFleet) -> list[Slot]:
        """The replicas that take calls."""
        its = set(fleet.config.replica_names)
        return [
            slot
            for slot in self._daemon.slots
            if slot.engine.name in its and slot.engine.state is EnginePhase.READY
        ]

    def _lengths(self, fleet: FollowedFleet) -> CallLengths:
        """Of the last calls; of each prompt as much is cached as of all of the fleet's."""
        share = self._calls.cached_share(fleet.config.replica_names)
        tokens = np.array(self._calls.lengths, np.int64).reshape(-1, 2)
        prompts = np.maximum(1, tokens[:, 0])
        cached = (prompts * share).astype(np.int64)
        return CallLengths(prompts, cached, np.maximum(1, tokens[:, 1]))


def fleets_to_follow(deployment: Deployment, home: Home) -> list[FollowedFleet]:
    """Those of a deployment whose number is to follow their calls, or to be told. Raises
    ConfigError, one line, where one has no profile."""
    return [
        _followed(deployment, config, config.ray.replicas, home)
        for config in deployment.engines
        if config.ray is not None and config.ray.replicas.follow != "off"
    ]


def _followed(
    deployment: Deployment, config: EngineConfig, replicas: ReplicasConfig, home: Home
) -> FollowedFleet:
    path = existing_profile(deployment, config, home)
    if path is None:
        expected = profile_path(deployment, config, home)
        raise ConfigError(
            f"fleet {config.name}: 'follow' needs a profile of its engine, to know what one holds; "
            f"run `batchrun calibrate -o {expected}` on a machine like a replica's and bring the "
            "file here, or set follow: off"
        )
    profile = read_profile(path)
    slo = online_slo(deployment, home)
    room = EngineRoom(kv_tokens=profile.kv_blocks * profile.engine.block_tokens)
    trial = EngineTrial(profile.models[0], room, USUAL, Promise(slo.ttft_s, slo.tpot_s))
    return FollowedFleet(config, replicas, trial, prices_of(profile.models[0]))


def _view(
    decision: FleetDecision, correction: float, hopeless: float, *, is_on: bool
) -> JsonObject:
    """What `status` shows. `expected_engines` and `high_engines`: so many engines the calls fill in
    the minute for which a replica that starts now is ready; the profile's word counts `correction`
    times, by what callers felt."""
    says = "follows its calls" if is_on else "dry, would have by its calls"
    late = f"; {hopeless:.1%} of its calls are late on any engine" if hopeless >= 0.001 else ""
    return {
        "replicas": decision.replicas,
        "cause": str(decision.cause),
        "reason": decision.reason,
        "says": f"{says}: {decision.reason}{late}",
        "for_calls": decision.for_calls,
        "for_jobs": decision.for_jobs,
        "expected_engines": round(decision.expected, 3),
        "high_engines": round(decision.high, 3),
        "correction": round(correction, 4),
        "at": time.time(),
    }
