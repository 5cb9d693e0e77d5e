"""A fleet: engines behind agents whose number batchrun chooses and whose places Ray chooses.

The daemon's end of it. A process of its own, the placer, speaks to Ray (`ray`); what it last told
of the replicas is kept in a file, so that a daemon which starts while Ray is away finds them. Rows
and calls go to the agents over their own protocol and need no Ray.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from batchrun.engine.agent.engine import AgentEngine
from batchrun.engine.agent.remote import AgentAddress
from batchrun.engine.fleet_messages import (
    FleetOrder,
    FleetReport,
    FleetSettings,
    PlacedReplica,
    ReplicaSpec,
)
from batchrun.engine.process import cut_log
from batchrun.errors import EngineError
from batchrun.files import write_atomically
from batchrun.types import EnginePhase

log = logging.getLogger(__name__)

CONNECT_S = 120.0
"""Ray is met within so long; a process that speaks to it takes a while to start."""
SILENCE_S = 10.0
"""A placer that has told nothing for so long waits for Ray."""
GIVE_UP_S = 60.0
END_WAIT_S = 120.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0
LOOK_S = 0.25
REPEAT_S = 1.0
"""An order is repeated so often: the placer keeps to none that is older than a few seconds."""
MAX_FAILED_AGENTS = 5
"""A replica of which so many agents in a row end before their engine is ready has failed, until one
is."""
NO_FILE = Path()
PAUSED = "placement pauses, and replicas go on where they are"


class FleetMemory(Struct, frozen=True):
    """A fleet, and what was last told of it."""

    settings: FleetSettings | None
    report: FleetReport
    leads: bool = False
    """Whether the daemon that wrote this led."""
    num_wanted: int = 0
    """What was asked for last, as versions wrote it that did not keep it in the store."""


class ReplicaEngine(AgentEngine):
    """The engine of a replica, wherever its agent is. One that is not wanted is stopped."""

    def __init__(
        self, address: AgentAddress, spec: ReplicaSpec, failure: Callable[[], str]
    ) -> None:
        """`failure` tells why none of the fleet can be placed. Raises ConfigError as agents do."""
        super().__init__(address)
        self.spec = spec
        self.is_wanted = False
        self.placed_as = "not placed yet"
        self._failure = failure
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._num_ended: int | None = None
        self._num_failed, self._last_words = 0, ""

    def start_with(self, spec: ReplicaSpec) -> None:
        """Its next agent gets this; that earlier ones ended says nothing of it."""
        self.spec = spec
        self._begin_anew()

    def want(self, *, is_wanted: bool) -> None:
        """Whether there is to be an agent; how those of an earlier time ended is forgotten."""
        if is_wanted and not self.is_wanted:
            self._begin_anew()
        self.is_wanted = is_wanted

    @property
    def is_placed(self) -> bool:
        """Whether it is known where the replica is, or was last."""
        return bool(self.client.base_url)

    @property
    def _has_failed(self) -> bool:
        is_begun = self.client.state is None or self.client.state.phase is EnginePhase.STARTING
        return self.is_wanted and is_begun and self._num_failed >= MAX_FAILED_AGENTS

    @property
    def state(self) -> EnginePhase:
        if self._has_failed:
            return EnginePhase.FAILED
        if self.client.state is None:
            return EnginePhase.STARTING if self.is_wanted else EnginePhase.STOPPED
        return super().state

    @property
    def stage(self) -> str:
        if not self.is_wanted and self.client.state is None:
            return "not wanted now"
        if self._has_failed:
            ended = f"{self._num_failed} agents in a row ended before their engine was ready"
            return f"{ended}, the last with: {self._last_words}"
        if self.client.state is None and (self.placed_as or not self.is_placed):
            return self.placed_as
        return super().stage

    async def start(self) -> None:
        """Wait until the engine answers, if it is wanted. Raises EngineError when nothing can be
        placed, or its engine fails."""
        self.client.connect()
        while self.is_wanted and self.state is not EnginePhase.READY:
            if not self.is_placed and (failure := self._failure()):
                raise EngineError(f"engine {self.name}: {failure}")
            if self.state is EnginePhase.FAILED:
                raise EngineError(
                    f"engine {self.name}: {self.stage}; it is tried on until `batchrun down`"
                )
            await asyncio.sleep(LOOK_S)

    def see(self, placed: PlacedReplica) -> None:
        """Go where the replica is by now."""
        self.placed_as = placed.stage
        if placed.num_ended is not None:
            # A smaller number is of another actor.
            self._num_failed += self._num_ended is not None and placed.num_ended > self._num_ended
            self._num_ended = placed.num_ended
            self._last_words = placed.last_words or self._last_words
        if placed.is_outdated or super().state is EnginePhase.READY:
            self._num_failed = 0
        if placed.host:
            host = f"[{placed.host}]" if ":" in placed.host else placed.host
            self.client.move(f"https://{host}:{self.spec.port}")


class RayFleet:
    """The replicas of one fleet. `run` drives it; `want` says which there shall be."""

    def __init__(
        self,
        settings: FleetSettings,
        specs: Sequence[ReplicaSpec],
        *,
        seen: Path,
        log_path: Path,
        secret_file: Path = NO_FILE,
        num_wanted: int = 0,
    ) -> None:
        """Starts nothing yet. `specs` are all replicas that there may be; others end their calls
        and then themselves, at once where there may be none. `num_wanted` is how many there are to
        be at least, those that Ray has by now among them. `seen` is the file of what was last
        told. Raises ConfigError when the secret cannot be read."""
        self.settings = settings
        self.trouble = ""
        self.failure = ""
        """Why nothing can be placed, where nothing ever was."""
        self.report, self.num_wanted = read_memory(seen).report, num_wanted
        self._seen, self._log_path = seen, log_path
        self.engines = tuple(
            ReplicaEngine(
                AgentAddress(name=spec.name, url="", secret_file=secret_file),
                spec,
                lambda: self.failure,
            )
            for spec in specs
        )
        self._emptied: set[str] = set()
        self._changed = asyncio.Event()
        self._renewed: set[str] = set()
        self._leads = self._has_met = self._is_sized = False
        self._see(self.report)

    @property
    def outdated(self) -> frozenset[str]:
        """Replicas that are to be placed anew, as Ray tells: what was told to an earlier daemon may
        be of other settings."""
        told = self.report.replicas if self._has_met else ()
        return frozenset(each.name for each in told if each.is_outdated)

    @property
    def with_a_place(self) -> frozenset[str]:
        """Replicas that have an agent somewhere, as Ray last told."""
        return frozenset(each.name for each in self.report.replicas if each.host)

    @property
    def there(self) -> frozenset[str]:
        """Replicas that there are, as far as it is known, also those whose actors say nothing."""
        told = {each.name for each in self.report.replicas if each.is_there}
        return frozenset(told | {each.name for each in self.engines if each.is_placed})

    @property
    def order(self) -> FleetOrder:
        """What the placer is told; at first it looks for all that there may be."""
        leads = self._leads and self._has_met
        wanted = [each.spec for each in self.engines if each.is_wanted or not leads]
        return FleetOrder(
            **msgspec.structs.asdict(self.settings),
            replicas=tuple(wanted),
            leads=leads,
            renewed=tuple(sorted(self._renewed)),
            emptied=tuple(sorted(self._emptied)) if self.engines else None,
        )

    @property
    def has_none(self) -> bool:
        """Whether Ray has said that there is no replica."""
        return self._has_met and not self.report.num_there

    def want(self, names: Sequence[str], *, emptied: str = "") -> None:
        """Have these replicas and no others: `emptied`, if it has been, ends at once."""
        for engine in self.engines:
            engine.want(is_wanted=engine.name in names)
        self._emptied = (self._emptied | {emptied}) - {"", *names}
        self._changed.set()

    def size(self, num_wanted: int) -> None:
        """So many are wanted from now on, however many Ray has when it is met."""
        self.num_wanted, self._is_sized = num_wanted, True

    def engine(self, name: str) -> ReplicaEngine:
        """The engine of this name."""
        return next(each for each in self.engines if each.name == name)

    async def renew_with(self, name: str, spec: ReplicaSpec) -> None:
        """Have a replica placed anew with other settings; returns once its next agent answers, or
        it is not wanted any more."""
        engine = self.engine(name)
        before = _start_of(engine)
        engine.start_with(spec)
        self._renewed.add(name)
        self._changed.set()
        try:
            await _until(lambda: _start_of(engine) not in {before, ""} or not engine.is_wanted)
        finally:
            self._renewed.discard(name)

    async def renew(self, name: str) -> None:
        """End a replica that is outdated, and have it placed anew; returns once it has gone, is not
        outdated after all, or none can be placed for now."""
        engine = self.engine(name)
        before = _start_of(engine) or "none"
        self._renewed.add(name)
        self._changed.set()
        try:
            await _until(lambda: name not in self.outdated or bool(self.trouble))
            if name in self.outdated:
                return
            await _until(lambda: self._is_settled(name) or _start_of(engine) != before)
        finally:
            self._renewed.discard(name)

    def _is_settled(self, name: str) -> bool:
        return name in self.with_a_place and name not in self.outdated

    async def until_met(self) -> bool:
        """Until Ray has told what it has; whether nobody has said a number meanwhile."""
        await _until(lambda: self._has_met)
        return not self._is_sized

    async def until_gone(self, name: str) -> None:
        """Until the agent of a replica that is not wanted any more is gone."""
        engine = self.engine(name)
        await _until(lambda: engine.client.state is None)

    async def run(self, leads: Callable[[], bool] | None) -> None:
        """Keep the replicas as they are wanted, for ever, while this daemon `leads`; with None, see
        only where they are."""
        self._leads, pause_s = leads is not None, FIRST_PAUSE_S
        self._leads_still = leads or bool
        self._remember()
        while True:
            met, trouble = False, "the placer cannot be started"
            try:
                met, trouble = await self._follow_placer()
            except OSError as error:
                trouble = f"{trouble}: {error}"
            except (ValueError, msgspec.DecodeError) as error:
                trouble = f"what the placer tells cannot be read: {error}"
            if not met and not self.report.nodes:
                self.failure = trouble
            self._note(f"{trouble}; {PAUSED}")
            pause_s = FIRST_PAUSE_S if met else min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _follow_placer(self) -> tuple[bool, str]:
        """Returns, once the placer has ended, whether it met Ray, and why it ended. Raises OSError
        when it cannot be started."""
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        cut_log(self._log_path)
        pipe = asyncio.subprocess.PIPE
        with self._log_path.open("ab") as errors:
            placer = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "batchrun.engine.ray"),
                stdin=pipe,
                stdout=pipe,
                stderr=errors,
                limit=1 << 24,
            )
        telling = asyncio.create_task(self._tell(placer))
        try:
            return await self._listen(placer)
        finally:
            telling.cancel()
            with suppress(ProcessLookupError):
                placer.kill()
            await placer.wait()

    async def _tell(self, placer: asyncio.subprocess.Process) -> None:
        assert placer.stdin is not None
        with suppress(ConnectionError):
            while True:
                self._changed.clear()
                if self._leads_still() or not self._leads:
                    placer.stdin.write(msgspec.json.encode(self.order) + b"\n")
                    await placer.stdin.drain()
                with suppress(TimeoutError):
                    async with asyncio.timeout(REPEAT_S):
                        await self._changed.wait()

    async def _listen(self, placer: asyncio.subprocess.Process) -> tuple[bool, str]:
        assert placer.stdout is not None
        met, trouble = False, "the placer ended"
        quiet_s = 0.0
        while True:
            wait_s = SILENCE_S if met else CONNECT_S
            try:
                async with asyncio.timeout(wait_s):
                    line = await placer.stdout.readline()
            except TimeoutError:
                quiet_s += wait_s
                trouble = f"Ray at {self.settings.address} does not answer"
                self._note(f"{trouble}; {PAUSED}")
                if quiet_s >= GIVE_UP_S:
                    return met, trouble
                continue
            if not line:
                return met, trouble
            quiet_s = 0.0
            report = msgspec.json.decode(line, type=FleetReport)
            if report.trouble:
                return met, report.trouble
            if self._leads and not (self._has_met or self._is_sized):
                self._take_over(report)
            met = self._has_met = True
            self._note("")
            self._see(report)

    def _take_over(self, report: FleetReport) -> None:
        """Have those that there are, and others up to the number that is wanted."""
        there = [each.name for each in report.replicas if each.is_there]
        others = [each.name for each in self.engines if each.name not in there]
        self.want([*there, *others[: max(self.num_wanted - len(there), 0)]])

    def _see(self, report: FleetReport) -> None:
        placed = {each.name: each for each in report.replicas}
        for engine in self.engines:
            if engine.name in placed:
                engine.see(placed[engine.name])
            if self._has_met and not self._leads:
                engine.is_wanted = engine.name in placed and bool(placed[engine.name].host)
        if report != self.report:
            self.report = report
            self._remember()

    def _remember(self) -> None:
        memory = FleetMemory(self.settings, self.report, self._leads)
        with suppress(OSError):
            write_atomically(self._seen, msgspec.json.encode(memory), mode=0o600)

    def _note(self, trouble: str) -> None:
        if trouble != self.trouble:
            log.log(
                logging.WARNING if trouble else logging.INFO,
                "fleet %s: %s",
                self.settings.fleet,
                trouble or "placement goes on",
            )
        self.trouble = trouble
        if not trouble:
            self.failure = ""


def read_memory(seen: Path) -> FleetMemory:
    """What the file of a fleet holds; nothing where there is none."""
    try:
        return msgspec.json.decode(seen.read_bytes(), type=FleetMemory)
    except (OSError, msgspec.DecodeError):
        return FleetMemory(None, FleetReport())


def leave_to_leader(seen: Path) -> None:
    """Note in the file of a fleet that another daemon leads by now and has the replicas."""
    memory = msgspec.structs.replace(read_memory(seen), leads=False)
    write_atomically(seen, msgspec.json.encode(memory), mode=0o600)


async def end_fleet(seen: Path, log_path: Path, leads: Callable[[], bool]) -> str:
    """End all replicas of the fleet that a file tells of, while the caller `leads`; its name.
    Raises EngineError when Ray does not answer."""
    memory = read_memory(seen)
    settings = memory.settings
    if settings is None:
        raise EngineError(f"{seen} cannot be read: end its fleet's actors in Ray, and remove it")
    if memory.report.nodes:  # Ray has been met.
        await _end(RayFleet(settings, (), seen=seen, log_path=log_path), leads)
    await asyncio.to_thread(seen.unlink, missing_ok=True)
    return settings.fleet


async def _end(fleet: RayFleet, leads: Callable[[], bool]) -> None:
    running = asyncio.create_task(fleet.run(leads))
    try:
        async with asyncio.timeout(END_WAIT_S):
            await _until(lambda: fleet.has_none)
    except TimeoutError as error:
        why = fleet.trouble or "Ray does not end them"
        raise EngineError(f"replicas of fleet {fleet.settings.fleet} may run on: {why}") from error
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _start_of(engine: ReplicaEngine) -> str:
    known = engine.client.state
    return "" if known is None else known.start_id


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # nothing tells when
        await asyncio.sleep(LOOK_S)
