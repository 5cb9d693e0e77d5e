"""An engine behind an agent, as the daemon sees it: one connection, held for as long as both live.

Rows go to the agent by the hundred and their outcomes come back so. While the agent does not
answer, rows that it has are waited for: it goes on with them. What it has when the daemon comes is
`inherited`: rows that an earlier daemon sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from batchrun.engine.agent import messages
from batchrun.engine.agent.messages import (
    AgentState,
    EndedRows,
    ForgetRows,
    FromDaemon,
    HeardAnswer,
    HeardTelemetry,
    HeldRows,
    Leadership,
    SendOrders,
    SendRows,
    SentRow,
    read_from_agent,
)
from batchrun.engine.client import (
    LONG_REPLY_BYTES,
    EngineClient,
    Room,
    encode_body,
    failure,
    not_json,
)
from batchrun.engine.progress import Progress
from batchrun.engine.sockets import Hear
from batchrun.errors import EngineError
from batchrun.mutual_tls import client_context, derive_token, read_secret
from batchrun.types import EnginePhase, Outcome, OutcomeKind, Request
from batchrun.wire import RowKey

log = logging.getLogger(__name__)

ENGINE_KEY = "engine"
"""What the key of an agent's engine is derived for, from the agent's secret."""
FIRST_RETRY_S = 0.25
LONGEST_RETRY_S = 5.0
CONNECT_S = 5.0
GIVE_UP_S = 30.0
"""Rows of an agent that has not answered for so long go to other engines."""
LOOK_S = 1.0
GATHER_S = 0.002
"""Rows that are sent within this time go in one message."""
MAX_ROWS_SENT = 256
_NOWHERE = "https://nowhere.invalid"
FINAL_KINDS = frozenset({OutcomeKind.OK, OutcomeKind.ROW_ERROR})


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAddress:
    """Where an agent answers; no `url`: that is not known yet. `certificate`: who vouches for the
    one that it shows."""

    name: str
    url: str
    secret_file: Path
    certificate: Path | None = None


class AgentClient(EngineClient):
    """Sends rows to an engine through its agent. `connect` once, `close` at the end."""

    def __init__(self, address: AgentAddress) -> None:
        """Raises ConfigError when url, secret or certificate cannot be used."""
        secret = read_secret(address.secret_file)
        tls = client_context(secret, address.certificate)
        super().__init__(address.url or _NOWHERE, tls=tls)
        self.base_url = self.base_url if address.url else ""
        self.hints_secret = derive_token(secret, "hints")
        self.engine_key = derive_token(secret, ENGINE_KEY)
        self.state: AgentState | None = None
        self.leadership = Leadership()
        self.trouble = "connecting"
        self.has_met = asyncio.Event()
        self.inherited: dict[str, set[int]] = defaultdict(set)
        self.on_telemetry: Hear = _ignore
        self.on_answer: Hear = _ignore
        self._early: dict[RowKey, Outcome] = {}
        self._awaited: dict[RowKey, asyncio.Future[Outcome]] = {}
        self._delivered: set[RowKey] = set()
        self._rows: list[SentRow] = []
        self._forgotten: list[RowKey] = []
        self._messages: list[FromDaemon] = []
        self._has_work = asyncio.Event()
        self._is_leaving = False
        self._has_moved = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    @property
    def hint_nonce(self) -> str | None:
        """What hints must carry; None while batchrun's scheduler was not heard in the engine."""
        runs_scheduler = self.state is not None and self.state.runs_scheduler
        return self.hints_secret if runs_scheduler else None

    def connect(self) -> None:
        """Connect, and again whenever the connection is lost, until `close`."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow())

    def move(self, url: str) -> None:
        """The agent is at another address from now on: rows that it has not there are lost."""
        if url != self.base_url:
            self.base_url = url
            self._has_moved.set()

    async def watch_from_afar(self) -> None:
        """Keep `state` true without coming as a daemon, for ever: the agent has another."""
        while True:
            if not self.base_url:
                await self._has_moved.wait()
            try:
                status_code, body = await self._get(messages.STATE)
                self.state = messages.read_state(body) if status_code < 400 else None
                self.trouble = "" if self.state else f"it answered HTTP {status_code}"
            except (EngineError, ValueError) as error:
                self.state, self.trouble = None, _one_line(error)
            await asyncio.sleep(LOOK_S)

    async def execute(
        self,
        request: Request,
        *,
        data: bytes | None = None,
        timeout_s: float | None = None,
        room: Room = nullcontext,
    ) -> Outcome:
        """Hand the row to the agent and say what came of it, once there is `room` for that.

        Raises EngineError when the agent is not there, or has lost the row. Cancelling takes the
        row back, unless `leave` was called.
        """
        key = (request.job_id, request.row)
        try:
            data = encode_body(request.body) if data is None else data
        except (TypeError, ValueError, RecursionError) as error:
            return failure(request, OutcomeKind.ROW_ERROR, not_json(error), duration_s=0.0)
        if self.state is None:
            raise EngineError(self._explain_absence())
        sent = SentRow(*key, request.attempt, request.epoch, request.endpoint, data, timeout_s)
        self._rows.append(sent)
        self._has_work.set()
        outcome = await self._expect(key)
        if len(outcome.body or b"") <= LONG_REPLY_BYTES:
            return outcome
        async with room():
            return outcome

    def claim(self, key: RowKey) -> asyncio.Future[Outcome]:
        """The outcome of a row that was inherited, and from now on is not. It ends as `execute`
        does; cancel it to take the row back."""
        self._disown(key)
        outcome, awaited = self._early.pop(key, None), self._expect(key)
        if outcome is not None:
            self._note_delivered(outcome)
            awaited.set_result(outcome)
        return awaited

    def committed(self, keys: Iterable[RowKey]) -> None:
        """Results of these rows are durable, from whatever engine: the agent need not keep them."""
        self.forget(self._delivered.intersection(keys))

    def forget(self, keys: Collection[RowKey]) -> None:
        """These rows are not wanted, or not any more."""
        for key in keys:
            self._disown(key)
            self._early.pop(key, None)
        self._delivered.difference_update(keys)
        self._forgotten += keys
        self._has_work.set()

    def leave(self) -> None:
        """The daemon goes: the agent is to go on with the rows that it has."""
        self._is_leaving = True

    async def send_orders(self, orders: bytes) -> bool:
        """Send orders for the engine's scheduler; False when the agent is not there."""
        if self.state is None:
            return False
        self._messages.append(SendOrders(orders))
        self._has_work.set()
        return True

    async def begin_anew(self) -> None:
        """Have the agent end its engine, and begin anew with what its machine has now.

        Raises EngineError when it does not, or is too old for that.
        """
        url = self.base_url + messages.RESTART
        try:
            async with self._open().post(url, timeout=aiohttp.ClientTimeout(CONNECT_S)) as reply:
                status_code = reply.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"the agent at {self.base_url}: {_one_line(error)}") from error
        if status_code >= 400:
            raise EngineError(
                f"the agent at {self.base_url} cannot restart its engine (HTTP {status_code}): it "
                "is of an older batchrun; end it and start it again"
            )

    async def is_healthy(self) -> bool:
        """Whether the agent says that its engine answers."""
        return self.state is not None and self.state.phase is EnginePhase.READY

    async def close(self) -> None:
        """Close the connection; agent and engine go on."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        await super().close()

    def _expect(self, key: RowKey) -> asyncio.Future[Outcome]:
        awaited: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._awaited[key] = awaited
        awaited.add_done_callback(partial(self._came, key))
        return awaited

    def _came(self, key: RowKey, awaited: asyncio.Future[Outcome]) -> None:
        if self._awaited.get(key) is awaited:
            del self._awaited[key]
            if awaited.cancelled() and not self._is_leaving:
                self.forget([key])

    async def _follow(self) -> None:
        pause_s = FIRST_RETRY_S
        lost_at_s = time.monotonic()
        while True:
            try:
                await self._stay_where_it_is()
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                trouble = _one_line(error)
            else:
                trouble = "it closed the connection"
            if self.state is not None:
                pause_s, lost_at_s = FIRST_RETRY_S, time.monotonic()
                self.state = None
            if trouble != self.trouble:
                self.trouble = trouble
                log.warning("%s", self._explain_absence())
            self.inherited.clear()
            self._early.clear()
            self._rows.clear()
            if time.monotonic() - lost_at_s > GIVE_UP_S:
                self._lose(self._awaited.keys())
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._has_moved.wait()
            pause_s = min(2 * pause_s, LONGEST_RETRY_S)

    async def _stay_where_it_is(self) -> None:
        """As `_stay_connected`, once there is an address; returns when there is another one."""
        while not self.base_url:
            await self._has_moved.wait()
        self._has_moved.clear()
        connected = asyncio.create_task(self._stay_connected())
        moved = asyncio.create_task(self._has_moved.wait())
        try:
            await asyncio.wait([connected, moved], return_when=asyncio.FIRST_COMPLETED)
            if connected.done():
                connected.result()
        finally:
            moved.cancel()
            connected.cancel()
            await asyncio.gather(connected, moved, return_exceptions=True)

    async def _stay_connected(self) -> None:
        """Returns when the agent closes the connection. Raises what aiohttp does, and ValueError
        for what is no message of an agent."""
        opening = self._open().ws_connect(
            self.base_url + messages.LINK,
            params=self.leadership._asdict(),
            heartbeat=messages.HEARTBEAT_S,
            max_msg_size=messages.MAX_FRAME_BYTES,
        )
        async with asyncio.timeout(CONNECT_S) as limit, opening as socket:
            limit.reschedule(None)
            writing = asyncio.create_task(self._write(socket))
            try:
                async for frame in socket:
                    if frame.type is not aiohttp.WSMsgType.BINARY:
                        break
                    self._hear(frame.data)
            finally:
                writing.cancel()
                with suppress(asyncio.CancelledError, ConnectionError):
                    await writing

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await self._has_work.wait()
            await asyncio.sleep(GATHER_S)
            self._has_work.clear()
            waiting, self._messages = self._messages, []
            if self._forgotten:
                waiting.append(ForgetRows(tuple(self._forgotten)))
                self._forgotten.clear()
            for start in range(0, len(self._rows), MAX_ROWS_SENT):
                waiting.append(SendRows(tuple(self._rows[start : start + MAX_ROWS_SENT])))
            self._rows.clear()
            for message in waiting:
                await socket.send_bytes(messages.encode(message))

    def _hear(self, frame: bytes) -> None:
        match read_from_agent(frame):
            case AgentState() as state:
                self.state, self.trouble = state, ""
            case HeardTelemetry(message):
                self.on_telemetry(message)
            case HeardAnswer(message):
                self.on_answer(message)
            case HeldRows(keys):
                self._inherit(set(keys))
            case EndedRows(outcomes):
                for outcome in outcomes:
                    self._hear_outcome(outcome)

    def _inherit(self, held: set[RowKey]) -> None:
        """What the agent has, when it answers again: rows that it has not are lost."""
        sent = {row.key for row in self._rows}
        self._lose([key for key in self._awaited if key not in held and key not in sent])
        for job_id, row in held - self._awaited.keys() - self._delivered - set(self._forgotten):
            self.inherited[job_id].add(row)
        self.has_met.set()

    def _hear_outcome(self, outcome: Outcome) -> None:
        key = (outcome.job_id, outcome.row)
        awaited = self._awaited.get(key)
        if awaited is not None and not awaited.done():
            self._note_delivered(outcome)
            awaited.set_result(outcome)
        elif outcome.row in self.inherited.get(outcome.job_id, ()):
            self._early[key] = outcome
        elif key not in self._delivered:
            self.forget([key])

    def _note_delivered(self, outcome: Outcome) -> None:
        if outcome.kind in FINAL_KINDS:
            self._delivered.add((outcome.job_id, outcome.row))

    def _lose(self, keys: Iterable[RowKey]) -> None:
        for key in keys:
            awaited = self._awaited[key]
            if not awaited.done():
                awaited.set_exception(EngineError(f"{self._explain_absence()}; its rows run again"))

    def _disown(self, key: RowKey) -> None:
        rows = self.inherited.get(key[0])
        if rows is not None:
            rows.discard(key[1])
            if not rows:
                del self.inherited[key[0]]

    def _explain_absence(self) -> str:
        return f"the agent at {self.base_url} does not answer: {self.trouble or 'it was restarted'}"


class AgentEngine:
    """An engine with an agent, which starts, watches and ends it."""

    def __init__(self, address: AgentAddress) -> None:
        """Opens nothing yet. Raises ConfigError when url, secret or certificate cannot be used."""
        self.name = address.name
        self.address = address
        self.client = AgentClient(address)
        self.progress = Progress()

    @property
    def state(self) -> EnginePhase:
        known = self.client.state
        if known is None or known.is_draining or self.progress.is_hung:
            return EnginePhase.UNREACHABLE
        return known.phase

    @property
    def stage(self) -> str:
        """What the agent says of its engine, or why it says nothing."""
        known = self.client.state
        if known is None:
            return f"the agent does not answer: {self.client.trouble}"
        stage = "draining" if known.is_draining else known.stage
        if self.progress.is_hung:
            stage = f"no progress for {self.progress.stalled_s:.0f} s with work in flight"
        return f"{stage}, by its agent at {urlsplit(self.client.base_url).netloc}"

    @property
    def started(self) -> int:
        """Another number each time its process starts; 0 while that is not known."""
        return 0 if self.client.state is None else self.client.state.started

    @property
    def is_draining(self) -> bool:
        """Whether it takes no new work."""
        return self.client.state is not None and self.client.state.is_draining

    @property
    def direct_url(self) -> str | None:
        """Where the engine answers by itself, on this machine; None where only its agent does."""
        known = self.client.state
        return None if known is None or known.place != messages.here() else known.engine_url

    @property
    def direct_key(self) -> str | None:
        """What the engine asks for at `direct_url`."""
        known = self.client.state
        return self.client.engine_key if known is not None and known.needs_key else None

    @property
    def last_steps(self) -> frozenset[RowKey]:
        """The rows of the last steps of an engine that went down, as far as they are known."""
        known = self.client.state
        return frozenset() if known is None else frozenset(known.last_steps)

    async def start(self) -> None:
        """Connect, and wait until the engine answers. Raises EngineError when the agent does not,
        or its engine fails."""
        self.client.connect()
        deadline_s = time.monotonic() + CONNECT_S
        while self.state is not EnginePhase.READY:
            now_s = time.monotonic()
            if self.client.state is not None:
                deadline_s = max(deadline_s, now_s + CONNECT_S)
            if now_s > deadline_s:
                raise EngineError(f"engine {self.name}: {self.stage}")
            await asyncio.sleep(FIRST_RETRY_S)

    async def watch(self) -> None:
        """The connection keeps `state` true, for ever."""
        self.client.connect()
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Close the connection; the agent and its engine go on."""
        await self.client.close()


@dataclass(slots=True)
class AgentWire:
    """The wire to the scheduler of an engine that has an agent."""

    client: AgentClient

    async def run(self, on_telemetry: Hear, on_answer: Hear) -> None:
        """Hand over what comes in, until cancelled."""
        self.client.on_telemetry, self.client.on_answer = on_telemetry, on_answer
        try:
            await asyncio.Event().wait()
        finally:
            self.client.on_telemetry = self.client.on_answer = _ignore

    async def send(self, orders: bytes) -> bool:
        """Send orders; False when the agent is not there."""
        return await self.client.send_orders(orders)


def _ignore(_message: bytes) -> None:
    return


def _one_line(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "it does not hold this secret"
    return " ".join(str(error).split()) or type(error).__name__
