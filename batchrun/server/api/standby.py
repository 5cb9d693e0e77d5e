"""A daemon that does not lead: it waits until it does, tells what it can, keeps its gateway up.
Also the server on loopback that every daemon has.

It starts no engine, and all that it changes in the store is that it asks the leader. Engines that
others start are looked at, so that calls go on through the gateway here.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import os
import secrets
import signal
import socket
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from urllib.parse import quote, urlsplit

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from batchrun.daemon.daemon import SWITCH_SETTING
from batchrun.daemon.supervisor import Supervisor
from batchrun.daemon.view import view_stored, view_stored_job
from batchrun.daemon.writer import cancel_all
from batchrun.errors import (
    BatchrunError,
    DaemonUnavailableError,
    NotLeadingError,
    StoreError,
    StoreLockedError,
    StoreUnreachableError,
)
from batchrun.files import write_atomically
from batchrun.home import CONTROL_PREFIX, GATEWAY_HEADER, DaemonAddress, Home
from batchrun.jobs.objects import in_thread
from batchrun.keys import is_loopback
from batchrun.server.api.errors import STANDS_BY, install_error_handlers
from batchrun.server.api.key_list import KeyList
from batchrun.server.api.metrics import render_role
from batchrun.server.api.picture import view_engines, view_role
from batchrun.server.web.gateway_figures import GatewayFigures
from batchrun.server.web.pages import PREFIX
from batchrun.store import jobs
from batchrun.store.database import Store
from batchrun.store.orders import Order, ask_leader
from batchrun.store.place import DaemonLock

log = logging.getLogger(__name__)

TRY_S = 0.5
"""How often it tries to lead."""
ASK_S, REST_S = 2.0, 5.0
"""So long the leader is asked for a job's view; so long it is let alone where it did not answer."""
MOST_VIEWS = 100


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the daemon has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class LocalServer:
    """A free port on loopback with two secrets: `address` holds that of the command line."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.address = DaemonAddress(os.getpid(), url, secrets.token_urlsafe(32))
        self.gateway_key = secrets.token_urlsafe(32)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def for_gateway(self) -> dict[str, str]:
        """Where the gateway finds it, and what lets it in."""
        return {"url": self.address.url, "gateway_key": self.gateway_key}

    def start(self, app: FastAPI, home: Home) -> None:
        """Serve `app`, and leave the address in the home."""
        # httptools reads on after an early answer, so that a refused upload hears why.
        config = uvicorn.Config(app, http="httptools", log_level="warning", access_log=False)
        self._server = _Server(config)
        record = json.dumps(asdict(self.address)).encode()
        write_atomically(home.daemon_record, record, mode=0o600)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def stop(self) -> None:
        """Answer what is being answered, and no more."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving


def catch_signals() -> asyncio.Future[int]:
    """The first of SIGTERM and SIGINT that comes."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def on_signal(number: int) -> None:
        if not ended.done():
            ended.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return ended


@dataclass(slots=True)
class _Seen:
    """A job as it was when looking at it began."""

    began_s: float = -math.inf
    view: dict[str, object] = field(default_factory=dict)
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class Standby:
    """Waits for `lock`; `keys` are those that the gateway here lets in, `job_s` `timeouts.job`."""

    store: Store
    lock: DaemonLock
    supervisor: Supervisor
    keys: KeyList
    job_s: float | None
    _trouble: str | None = field(default=None)
    _views: dict[str, _Seen] = field(default_factory=dict)
    _unled_until_s: float = -math.inf
    _ends: bool = False

    async def run(
        self, server: LocalServer, home: Home, beside: Coroutine[None, None, None]
    ) -> None:
        """Returns once this daemon leads; `beside` runs until then. Raises EngineError when its
        gateway cannot start."""
        server.start(make_app(self, server), home)
        with suppress(StoreError):
            leader = await asyncio.to_thread(jobs.read_leader, self.store)
            log.info("stands by; %s leads (term %d)", leader.name, leader.term)
        works = self.supervisor.stand_by(), self.keys.keep_published(), beside
        tasks = [asyncio.create_task(each) for each in works]
        try:
            while not await self._leads():
                done, _ = await asyncio.wait(
                    tasks, timeout=TRY_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
        finally:
            self._ends = True
            await cancel_all(tasks)
            await server.stop()
            await self.supervisor.close()

    async def picture(self, job: str | None = None) -> dict[str, object]:
        """What `status` shows, this job too. Raises StoreError."""
        leader = await asyncio.to_thread(jobs.read_leader, self.store)
        is_on = await asyncio.to_thread(jobs.read_setting, self.store, SWITCH_SETTING, True)
        return {
            "gateway": self.supervisor.gateway_url,
            "leadership": view_role(leader, leads=False),
            "offline": bool(is_on),
            "stalled": self._trouble,
            "progress": None,
            "engines": view_engines(self.supervisor.slots, GatewayFigures("", "")),
            "fleets": self.supervisor.fleets.view(),
            "felt": [],
            **await asyncio.to_thread(view_stored, self.store, job, self.job_s),
        }

    async def job(self, job: str) -> dict[str, object]:
        """One job, by id, prefix or name; while the store does not answer, as it was last seen. Who
        asks at once is told the same. Raises UnknownJobError, StoreError, and
        DaemonUnavailableError when this daemon just begins to lead."""
        came_s = time.monotonic()
        if len(self._views) >= MOST_VIEWS:
            self._views.clear()
        seen = self._views.setdefault(job, _Seen())
        async with seen.looking:
            if self._ends:
                raise DaemonUnavailableError("this daemon begins to lead, or ends")
            if seen.began_s < came_s:
                seen.began_s = time.monotonic()
                try:
                    seen.view = await in_thread(self._view, job)
                except (StoreLockedError, StoreUnreachableError) as error:
                    if not seen.view:
                        raise
                    seen.view |= {"stalled": str(error)}
            return seen.view

    def _view(self, job: str) -> dict[str, object]:
        """As the leader tells it, which need not count rows, else as the store has it."""
        if time.monotonic() > self._unled_until_s:
            order = Order("GET", f"/jobs/{quote(job, safe='')}", None, ASK_S)
            try:
                answer = ask_leader(self.store, order)
            except BatchrunError:
                self._unled_until_s = time.monotonic() + REST_S
            else:
                if answer.status == HTTPStatus.OK:
                    return dict(json.loads(answer.text))
        return view_stored_job(self.store, job) | {"stalled": None, "engine_failure": None}

    async def _leads(self) -> bool:
        try:
            if await asyncio.to_thread(self.lock.take):
                return True
            leader = await asyncio.to_thread(jobs.read_leader, self.store)
        except StoreError as error:
            if str(error) != self._trouble:
                log.error("%s", error)
            self._trouble = str(error)
            return False
        self._trouble = None
        self.supervisor.leader_gateway = reached(leader)
        return False


def reached(leader: jobs.Leader) -> str | None:
    """The leader's gateway; on another machine an address of loopback would be our own."""
    host = urlsplit(leader.gateway).hostname or ""
    is_here = leader.name.startswith(f"{socket.gethostname()}:")
    return leader.gateway if host and (is_here or not is_loopback(host)) else None


def make_app(standby: Standby, server: LocalServer) -> FastAPI:
    """The routes of a daemon, as far as one that stands by has them; the others name the leader."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    install_error_handlers(app)
    token = f"Bearer {server.address.token}"

    def check(request: Request, header: str, wanted: str) -> None:
        if not hmac.compare_digest(request.headers.get(header, "").encode(), wanted.encode()):
            raise HTTPException(401, "wrong or missing token")

    @app.get("/healthz")
    async def healthz() -> dict[str, object]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        check(request, GATEWAY_HEADER, server.gateway_key)
        leader = await asyncio.to_thread(jobs.read_leader, standby.store)
        return Response(render_role(leader.term), media_type=CONTENT_TYPE_LATEST)

    @app.get(f"{CONTROL_PREFIX}/status")
    async def status(request: Request) -> dict[str, object]:
        check(request, "authorization", token)
        return await standby.picture(request.query_params.get("job"))

    @app.get(f"{CONTROL_PREFIX}/jobs/{{job_id}}")
    async def job(request: Request, job_id: str) -> dict[str, object]:
        check(request, "authorization", token)
        return await standby.job(job_id)

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    async def others(request: Request, path: str) -> Response:
        if path.startswith(CONTROL_PREFIX.strip("/")):
            check(request, "authorization", token)
        if f"/{path}".startswith(PREFIX):
            return HTMLResponse(f"{STANDS_BY}: the page is there\n", status_code=503)
        leader = await asyncio.to_thread(jobs.read_leader, standby.store)
        raise NotLeadingError(f"this daemon stands by; {leader.name} leads: give the command there")

    return app
