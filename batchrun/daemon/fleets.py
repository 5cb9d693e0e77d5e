"""The fleets of a deployment: how many replicas there are, and how an engine is emptied first."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from batchrun.config import Deployment
from batchrun.daemon.engine_link import Slot
from batchrun.daemon.in_flight import GATEWAYS_LEARN_S
from batchrun.daemon.writer import cancel_all
from batchrun.engine.fleet_messages import DRAIN_S, FleetReport, FleetSettings, ReplicaSpec
from batchrun.engine.replicas import FleetMemory, RayFleet, ReplicaEngine, end_fleet, read_memory
from batchrun.engine_config import MAX_REPLICAS, EngineConfig, RayConfig
from batchrun.errors import ConfigError, EngineError, InputError
from batchrun.files import absolute
from batchrun.home import Home
from batchrun.mutual_tls import derive_token, read_or_make_secret, read_secret
from batchrun.store.database import Store
from batchrun.store.jobs import list_settings, write_setting
from batchrun.types import EnginePhase

log = logging.getLogger(__name__)

LOOK_S = 0.5
SHRINKING, RENEWING = "a smaller fleet", "new settings"
UNREADY_S = 30.0
"""A replica that is to be emptied, or to get other settings, and is not ready for so long, has no
calls that could end."""
OTHERS_LEARN_S = 4.0
"""Daemons that stand by ask agents once a second; their gateways look after that."""
AGAIN_S = 30.0
"""A fleet that Ray did not end is tried again after so long."""
NUM_QUIET_LOOKS = 3
"""An engine has no calls when so many looks in a row show none: its metrics lag."""
PORT_MARK = "{port}"
"""In the `command` of a fleet: the port of the replica's engine."""
KEYS_OF_AN_ENGINE = {"model", "served_model_name", "policy", "online_queue", "larry_alpha"} | {
    *("eviction", "reserve", "forecast_rule", "online_cost", "slo", "slo_classes", "timeouts")
}


SIZE_PREFIX = "replicas:"
"""So begins the durable setting of how many replicas a fleet is to have."""


class Fleets:
    """All fleets of one deployment. `start` them once, `close` them at the end."""

    def __init__(self, deployment: Deployment, home: Home, store: Store | None = None) -> None:
        """Starts nothing yet. The `store` of a leader has the numbers that were asked for. Raises
        ConfigError when a secret cannot be read, StoreError."""
        self._home, self._store = home, store
        self._kept = {} if store is None else list_settings(store, SIZE_PREFIX)
        self._targets: dict[str, int] = {}
        self._fleets: dict[str, tuple[RayFleet, RayConfig]] = {}
        for config in deployment.engines:
            if config.ray is not None:
                fleet = _make_fleet(deployment, config, config.ray, home)
                self._fleets[config.name] = fleet, config.ray
                old = read_memory(home.fleet(config.name))
                if store is not None and old.leads and old.num_wanted:
                    number = self._kept.setdefault(config.name, old.num_wanted)
                    write_setting(store, SIZE_PREFIX + config.name, number)
                kept = self._kept.get(config.name)
                if isinstance(kept, int):
                    number = config.ray.replicas.nearest(kept)
                    self._targets[config.name] = fleet.num_wanted = number
        self._tasks: list[asyncio.Task[None]] = []
        self._resizing: dict[str, asyncio.Task[None]] = {}
        self._leaves_by_s: dict[str, float] = {}
        self.advice: dict[str, dict[str, Any]] = {}
        """By fleet, what whoever chooses its number said last."""

    def target(self, name: str) -> int:
        """How many replicas a fleet is to have, once those too many have drained."""
        wanted = sum(each.is_wanted for each in self._fleets[name][0].engines)
        return self._targets.get(name, wanted)

    def engines(self, name: str) -> Sequence[ReplicaEngine]:
        """All that there may be of a fleet."""
        return self._fleets[name][0].engines

    def start(self, slots: Sequence[Slot], leads: Callable[[], bool] | None) -> None:
        """Keep as many replicas as were asked for last, else those that Ray has, at least as many
        as there must be; a daemon that does not lead (None) looks where they are. A leader ends
        fleets that the deployment has no more."""
        for seen in self._home.run.glob("fleet-*.json"):
            if leads is not None and seen.stem.removeprefix("fleet-") not in self._fleets:
                log_path = self._home.log / f"{seen.stem}.log"
                self._tasks.append(asyncio.create_task(_end_left_over(seen, log_path, leads)))
        for name, (fleet, _) in self._fleets.items():
            number = max(fleet.num_wanted, len(fleet.there))
            fleet.want(_choose(fleet, number, fleet.there))
            self._tasks.append(asyncio.create_task(fleet.run(leads)))
            if leads is not None:
                names = {each.name for each in fleet.engines}
                its = [slot for slot in slots if slot.engine.name in names]
                self._tasks.append(asyncio.create_task(_keep_renewing(fleet, its)))
                if name in self._targets:
                    going_on = self._go_on(name, fleet, its)
                    self._tasks.append(asyncio.create_task(going_on))

    def reread(self, deployment: Deployment) -> dict[str, ReplicaSpec]:
        """What replicas are to be started with now, by name, where that has changed. Raises
        ConfigError for a change that takes a new daemon."""
        changed: dict[str, ReplicaSpec] = {}
        for config in deployment.engines:
            if config.name not in self._fleets or config.ray is None:
                continue
            fleet = self._fleets[config.name][0]
            made = _make_fleet(deployment, config, config.ray, self._home)
            pairs = list(zip(fleet.engines, made.engines, strict=False))
            ports = [(old.spec.port, new.spec.port) for old, new in pairs]
            if made.settings != fleet.settings or any(old != new for old, new in ports):
                raise ConfigError(
                    f"fleet {config.name}: has another address, port, secret or room on a node in "
                    "batchrun.yaml by now; that takes the daemon's next start"
                )
            changed |= {
                new.name: new.spec for old, new in pairs if new.spec.digest != old.spec.digest
            }
        return changed

    async def renew(self, name: str, spec: ReplicaSpec) -> None:
        """Have a replica, emptied before, placed anew with this; returns once its next agent
        answers, or it is not wanted any more."""
        await self._fleet_of(name).renew_with(name, spec)

    def prepare(self, name: str, spec: ReplicaSpec) -> None:
        """Have a replica that is nowhere now placed with this."""
        self._fleet_of(name).engine(name).start_with(spec)

    def _fleet_of(self, name: str) -> RayFleet:
        fleets = (fleet for fleet, _ in self._fleets.values())
        return next(each for each in fleets if any(name == its.name for its in each.engines))

    async def close(self) -> None:
        """Let go of the replicas, which go on."""
        await cancel_all([*self._tasks, *self._resizing.values()])
        self._tasks.clear()

    def resize(self, name: str, number: int, slots: Sequence[Slot], drain_s: float) -> None:
        """Have so many replicas. Those too many, first of all those that are not ready,
        get no more calls and rows: rows go back, and they end with their last call, or after
        `drain_s`. Raises InputError where there is no such fleet or may not be so many."""
        self._check(name, number)
        fleet, _ = self._fleets[name]
        self._targets[name] = number
        fleet.size(number)
        if (before := self._resizing.pop(name, None)) is not None:
            before.cancel()
        kept = {each.name for each in fleet.engines if each.is_wanted}
        wanted = _choose(fleet, number, kept)
        fleet.want(sorted({*kept, *wanted}))
        leaving = [slot for slot in slots if slot.engine.name in kept - set(wanted)]
        for slot in slots:
            if slot.engine.name in wanted:
                end_draining(slot, SHRINKING)
        leaves_by_s = self._leaves_by_s
        for engine in wanted:
            leaves_by_s.pop(engine, None)
        for slot in leaving:
            by_s = leaves_by_s.get(slot.engine.name, math.inf)
            leaves_by_s[slot.engine.name] = min(by_s, time.monotonic() + drain_s)
        left = [(slot, leaves_by_s[slot.engine.name]) for slot in leaving]
        self._resizing[name] = asyncio.create_task(_shrink(fleet, wanted, left))

    async def scale(self, name: str, number: int, slots: Sequence[Slot], drain_s: float) -> None:
        """`resize`, for whoever leads next too. Raises StoreError where that cannot be kept."""
        self._check(name, number)
        await self.keep(name, number)
        self.resize(name, number, slots, drain_s)

    async def keep(self, name: str, number: int) -> None:
        """Have whoever leads next know how many a fleet is to have. Raises StoreError."""
        if self._store is not None and self._kept.get(name) != number:
            await asyncio.to_thread(write_setting, self._store, SIZE_PREFIX + name, number)
            self._kept[name] = number

    def _check(self, name: str, number: int) -> None:
        if name not in self._fleets:
            raise InputError(f"{name} is no fleet; those are engines with `ray` in batchrun.yaml")
        bounds = self._fleets[name][1].replicas
        if not bounds.allows(number):
            low, high = bounds.min, bounds.most
            raise InputError(f"fleet {name} has {low} to {high} replicas (got {number})")

    async def _go_on(self, name: str, fleet: RayFleet, slots: Sequence[Slot]) -> None:
        """Have as many as were asked for before this daemon began; where those are fewer, all are
        met first, so that those too many can be chosen and emptied."""
        if not await fleet.until_met():
            return
        deadline_s = time.monotonic() + UNREADY_S
        there = [slot for slot in slots if fleet.engine(slot.engine.name).is_wanted]
        while len(there) > fleet.num_wanted and not all(slot.is_usable for slot in there):
            if time.monotonic() > deadline_s:
                break
            await asyncio.sleep(LOOK_S)
        self.resize(name, fleet.num_wanted, slots, DRAIN_S)

    def view(self) -> list[dict[str, Any]]:
        """What `status` shows of them."""
        return [
            {
                "name": name,
                "address": config.address,
                "replicas": {
                    "wanted": sum(each.is_wanted for each in fleet.engines),
                    "ready": sum(each.state is EnginePhase.READY for each in fleet.engines),
                    "min": config.replicas.min,
                    "max": config.replicas.most,
                },
                "renewing": _view_renewing(fleet),
                "follow": config.replicas.follow,
                "advice": self.advice.get(name),
                "trouble": fleet.trouble or None,
                "nodes": _view_nodes(fleet.report),
            }
            for name, (fleet, config) in self._fleets.items()
        ]


def _choose(fleet: RayFleet, number: int, kept: Collection[str]) -> list[str]:
    """So many replicas: those `kept`, the ready ones first and those that have failed last, then
    the lowest numbers of others."""
    there = [each for each in fleet.engines if each.name in kept]
    ranks = {EnginePhase.READY: 0, EnginePhase.FAILED: 2}
    there.sort(key=lambda each: ranks.get(each.state, 1))
    others = [each for each in fleet.engines if each.name not in kept]
    return [each.name for each in (*there, *others)[:number]]


def _view_renewing(fleet: RayFleet) -> dict[str, list[str]] | None:
    """Replicas that are still to get new settings, and those that must be ready before the next
    does; None where all have theirs."""
    wanted = [each for each in fleet.engines if each.is_wanted]
    outdated = [each.name for each in wanted if each.name in fleet.outdated]
    away = [each.name for each in wanted if each.state is not EnginePhase.READY]
    waits_for = [name for name in away if name in fleet.with_a_place]
    return {"replicas": outdated, "waits_for": waits_for} if outdated else None


def _view_nodes(report: FleetReport) -> list[dict[str, object]]:
    on_node: dict[str, list[str]] = {}
    for replica in report.replicas:
        on_node.setdefault(replica.host, []).append(replica.name)
    return [
        {
            "address": node.address,
            "is_alive": node.is_alive,
            "gpus": node.gpus,
            "cpus": node.cpus,
            "replicas": on_node.get(node.address, []) if node.is_alive else [],
        }
        for node in report.nodes
    ]


async def _end_left_over(seen: Path, log_path: Path, leads: Callable[[], bool]) -> None:
    """End a fleet that the deployment has no more, with the calls that it has."""
    log.info("%s: its fleet is not in batchrun.yaml any more, and ends", seen)
    while await asyncio.to_thread(seen.exists):
        try:
            await end_fleet(seen, log_path, leads)
        except EngineError as error:
            log.warning("%s; where that Ray is gone for good, remove %s", error, seen)
            await asyncio.sleep(AGAIN_S)


async def _shrink(
    fleet: RayFleet, wanted: Sequence[str], leaving: Sequence[tuple[Slot, float]]
) -> None:
    """End replicas, each once it is empty or at its instant. Nothing more is sent to one, though
    its link comes and goes, until it is wanted again."""
    staying = {slot.engine.name for slot, _ in leaving}

    async def end(slot: Slot, by_s: float) -> None:
        await empty(slot, by_s - time.monotonic())
        staying.discard(slot.engine.name)
        fleet.want([*wanted, *staying], emptied=slot.engine.name)
        await fleet.until_gone(slot.engine.name)

    for slot, _ in leaving:
        begin_draining(slot, SHRINKING)
    await asyncio.gather(*(end(slot, by_s) for slot, by_s in leaving))


async def _keep_renewing(fleet: RayFleet, slots: Sequence[Slot]) -> None:
    """Have replicas placed anew whose settings have changed, one at a time: each while all others
    that have a place are ready, the renewed ones among them, and emptied first. One that is not
    ready itself, and is not being emptied, has `UNREADY_S` to be."""
    unready_s: dict[str, float] = {}
    renewed: set[str] = set()
    while True:
        await asyncio.sleep(LOOK_S)
        counts = fleet.with_a_place | renewed
        wanted = [slot for slot in slots if fleet.engine(slot.engine.name).is_wanted]
        outdated = [slot for slot in wanted if slot.engine.name in fleet.outdated]
        away = [slot for slot in wanted if not slot.is_usable and slot.engine.name in counts]
        renewed &= {slot.engine.name for slot in away}
        now_s, left = time.monotonic(), [slot.engine.name for slot in away if not slot.is_draining]
        unready_s = {name: unready_s.get(name, now_s) for name in left}
        lost = [
            slot for slot in outdated if now_s - unready_s.get(slot.engine.name, now_s) > UNREADY_S
        ]
        if not fleet.trouble and (lost or (outdated and not away)):
            chosen = (lost or outdated)[0]
            renewed.add(chosen.engine.name)
            await _renew(fleet, chosen)


async def _renew(fleet: RayFleet, slot: Slot) -> None:
    log.info("fleet %s: %s gets its new settings", fleet.settings.fleet, slot.engine.name)
    begin_draining(slot, RENEWING)
    try:
        if slot.engine.state is EnginePhase.READY:
            await empty(slot, DRAIN_S)
        await fleet.renew(slot.engine.name)
    finally:
        end_draining(slot, RENEWING)


def begin_draining(slot: Slot, why: str) -> None:
    """It gets no more rows, and from no gateway calls that another engine can serve."""
    slot.drained_for.add(why)
    if slot.agent is not None:
        slot.agent.empty(is_on=True)


def end_draining(slot: Slot, why: str) -> None:
    """It may have calls and rows again, as far as this reason went."""
    slot.drained_for.discard(why)
    if slot.agent is not None:
        slot.agent.empty(is_on=slot.drains)


async def empty(slot: Slot, drain_s: float) -> bool:
    """Let an engine that `drains` end its calls, and take its rows back; returns whether it may
    have calls still, after `drain_s`."""
    ready_s = time.monotonic()
    deadline_s = ready_s + drain_s
    await _withdraw_rows(slot)
    await asyncio.sleep(GATEWAYS_LEARN_S if slot.agent is None else OTHERS_LEARN_S)
    num_quiet = 0
    while num_quiet < NUM_QUIET_LOOKS:
        now_s = time.monotonic()
        if now_s > deadline_s:
            return True
        await _withdraw_rows(slot)
        is_quiet = await _is_quiet(slot)
        ready_s = now_s if slot.engine.state is EnginePhase.READY else ready_s
        is_gone = _is_told_gone(slot) or now_s - ready_s > UNREADY_S
        num_quiet = num_quiet + 1 if is_quiet or is_gone else 0
        await asyncio.sleep(LOOK_S)
    return False


async def _is_quiet(slot: Slot) -> bool:
    """Whether the engine's metrics tell that it has no work, or else its scheduler."""
    has_work, num_rows = (await slot.engine.client.look()).has_work, slot.num_arrived
    if has_work is None and num_rows is not None:
        has_work = num_rows + slot.num_other_calls > 0
    return has_work is False


def _is_told_gone(slot: Slot) -> bool:
    """Whether the engine has ended, or has not begun. One that only does not answer the daemon may
    have calls, which come to it another way."""
    agent = slot.agent
    is_told = agent is None or agent.state is not None or not agent.base_url
    return is_told and slot.engine.state not in {EnginePhase.READY, EnginePhase.UNREACHABLE}


async def _withdraw_rows(slot: Slot) -> None:
    """Abort the rows that the engine has; they become pending again."""
    sent = list(slot.in_flight.values())
    await cancel_all(each.job.tasks[each.row] for each in sent if each.row in each.job.tasks)


def _make_fleet(
    deployment: Deployment, config: EngineConfig, ray: RayConfig, home: Home
) -> RayFleet:
    secret_file = _secret_file(deployment, config, home)
    read = read_or_make_secret if config.secret_file is None else read_secret
    secret = read(secret_file)
    try:
        secret_text = secret.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{secret_file}: the secret of a fleet must be text; `openssl rand -hex 32` makes one"
        ) from error
    settings = FleetSettings(
        fleet=config.name,
        address=ray.address,
        owner=derive_token(secret, "fleet")[:16],
        gpus=ray.gpus,
        cpus=ray.cpus,
    )
    specs = [
        _spec(deployment, config, name, (ray.port + number, ray.port + MAX_REPLICAS + number))
        for number, name in enumerate(config.replica_names)
    ]
    specs = [_sealed(spec, secret_text) for spec in specs]
    seen = home.fleet(config.name)
    _check_left(read_memory(seen), settings, seen)
    return RayFleet(
        settings,
        specs,
        seen=seen,
        log_path=home.log / f"fleet-{config.name}.log",
        secret_file=secret_file,
        num_wanted=ray.replicas.min,
    )


def _check_left(before: FleetMemory, settings: FleetSettings, seen: Path) -> None:
    """Raises ConfigError where replicas would be left behind that nobody ends any more."""
    old = before.settings
    has_any = before.leads and before.report.num_there
    if old and has_any and (old.address, old.owner) != (settings.address, settings.owner):
        raise ConfigError(
            f"fleet {settings.fleet}: has replicas with another address of Ray, {old.address}, or "
            "another secret; end them with `batchrun down`, or, where that Ray is gone for good, "
            f"remove {seen}"
        )


def lone_fleet(deployment: Deployment) -> str | None:
    """The name of a fleet that only this home can lead, which made its secret for itself."""
    fleets = (each for each in deployment.engines if each.ray is not None)
    return next((each.name for each in fleets if each.secret_file is None), None)


def _secret_file(deployment: Deployment, config: EngineConfig, home: Home) -> Path:
    if config.secret_file is None:
        return home.fleet(config.name).with_suffix(".secret")
    return Path(absolute(deployment.base, config.secret_file))


def _spec(
    deployment: Deployment, config: EngineConfig, name: str, ports: tuple[int, int]
) -> ReplicaSpec:
    """How one replica is started: `ports` are its agent's and its engine's."""
    agent_port, engine_port = ports
    own = deployment.for_engine(config)
    document = own.model_dump(
        mode="json", include=KEYS_OF_AN_ENGINE, exclude_unset=True, exclude_none=True
    )
    engine = config.model_dump(
        mode="json",
        exclude={"name", "ray", "secret_file", "model", "served_model_name", "priority", "profile"},
        exclude_unset=True,
        exclude_none=True,
    )
    if config.command is not None:
        engine["command"] = [word.replace(PORT_MARK, str(engine_port)) for word in config.command]
    if config.adapters:
        engine["adapters"] = deployment.adapters_of(config)
    document["engines"] = [engine | {"name": name, "port": engine_port}]
    return ReplicaSpec(name, agent_port, "", json.dumps(document, sort_keys=True), "")


def _sealed(spec: ReplicaSpec, secret: str) -> ReplicaSpec:
    content = json.dumps([spec.name, spec.port, secret, spec.config])
    digest = hashlib.sha256(content.encode()).hexdigest()[:32]
    return msgspec.structs.replace(spec, secret=secret, digest=digest)
