"""The agent: an engine's keeper and its door, where only holders of the secret come in.

It starts, watches and restarts the engine, or stands beside one that somebody else started; hands
a daemon what the engine's scheduler says and takes orders and rows from it; and passes all other
calls on to the engine. It goes on without a daemon. When it dies, its guard ends the engine.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from batchrun import __version__
from batchrun.engine import process
from batchrun.engine.agent import messages
from batchrun.engine.agent.guard import Guard
from batchrun.engine.agent.held_rows import KeptOutcomes, RowKeeper
from batchrun.engine.agent.messages import (
    AgentState,
    EmptyEngine,
    ForgetRows,
    FromAgent,
    HeardAnswer,
    HeardTelemetry,
    Leadership,
    SendOrders,
    SendRows,
    read_from_daemon,
)
from batchrun.engine.engine import Engine, ManagedEngine, watch_on
from batchrun.engine.progress import SILENCE, without_held
from batchrun.engine.sockets import EngineSockets
from batchrun.errors import ConfigError, EngineError
from batchrun.home import NO_ENGINE_HEADER
from batchrun.media.connections import UNREACHED, end_to_end, open_session
from batchrun.mutual_tls import show
from batchrun.types import EnginePhase
from batchrun.wire import RowKey, Telemetry, read_last_steps, read_message

log = logging.getLogger(__name__)

HANDSHAKE_S, LOG_CHECK_S = 10.0, 30.0
REPORT_S, LOOK_S = 0.1, 1.0
NUM_QUIET_LOOKS = 5
"""So many in a row must show no work: daemons and gateways learn late that it drains, and an
engine's metrics lag."""
LED_LASTS_S = 600.0
"""For so long after a daemon has gone, none that led before it on its database may come back."""
MAX_UNSENT = 4096
"""A daemon that is so many messages behind has to come again."""
MAX_TAIL_BYTES = 1 << 20
DEFAULT_TAIL_LINES = 100
CERTIFICATE_CHECK_S = 60.0
_CLOSE_WAIT_S, _KEEP_ALIVE_S = 1.0, 2.0
NO_ENGINE = {"Retry-After": "1", NO_ENGINE_HEADER: "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Where an agent listens, and where what concerns its engine lies.

    `channel` is the path of the sockets of the engine's scheduler, without their endings;
    `last_steps` and `log` are files that the engine writes, None where there are none.
    `kept` is the file of outcomes that nobody has fetched. A given `certificate` is shown anew
    when its file has changed. A process of its own is ended where it stands still for `hung_s`.
    """

    name: str
    host: str
    port: int
    tls: ssl.SSLContext
    channel: Path
    last_steps: Path
    kept: Path
    log: Path | None = None
    runs_scheduler: bool = False
    certificate: Path | None = None
    key: Path | None = None
    hung_s: float = math.inf


class Agent:
    """One engine's agent. `run` drives it; at its end, the process `begins_anew` if told so."""

    def __init__(self, engine: Engine, settings: AgentSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._sockets = EngineSockets(settings.channel)
        self._rows = RowKeeper(
            engine.client, KeptOutcomes(settings.kept), self._tell, self._on_death
        )
        self._start_id = secrets.token_hex(8)
        self.begins_anew = False
        self._place = messages.here()
        self._was_heard = settings.runs_scheduler
        self._telemetry: tuple[float, Telemetry] | None = None
        self._is_draining = self._is_down = self._is_emptied = False
        self._num_calls = 0
        self._link: _Link | None = None
        self._led, self._led_until_s, self._told_s = Leadership(), 0.0, 0.0
        self._state: AgentState | None = None
        self._stopped = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None

    def stop(self) -> None:
        """End `run`, and with it an engine that it started."""
        self._stopped.set()

    async def drain(self, limit_s: float) -> None:
        """Take nothing new, and `stop` once the engine has nothing left to do, or after so long."""
        log.info("drains: it ends when its engine has no work left, within %g s", limit_s)
        self._is_draining, num_quiet = True, 0
        self._report_now()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while num_quiet < NUM_QUIET_LOOKS:
                    await asyncio.sleep(LOOK_S)
                    num_quiet = 0 if await self._has_work() else num_quiet + 1
        self.stop()

    async def _has_work(self) -> bool:
        """Also of engines that do not tell; what hangs may have some still."""
        if self._engine.state not in {EnginePhase.READY, EnginePhase.UNREACHABLE}:
            return False
        asked = self._rows.num_running or self._num_calls
        return bool(asked or (await self._engine.client.look()).has_work)

    async def run(self, on_listening: Callable[[], None]) -> None:
        """Serve until `stop`; `on_listening` is called once the port is open.

        Raises EngineError when the engine fails for good, or the address is taken.
        """
        guard = None
        if isinstance(self._engine, ManagedEngine):
            guard = Guard(self._engine.settings.record_path, self._settings.hung_s)
            await guard.start()
        work: list[Coroutine[None, None, None]] = [
            self._keep_engine(),
            self._sockets.run(self._hear_telemetry, self._hear_answer),
            self._report(),
            self._cut_log(),
            self._renew_certificate(),
            self._watch_progress(),
            self._rows.run(),
        ]
        if guard is not None:
            work.append(guard.watch())
        try:
            async with self._serving():
                on_listening()
                await self._work(work)
        finally:
            await self._rows.close()
            if guard is not None:
                await guard.close()

    async def _work(self, work: Sequence[Coroutine[None, None, None]]) -> None:
        """All of it until `stop`, or until one of it ends; then the engine is ended."""
        tasks = [asyncio.create_task(each) for each in work]
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            failures = [task.exception() for task in tasks if task.done()]
        finally:
            for task in (*tasks, stopped):
                task.cancel()
            await asyncio.gather(*tasks, stopped, return_exceptions=True)
            await self._engine.stop()
        for failure in failures:
            if failure is not None:
                raise failure

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        """Listen; the port is closed again at the end."""
        app = web.Application(client_max_size=messages.MAX_FRAME_BYTES)
        app.router.add_get(messages.LINK, self._on_link)
        app.router.add_get(messages.STATE, self._on_state)
        app.router.add_get(messages.LOG, self._on_log)
        app.router.add_post(messages.DRAIN, self._on_drain)
        app.router.add_post(messages.STOP, self._on_stop)
        app.router.add_post(messages.RESTART, self._on_restart)
        app.router.add_route("*", "/{path:.*}", self._on_call)
        runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=_CLOSE_WAIT_S, access_log=None
        )
        await runner.setup()
        assert runner.server is not None
        settings = self._settings
        self._session = open_session(keep_alive_s=_KEEP_ALIVE_S)
        try:
            server = await asyncio.get_running_loop().create_server(
                runner.server,
                settings.host,
                settings.port,
                ssl=settings.tls,
                ssl_handshake_timeout=HANDSHAKE_S,
            )
        except OSError as error:
            await self._session.close()
            await runner.cleanup()
            address = f"{settings.host}:{settings.port}"
            raise EngineError(f"cannot listen on {address}: {error.strerror}") from error
        try:
            yield
        finally:
            server.close()
            if self._link is not None:
                await self._link.close()
            await runner.cleanup()
            await self._session.close()

    async def _keep_engine(self) -> None:
        """Start the engine and watch it. Raises EngineError when it fails for good."""
        if isinstance(self._engine, ManagedEngine):
            await self._engine.start()
        else:
            with suppress(EngineError):
                await self._engine.start()
        watch = asyncio.create_task(watch_on("the engine", self._engine.watch))
        try:
            while not watch.done():
                if self._engine.state is EnginePhase.FAILED:
                    raise EngineError(self._engine.stage)
                await asyncio.wait([watch], timeout=REPORT_S)
            watch.result()
        finally:
            watch.cancel()

    async def _report(self) -> None:
        """Tell the daemon how things stand, when that changes and every `SIGN_S`."""
        while True:
            self._report_now()
            await asyncio.sleep(REPORT_S)
            if self._is_down and self._engine.state is EnginePhase.READY:
                self._is_down = not await self._engine.client.is_healthy()

    def _report_now(self) -> AgentState:
        state, now_s = self._look(), time.monotonic()
        if state != self._state or now_s - self._told_s >= messages.SIGN_S:
            self._state, self._told_s = state, now_s
            self._tell(state)
        return state

    def _on_death(self) -> None:
        """A row met a dead engine, which may not have been noticed yet."""
        self._is_down = True
        self._report_now()

    def _look(self) -> AgentState:
        engine, before = self._engine, self._state
        if before is not None and before.started != engine.started:
            self._was_heard, self._telemetry = self._settings.runs_scheduler, None
        phase = engine.state
        if phase is EnginePhase.READY and self._is_down:
            phase = EnginePhase.UNREACHABLE
        last_steps: tuple[RowKey, ...] = ()
        if phase is not EnginePhase.READY and before is not None:
            last_steps = before.last_steps
            if before.phase is EnginePhase.READY:
                last_steps = tuple(sorted(read_last_steps(self._settings.last_steps)))
        return AgentState(
            start_id=self._start_id,
            version=__version__,
            name=self._settings.name,
            phase=phase,
            stage=engine.stage,
            started=engine.started,
            engine_url=engine.client.base_url,
            place=self._place,
            runs_scheduler=self._was_heard,
            is_draining=self._is_draining,
            last_steps=last_steps,
            needs_key=engine.client.api_key is not None,
            is_emptied=self._is_emptied,
            is_attached=not isinstance(engine, ManagedEngine),
        )

    async def _watch_progress(self) -> None:
        """Notice an engine that hangs: whoever watches it starts it again."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._engine.state in {EnginePhase.READY, EnginePhase.UNREACHABLE}:
                look = await self._engine.client.look()
                if look is SILENCE:
                    look = replace(look, has_work=self._rows.num_running > 0)
                now_s = time.monotonic()
                look = without_held(look, self._telemetry, now_s)
                self._engine.progress.see(look, now_s, self._rows.newest_s)

    async def _cut_log(self) -> None:
        while True:
            await asyncio.sleep(LOG_CHECK_S)
            if self._settings.log is not None:
                with suppress(OSError):
                    await asyncio.to_thread(process.cut_log, self._settings.log)

    async def _renew_certificate(self) -> None:
        certificate, key = self._settings.certificate, self._settings.key
        shown = await asyncio.to_thread(_marks, certificate, key)
        while True:
            await asyncio.sleep(CERTIFICATE_CHECK_S)
            found = await asyncio.to_thread(_marks, certificate, key)
            if certificate is None or found in {shown, None}:
                continue
            try:
                show(self._settings.tls, certificate, key)
                log.info("%s: shown from now on", certificate)
            except ConfigError as error:
                log.error("%s; what was shown before still is", error)
            shown = found

    def _hear_telemetry(self, message: bytes) -> None:
        self._was_heard = True
        with suppress(ValueError):
            self._telemetry = time.monotonic(), read_message(message, Telemetry)
        self._tell(HeardTelemetry(message))

    def _hear_answer(self, message: bytes) -> None:
        self._tell(HeardAnswer(message))

    def _tell(self, message: FromAgent) -> bool:
        """Send the daemon a message; False when none is there."""
        return self._link is not None and self._link.send(message)

    async def _on_link(self, request: web.Request) -> web.WebSocketResponse:
        """A daemon comes; one that was there before is gone, or should be, unless it has led since
        this one did."""
        store, term = request.query.get("store", ""), request.query.get("term", "")
        leadership = Leadership(store, int(term)) if term.isdecimal() else Leadership()
        if self._link is not None and not leadership.may_follow(self._link.leadership):
            raise web.HTTPConflict(text="it has another daemon\n")
        if leadership.was_succeeded_by(self._led) and time.monotonic() < self._led_until_s:
            raise web.HTTPConflict(text="another daemon has led since\n")
        self._led, self._led_until_s = leadership, math.inf
        socket = web.WebSocketResponse(
            heartbeat=messages.HEARTBEAT_S, max_msg_size=messages.MAX_FRAME_BYTES, compress=False
        )
        await socket.prepare(request)
        link = _Link(socket, leadership)
        before, self._link, self._is_emptied = self._link, link, False
        # First of all what is held: a daemon passes over outcomes of rows that it was not told of.
        link.send(self._report_now())
        self._rows.meet()
        if before is not None:
            await before.close()
        log.info("a daemon has come from %s", request.remote)
        writing = asyncio.create_task(link.write())
        try:
            async for frame in socket:
                if frame.type is not aiohttp.WSMsgType.BINARY:
                    break
                if self._link is link:
                    await self._obey(frame.data)
        except ValueError as error:
            log.warning("the daemon at %s sent %s", request.remote, error)
        finally:
            writing.cancel()
            if self._link is link:
                self._link, self._led_until_s = None, time.monotonic() + LED_LASTS_S
                self._is_emptied = False
                self._rows.part()
            log.info("the daemon at %s has gone", request.remote)
        return socket

    async def _obey(self, frame: bytes) -> None:
        """Raises ValueError for what is no message of a daemon."""
        match read_from_daemon(frame):
            case SendOrders(message):
                await self._sockets.send(message)
            case SendRows(rows):
                self._rows.take(rows, is_refused=self._is_draining)
            case ForgetRows(keys):
                self._rows.forget(keys)
            case EmptyEngine(is_on):
                self._is_emptied = is_on
                self._report_now()

    async def _on_state(self, _request: web.Request) -> web.Response:
        more = {"held_rows": self._rows.num_held, "has_daemon": self._link is not None}
        return web.json_response(msgspec.to_builtins(self._report_now()) | more)

    async def _on_log(self, request: web.Request) -> web.Response:
        lines = request.query.get("lines", str(DEFAULT_TAIL_LINES))
        if not lines.isdecimal() or self._settings.log is None:
            raise web.HTTPBadRequest(text="lines: a number, of an engine that the agent started\n")
        return web.Response(text=await asyncio.to_thread(_tail, self._settings.log, int(lines)))

    async def _on_drain(self, request: web.Request) -> web.Response:
        self._is_draining = request.query.get("on", "true") != "false"
        return await self._on_state(request)

    async def _on_stop(self, request: web.Request) -> web.Response:
        asyncio.get_running_loop().call_later(REPORT_S, self.stop)
        return await self._on_state(request)

    async def _on_restart(self, request: web.Request) -> web.Response:
        self.begins_anew = True
        return await self._on_stop(request)

    async def _on_call(self, request: web.Request) -> web.StreamResponse:
        is_work = request.method == "POST"
        self._num_calls += is_work
        try:
            return await self._pass_on(request)
        finally:
            self._num_calls -= is_work

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """A call for the engine. An agent that drains takes no new work, and is not healthy."""
        assert self._session is not None
        if self._is_draining and (request.method == "POST" or request.path == "/health"):
            raise web.HTTPServiceUnavailable(text="draining\n", headers=NO_ENGINE)
        headers = end_to_end(request.headers)
        if self._engine.client.api_key is not None:
            headers["Authorization"] = f"Bearer {self._engine.client.api_key}"
        try:
            reply = await self._session.request(
                request.method,
                URL(self._engine.client.base_url + request.rel_url.raw_path_qs, encoded=True),
                headers=headers,
                data=request.content if request.body_exists else None,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError) as error:
            text = f"the engine does not answer: {error}\n"
            is_there = not isinstance(error, UNREACHED)
            said = {"Retry-After": "1"} if is_there else NO_ENGINE
            raise web.HTTPServiceUnavailable(text=text, headers=said) from error
        async with reply:
            headers = end_to_end(reply.headers)
            headers.popall(NO_ENGINE_HEADER, None)
            response = web.StreamResponse(status=reply.status, reason=reply.reason, headers=headers)
            await response.prepare(request)
            try:
                async for chunk in reply.content.iter_any():
                    await response.write(chunk)
            except (aiohttp.ClientError, OSError):
                # Broken off for the caller too, never ended as if it were whole.
                if request.transport is not None:
                    request.transport.abort()
            return response


class _Link:
    """The connection of a daemon. Messages wait in order until it has taken those before."""

    def __init__(self, socket: web.WebSocketResponse, leadership: Leadership) -> None:
        self.leadership = leadership
        self._socket = socket
        self._unsent: asyncio.Queue[bytes] = asyncio.Queue(MAX_UNSENT)
        self._closing: asyncio.Task[None] | None = None

    def send(self, message: FromAgent) -> bool:
        try:
            self._unsent.put_nowait(messages.encode(message))
        except asyncio.QueueFull:
            # It comes again, and hears of all that is held.
            self._closing = asyncio.create_task(self.close())
            return False
        return True

    async def write(self) -> None:
        with suppress(ConnectionError):
            while True:
                await self._socket.send_bytes(await self._unsent.get())

    async def close(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_WAIT_S):
                await self._socket.close()


def _marks(*paths: Path | None) -> tuple[tuple[int, int], ...] | None:
    """What changes with the files; None where one cannot be seen."""
    try:
        found = [path.stat() for path in paths if path is not None]
    except OSError:
        return None
    return tuple((each.st_mtime_ns, each.st_ino) for each in found)


def _tail(path: Path, num_lines: int) -> str:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - MAX_TAIL_BYTES, 0))
        lines = file.read().decode("utf-8", "replace").splitlines(keepends=True)
    return "".join(lines[-num_lines:] if num_lines else [])
