"""The one interface of all engines: those that batchrun starts and watches, and attached ones.

An engine that batchrun started outlives the daemon.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import xxhash

from batchrun.engine import process
from batchrun.engine.client import EngineClient
from batchrun.engine.command import (
    AttachedSettings,
    Command,
    ManagedSettings,
    check_port_free,
    prepare_command,
)
from batchrun.engine.process import (
    LogFollower,
    ProcessRecord,
    find_last_useful_line,
    find_stage,
    is_out_of_memory,
)
from batchrun.engine.progress import MAX_GAP_S, Progress, start_of_page
from batchrun.errors import EngineError
from batchrun.types import EnginePhase

log = logging.getLogger(__name__)

_POLL_S = 0.2
_NUM_FAILED_CHECKS = 3
_WATCH_AGAIN_S = 0.5
LONGEST_START = 12
"""So many times `start_timeout_s` an engine may start, whatever it writes."""
_NUM_START_LOOKS = 20
_HUNG_GRACE_S = 1.0
"""An engine that hangs hears no SIGTERM."""


class _KilledError(EngineError):
    """The process ended by SIGKILL, as none does by itself: another start may go well."""


class ManagedEngine:
    """A vLLM server (or `settings.command`) under batchrun's care.

    STARTING -> READY <-> UNREACHABLE      answers, or lives but does not answer
    READY, UNREACHABLE -> RESTARTING -> READY      it died, or hangs
    STARTING, RESTARTING -> FAILED      the first start, or five in a row, went wrong; a first one
                                        that was killed is tried again
    any -> STOPPED

    `progress` is told by somebody else whether the engine gets on with its work.
    """

    def __init__(self, settings: ManagedSettings) -> None:
        """Starts nothing yet. Raises ConfigError when the address is not one."""
        self.name = settings.name
        self.client = EngineClient(settings.base_url, api_key=settings.api_key)
        self.state = EnginePhase.STARTING
        self.stage = "not started"
        self.progress = Progress()
        self.settings = settings
        self._follower = LogFollower(settings.log_path)
        self._record: ProcessRecord | None = None
        self._spawning: asyncio.Task[ProcessRecord] | None = None
        self.num_failed_starts = 0
        self._num_restarts = 0
        self._anew = asyncio.Event()

    @property
    def has_spawned(self) -> bool:
        """Whether a process was started here, and not only adopted."""
        return self._spawning is not None

    @property
    def started(self) -> int:
        """Another number each time its process starts; 0 before."""
        record = self._record
        return 0 if record is None else xxhash.xxh3_64_intdigest(record.nonce.encode())

    async def start(self) -> None:
        """Adopt the living engine or start one, and wait until it answers.

        Raises EngineError with one line when it cannot start. Cancelling leaves it starting.
        """
        self.state = EnginePhase.STARTING
        try:
            try:
                await self._launch()
            except _KilledError as error:
                log.warning("%s; it was killed, and is started again", error)
                await self._launch()
        except EngineError as error:
            self.state, self.stage = EnginePhase.FAILED, str(error)
            raise

    async def watch(self) -> None:
        """Keep `state` true and restart the engine when it dies, for ever."""
        while True:
            if self.state is EnginePhase.FAILED:
                await self._anew.wait()
            await self._restart(await self._watch_until_down())

    def begin_anew(self, settings: ManagedSettings) -> None:
        """Have `watch` end the process and start it as `settings`, of the same address, say."""
        self.settings, self.num_failed_starts = settings, 0
        self._anew.set()

    async def stop(self) -> None:
        """End the engine with its children. Cancel `watch` first."""
        if self._spawning is not None and not self._spawning.done():
            await asyncio.wait([self._spawning])
        await self._end_process("stopping")
        self.state, self.stage = EnginePhase.STOPPED, "stopped"
        await self.client.close()

    async def _launch(self) -> None:
        self.stage = "looking for the engine"
        command = await asyncio.to_thread(prepare_command, self.settings)
        record_path, secret = self.settings.record_path, self.settings.api_key
        self._record = await asyncio.to_thread(process.adopt, record_path, command.argv, secret)
        if self._record is not None and not await self._adopted(self._record):
            self._record = None
        if self._record is None:
            await self._end_process("ending the engine that ran before")
            await asyncio.to_thread(check_port_free, self.settings.host, self.settings.port)
            self._record = await self._spawn(command)
            await self._wait_ready(self._record)
        self.state, self.stage = EnginePhase.READY, "ready"
        self.num_failed_starts = 0

    async def _adopted(self, record: ProcessRecord) -> bool:
        """Whether the engine that runs already answers, now or once it has started."""
        try:
            await self._wait_ready(record)
        except EngineError as error:
            log.warning("%s; it ran already, and is started anew", error)
            return False
        return True

    async def _end_process(self, stage: str) -> None:
        """End what the record names: also an engine of other arguments, and children of one that
        was killed."""
        self.stage = stage
        path, grace_s = self.settings.record_path, self.settings.stop_grace_s
        if self.progress.is_hung:
            grace_s = min(grace_s, _HUNG_GRACE_S)
        await asyncio.to_thread(process.stop_recorded, path, grace_s)
        self.progress.begin_again()

    async def _spawn(self, command: Command) -> ProcessRecord:
        """Shielded, so that a cancelled start still leaves a record for `stop` to find."""
        self.stage = "starting the process"
        self._follower = LogFollower(self.settings.log_path)
        spawning = asyncio.to_thread(
            process.spawn,
            command.argv,
            env=command.env,
            log_path=self.settings.log_path,
            record_path=self.settings.record_path,
            secret=self.settings.api_key,
        )
        self._spawning = asyncio.create_task(spawning)
        try:
            return await asyncio.shield(self._spawning)
        except OSError as error:
            line = f"engine {self.name}: {command.argv[0]} cannot be started: {error.strerror}"
            raise EngineError(line) from error

    async def _wait_ready(self, record: ProcessRecord) -> None:
        """A start may take as long as the engine writes of it or moves data, such as of a model
        that it loads over a slow network."""
        timeout_s, began_s = self.settings.start_timeout_s, time.monotonic()
        deadline_s, look_at_s, num_mib = began_s + timeout_s, began_s, 0
        shown = self._follower.position, num_mib
        while not await self.client.is_healthy():
            await self._follow_log()
            if time.monotonic() >= look_at_s:
                num_mib = await asyncio.to_thread(process.num_moved_mib, record)
                look_at_s = time.monotonic() + timeout_s / _NUM_START_LOOKS
            before, shown = shown, (self._follower.position, num_mib)
            if shown != before:
                longest_s = began_s + LONGEST_START * timeout_s
                deadline_s = min(time.monotonic() + timeout_s, longest_s)
            was_killed = await asyncio.to_thread(process.was_killed, record)
            if was_killed is not None:
                kind = _KilledError if was_killed else EngineError
                raise kind(await self._explain_death(record))
            now_s = time.monotonic()
            if now_s > deadline_s:
                await asyncio.to_thread(process.terminate, record, self.settings.stop_grace_s)
                raise EngineError(
                    f"engine {self.name} was not ready after {now_s - began_s:.0f} s "
                    f"(it was {self.stage}); log: {self.settings.log_path}"
                )
            await asyncio.sleep(_POLL_S)

    async def _follow_log(self) -> None:
        for line in await asyncio.to_thread(self._follower.read_new_lines):
            self.stage = find_stage(line) or self.stage

    async def _explain_death(self, record: ProcessRecord) -> str:
        await asyncio.to_thread(process.terminate, record, self.settings.stop_grace_s)
        await self._follow_log()
        tail = await asyncio.to_thread(self._follower.read_tail)
        cause = find_last_useful_line(tail).rstrip(".") or "it wrote nothing"
        what, advice = f"ended while {self.stage}", ""
        if is_out_of_memory(cause):
            what = f"ran out of memory while {self.stage}"
            advice = "; use a smaller model or less KV cache (--kv-cache-memory-bytes)"
        return f"engine {self.name} {what}: {cause}{advice}; log: {self.settings.log_path}"

    async def _watch_until_down(self) -> str:
        """Returns why, when the engine is to begin anew, died, or lived without an answer or
        progress for too long."""
        if self._anew.is_set():
            self._num_restarts = 0
            return "it begins anew"
        if self._record is None:
            return await self._last_words()
        ready_since_s = looked_s = time.monotonic()
        num_failed_checks, silent_s = 0, 0.0
        while await asyncio.to_thread(process.is_alive, self._record):
            if self._anew.is_set():
                self._num_restarts = 0
                return "it begins anew"
            is_healthy = await self.client.is_healthy()
            now_s = time.monotonic()
            silent_s += min(now_s - looked_s, self.settings.check_interval_s + MAX_GAP_S)
            looked_s = now_s
            num_failed_checks = 0 if is_healthy else num_failed_checks + 1
            if is_healthy:
                silent_s = 0.0
                self.state, self.stage = EnginePhase.READY, "ready"
            elif num_failed_checks >= _NUM_FAILED_CHECKS:
                ready_since_s = now_s
                self.state = EnginePhase.UNREACHABLE
                self.stage = f"no answer for {silent_s:.0f} s"
            if now_s - ready_since_s > self.settings.healthy_reset_s:
                self._num_restarts = 0
            if self.progress.is_hung:
                reason = f"no progress for {self.progress.stalled_s:.0f} s with work in flight"
                log.error("engine %s: %s; it is ended and started again", self.name, reason)
                return reason
            if silent_s > self.settings.unresponsive_restart_s:
                return f"no answer for {silent_s:.0f} s"
            await asyncio.sleep(self.settings.check_interval_s)
        return await self._last_words()

    async def _restart(self, reason: str) -> None:
        """Start again with growing pauses; after too many failed starts, FAILED for ever."""
        self._anew.clear()
        while self.num_failed_starts < self.settings.max_failed_starts:
            pause_s = self._next_pause_s()
            self.state = EnginePhase.RESTARTING
            self.stage = f"restarting in {pause_s:g} s; it ended: {reason}"
            await asyncio.sleep(pause_s)
            try:
                await self._end_process("ending the engine that ran before")
                await self._launch()
                return
            except EngineError as error:
                self.num_failed_starts += 1
                reason = str(error)
        self.state = EnginePhase.FAILED
        self.stage = f"{self.num_failed_starts} starts failed in a row; the last: {reason}"

    def _next_pause_s(self) -> float:
        pause_s = self.settings.backoff_first_s * 2.0 ** min(self._num_restarts, 20)
        self._num_restarts += 1
        return min(pause_s, self.settings.backoff_limit_s)

    async def _last_words(self) -> str:
        tail = await asyncio.to_thread(self._follower.read_tail)
        return find_last_useful_line(tail) or "without a word"


class AttachedEngine:
    """A URL of a running OpenAI-compatible server."""

    def __init__(self, settings: AttachedSettings) -> None:
        """Opens nothing yet. Raises ConfigError when the URL is not one."""
        self.name = settings.name
        self.client = EngineClient(settings.url, api_key=settings.api_key)
        self.state = EnginePhase.STARTING
        self.stage = "connecting"
        self.progress = Progress()
        self.started = 0
        """Another number for each process, as its metrics tell when it was started; where they do
        not, how often it came to answer: what it held before may be gone."""
        self._num_starts = 0
        self._settings = settings

    async def start(self) -> None:
        """Wait a few seconds for `/health`. Raises EngineError naming the URL."""
        deadline_s = time.monotonic() + self._settings.start_timeout_s
        while not await self.client.is_healthy():
            if time.monotonic() > deadline_s:
                await self._mark(is_healthy=False)
                raise EngineError(
                    f"engine {self.name}: nothing answers at {self.client.base_url}/health; "
                    "start the engine or correct its url"
                )
            await asyncio.sleep(_POLL_S)
        await self._mark(is_healthy=True)

    async def watch(self) -> None:
        """Keep `state` at READY or UNREACHABLE, for ever."""
        while True:
            await asyncio.sleep(self._settings.check_interval_s)
            await self._mark(is_healthy=await self.client.is_healthy())

    async def stop(self) -> None:
        """Close the connections; the engine itself is not ours to end."""
        self.state, self.stage = EnginePhase.STOPPED, "stopped"
        await self.client.close()

    async def _mark(self, *, is_healthy: bool) -> None:
        is_ready = is_healthy and not self.progress.is_hung
        if is_ready and self.state is not EnginePhase.READY:
            self._num_starts += 1
            self.started = await self._find_start()
        self.state = EnginePhase.READY if is_ready else EnginePhase.UNREACHABLE
        self.stage = "ready" if is_ready else f"no answer from {self.client.base_url}"
        if is_healthy and not is_ready:
            self.stage = f"no progress for {self.progress.stalled_s:.0f} s with work in flight"

    async def _find_start(self) -> int:
        try:
            started = start_of_page(await self.client.metrics())
        except EngineError:
            return self.started
        name = f"{self.client.base_url} {started}".encode()
        return self._num_starts if started is None else xxhash.xxh3_64_intdigest(name)


Engine = ManagedEngine | AttachedEngine
"""An engine as the daemon sees it.

`state` says whether requests may be sent (only READY); `stage` is a few words for people, such as
"loading weights" or why the engine is down. `watch` keeps both true, after `start`.
"""


async def watch_on(what: str, watch: Callable[[], Awaitable[None]]) -> None:
    """Watch for ever: where the operating system refuses something, a file more to open say, what
    is watched runs on, and so must whoever watches."""
    refusal: str | None = None
    while True:
        try:
            await watch()
        except OSError as error:
            if str(error) != refusal:
                log.error("%s cannot be watched, and is tried again: %s", what, error)
            refusal = str(error)
        await asyncio.sleep(_WATCH_AGAIN_S)
