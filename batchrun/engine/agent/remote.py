"""The daemon's way to an agent: one connection, held for as long as both live.

Rows go to the agent by the hundred and their outcomes come back so. While the agent does not
answer, rows that it has are waited for: it goes on with them. What it has when the daemon comes is
`inherited`: rows that an earlier daemon sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from itertools import chain, repeat
from pathlib import Path

import aiohttp

from batchrun.engine.agent import messages
from batchrun.engine.agent.messages import (
    AgentState,
    EmptyEngine,
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
    in_batches,
    read_from_agent,
)
from batchrun.engine.client import (
    BODY_CODE,
    LONG_REPLY_BYTES,
    EngineClient,
    Room,
    encode_body,
    failure,
)
from batchrun.engine.sockets import Hear
from batchrun.errors import ConfigError, EngineError, InputError
from batchrun.mutual_tls import client_context, derive_token, read_secret
from batchrun.types import EnginePhase, Outcome, OutcomeKind, Request, RowError
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
UNTOLD = ""
"""The content of a row where agent or daemon were too old to tell it."""
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
        self._secret = secret = read_secret(address.secret_file)
        self._certificate, self._stamp = address.certificate, _stamp_of(address.certificate)
        self._doubted = self._stamp
        tls = client_context(secret, address.certificate)
        super().__init__(address.url or _NOWHERE, tls=tls)
        self.base_url = self.base_url if address.url else ""
        self.hints_secret = derive_token(secret, "hints")
        self.engine_key = derive_token(secret, ENGINE_KEY)
        self.state: AgentState | None = None
        self.leadership = Leadership()
        self.trouble = "connecting"
        self.has_met = asyncio.Event()
        self.inherited: dict[str, dict[int, str]] = defaultdict(dict)
        """Rows by job and number, with the content that the agent has them of."""
        self.on_telemetry: Hear = ignore
        self.on_answer: Hear = ignore
        self._early: dict[RowKey, Outcome] = {}
        self._awaited: dict[RowKey, asyncio.Future[Outcome]] = {}
        self._contents: dict[RowKey, str] = {}
        self._delivered: set[RowKey] = set()
        self._rows: list[SentRow] = []
        self._forgotten: list[RowKey] = []
        self._messages: list[FromDaemon] = []
        self._has_work = asyncio.Event()
        self._has_heard = asyncio.Event()
        self._is_leaving = self._is_emptied = False
        self._has_moved = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._replica = "" if address.url else address.name

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
                self.state = self._own(messages.read_state(body)) if status_code < 400 else None
                self.trouble = "" if self.state else f"it answered HTTP {status_code}"
            except (EngineError, ValueError) as error:
                self.state, self.trouble = None, self._why(error)
                await self._renew_trust()
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
        except InputError as error:
            not_json = RowError(BODY_CODE, str(error))
            return failure(request, OutcomeKind.ROW_ERROR, not_json, duration_s=0.0)
        if len(data) > messages.MAX_ROW_BYTES:
            what = f"the request has {len(data)} bytes; an agent takes {messages.MAX_ROW_BYTES}"
            error_of_row = RowError("request_too_large", what)
            return failure(request, OutcomeKind.ROW_ERROR, error_of_row, duration_s=0.0)
        if self.state is None:
            raise EngineError(self._explain_absence())
        how = request.attempt, request.epoch, request.endpoint, data, timeout_s, request.content
        sent = SentRow(request.job_id, request.row, *how)
        self._rows.append(sent)
        self._has_work.set()
        outcome = await self._expect(key, request.content)
        if len(outcome.body or b"") <= LONG_REPLY_BYTES:
            return outcome
        try:
            async with room():
                return outcome
        except asyncio.CancelledError:
            self._take_back(key)
            raise

    def claim(self, key: RowKey, content: str) -> asyncio.Future[Outcome]:
        """The outcome of a row that was inherited, and from now on is not. It ends as `execute`
        does; cancel it to take the row back."""
        self._disown(key)
        outcome, awaited = self._early.pop(key, None), self._expect(key, content)
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
        if self._rows:
            unwanted = set(keys)
            self._rows = [row for row in self._rows if row.key not in unwanted]
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

    def empty(self, *, is_on: bool) -> None:
        """Have all gateways send calls elsewhere, where they can, or no longer."""
        self._is_emptied = is_on
        self._say_whether_emptied()

    async def begin_anew(self) -> None:
        """Have the agent end its engine, and begin anew with what its machine has now.

        Raises EngineError when it does not, or is too old for that.
        """
        url = self.base_url + messages.RESTART
        try:
            async with self._open().post(url, timeout=aiohttp.ClientTimeout(CONNECT_S)) as reply:
                status_code = reply.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"the agent at {self.base_url}: {self._why(error)}") from error
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

    def _expect(self, key: RowKey, content: str) -> asyncio.Future[Outcome]:
        awaited: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._awaited[key], self._contents[key] = awaited, content
        awaited.add_done_callback(partial(self._came, key))
        return awaited

    def _came(self, key: RowKey, awaited: asyncio.Future[Outcome]) -> None:
        if self._awaited.get(key) is awaited:
            del self._awaited[key], self._contents[key]
            if awaited.cancelled():
                self._take_back(key)

    def _take_back(self, key: RowKey) -> None:
        if not self._is_leaving:
            self.forget([key])

    async def _follow(self) -> None:
        pause_s = FIRST_RETRY_S
        lost_at_s = time.monotonic()
        while True:
            try:
                await self._stay_where_it_is()
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                trouble = self._why(error)
                await self._renew_trust()
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
            self._messages.clear()
            if time.monotonic() - lost_at_s > GIVE_UP_S:
                self._lose(self._awaited.keys())
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._has_moved.wait()
            pause_s = min(2 * pause_s, LONGEST_RETRY_S)

    async def _renew_trust(self) -> None:
        """Where the file of `certificate` is another one by now, believe that one alone."""
        stamp = None
        try:
            stamp = await asyncio.to_thread(_stamp_of, self._certificate)
            if stamp in {self._stamp, None}:
                return
            self._tls = client_context(self._secret, self._certificate)
        except (ConfigError, OSError, RuntimeError) as error:
            if stamp != self._doubted:
                log.error("%s; what was believed before still is", error)
            self._doubted = stamp
        else:
            self._stamp = stamp
            await super().close()

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
            self._has_heard.clear()
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
        """Nothing goes before the agent has told what it has: it might be of what has gone."""
        await self._has_heard.wait()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(messages.SIGN_S):
                    await self._has_work.wait()
            await asyncio.sleep(GATHER_S)
            is_sign = not self._has_work.is_set()
            self._has_work.clear()
            waiting, self._messages = self._messages, []
            if self._forgotten or is_sign:
                waiting.append(ForgetRows(tuple(self._forgotten)))
                self._forgotten.clear()
            rows, self._rows = self._rows, []
            waiting += map(SendRows, map(tuple, in_batches(rows, _row_bytes, MAX_ROWS_SENT)))
            for message in waiting:
                await socket.send_bytes(messages.encode(message))

    def _hear(self, frame: bytes) -> None:
        match read_from_agent(frame):
            case AgentState() as state:
                self.state, self.trouble = self._own(state), ""
                self._say_whether_emptied()
            case HeardTelemetry(message):
                self.on_telemetry(message)
            case HeardAnswer(message):
                self.on_answer(message)
            case HeldRows(keys, contents):
                told = chain(contents, repeat(UNTOLD))
                self._inherit(dict(zip(keys, told, strict=False)))
            case EndedRows(outcomes):
                for outcome in outcomes:
                    self._hear_outcome(outcome)

    def _own(self, state: AgentState) -> AgentState:
        """Raises ValueError for what another replica's agent says, which listens in its place."""
        if self._replica not in {"", state.name}:
            raise ValueError(f"engine {state.name} has its port")
        return state

    def _say_whether_emptied(self) -> None:
        if self.state is not None and self.state.is_emptied not in {None, self._is_emptied}:
            self._messages.append(EmptyEngine(self._is_emptied))
            self._has_work.set()

    def _inherit(self, held: Mapping[RowKey, str]) -> None:
        """What the agent has, when it answers again: rows that it has not, or of another content,
        are lost."""
        on_the_way = {row.key for row in self._rows}
        self._lose([
            key
            for key, content in self._contents.items()
            if key not in on_the_way and held.get(key) not in {content, UNTOLD}
        ])
        known = self._awaited.keys() | self._delivered | set(self._forgotten)
        for key in held.keys() - known:
            self.inherited[key[0]][key[1]] = held[key]
        self.has_met.set()
        self._has_heard.set()

    def _hear_outcome(self, outcome: Outcome) -> None:
        key = (outcome.job_id, outcome.row)
        awaited = self._awaited.get(key)
        if awaited is not None and not awaited.done():
            # Another one may have crossed the row on its way: of what the row was before.
            if outcome.content in {self._contents[key], UNTOLD}:
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
            rows.pop(key[1], None)
            if not rows:
                del self.inherited[key[0]]

    def _explain_absence(self) -> str:
        return f"the agent at {self.base_url} does not answer: {self.trouble or 'it was restarted'}"

    def _why(self, error: BaseException) -> str:
        """What went wrong, in one line."""
        line = " ".join(str(error).split()) or type(error).__name__
        if getattr(error, "status", None) == HTTPStatus.CONFLICT:
            line = "it has the daemon of another store, or one that has led since"
        elif isinstance(error, aiohttp.ClientConnectorCertificateError):
            line = "it does not hold this secret"
            if self._certificate is not None:
                says = getattr(error.certificate_error, "verify_message", "is not valid")
                line = f"its certificate: {says.rstrip('.')}; see `certificate`"
        elif self._certificate is not None and _is_dropped(error):
            line += "; it may hold another secret"
        return line


def _is_dropped(error: BaseException) -> bool:
    """Whether a connection ended that had begun: TLS 1.3 tells a caller late that it is refused."""
    ends = aiohttp.ServerDisconnectedError, aiohttp.ClientConnectionResetError
    return isinstance(error, ends) or type(error) is aiohttp.ClientOSError


def _row_bytes(row: SentRow) -> int:
    return len(row.body)


def ignore(_message: bytes) -> None:
    """Nobody listens."""


def _stamp_of(path: Path | None) -> tuple[int, int] | None:
    """Another one when the file was written or replaced; None where there is none."""
    with suppress(OSError):
        if path is not None:
            status = path.stat()
            return status.st_mtime_ns, status.st_ino
    return None
