"""The daemon process: lock, store, engines, gateway, loop and HTTP edge, in that order."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI

from batchrun.config import Deployment
from batchrun.daemon.daemon import Daemon
from batchrun.daemon.engine_link import Slot
from batchrun.daemon.supervisor import Supervisor, engine_python, split_listen
from batchrun.engine import process
from batchrun.errors import BatchrunError, EngineError, StoreUnreachableError
from batchrun.files import (
    StoreLock,
    allow_many_open_files,
    remove_left_scratch,
    write_atomically,
)
from batchrun.home import DaemonAddress, Home
from batchrun.jobs.on_done import Messenger
from batchrun.jobs.results.file_bytes import FileBytes, open_file_bytes, recover_files
from batchrun.media.fetching import ImageFetcher
from batchrun.media.hosts import ImageHosts
from batchrun.quantities import parse_age_s
from batchrun.server.api.app import Edge, make_app
from batchrun.server.api.errors import Callers
from batchrun.server.api.key_list import KeyList, limits_in
from batchrun.server.api.picture import Status
from batchrun.server.api.watch import end_process
from batchrun.server.web.gateway_figures import GatewayFigures
from batchrun.server.web.history import History
from batchrun.server.web.pages import Pages, dashboard_router
from batchrun.server.web.sight import Sight
from batchrun.server.web.uploads import Desk
from batchrun.store.database import Store
from batchrun.store.place import DaemonLock, open_for

log = logging.getLogger(__name__)

LOCK_WAIT_S = 5.0
LOCK_CHECK_S = 1.0
CLEAN_STOP_S = 9.5
SWITCH_INTERVAL_S = 0.001
"""Threads that plan or write output give the interpreter to the event loop so soon: an answer takes
several such turns."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the daemon has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(deployment: Deployment, home: Home, *, on_ready: Callable[[], None]) -> int:
    """Run the daemon until SIGTERM or SIGINT; returns the signal that ended it.

    `on_ready` is called once an engine is ready. The gateway and managed engines outlive this.
    Raises StoreLockedError, StoreError, EngineError.
    """
    home.create()
    allow_many_open_files()
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with (
        StoreLock(home.store_lock, wait_s=LOCK_WAIT_S),
        closing(open_for(home, deployment.store_url)) as store,
        DaemonLock(store, wait_s=LOCK_WAIT_S) as lock,
    ):
        secret = {"engines": {"__all__": {"api_key"}}}
        resolved = deployment.model_dump_json(indent=2, exclude=secret)
        write_atomically(home.resolved_config, resolved.encode(), mode=0o600)
        place = open_file_bytes(home, deployment.files, store)
        recover_files(store, place)
        remove_left_scratch(home.inputs)
        keys = KeyList(store, home.api_keys, limits_in(deployment))
        keys.check(split_listen(deployment.listen)[0])
        keys.publish()
        # What is imported stays: to look through it again and again would stop the loop for 70 ms.
        gc.freeze()
        try:
            return uvloop.run(_run(deployment, home, (store, place), lock, on_ready))
        finally:
            home.daemon_record.unlink(missing_ok=True)


async def _run(
    deployment: Deployment,
    home: Home,
    kept: tuple[Store, FileBytes],
    lock: DaemonLock,
    on_ready: Callable[[], None],
) -> int:
    store, place = kept
    listener = socket.create_server(("127.0.0.1", 0))
    address = DaemonAddress(
        os.getpid(), f"http://127.0.0.1:{listener.getsockname()[1]}", secrets.token_urlsafe(32)
    )
    gateway_key = secrets.token_urlsafe(32)
    supervisor = Supervisor(deployment, home, {"url": address.url, "gateway_key": gateway_key})
    limits = limits_in(deployment)
    daemon = _daemon(deployment, home, kept, supervisor.slots)
    figures = GatewayFigures(_local_url(deployment.listen), gateway_key)
    messenger = _messenger(store, deployment, home)
    status = Status(
        *(daemon, supervisor, figures),
        tellings=messenger.tellings,
        price_per_hour=deployment.price_per_hour,
    )
    _start_watch(status, home)
    routes = Edge(home, place, address.token, gateway_key, deployment.completion_windows, limits)
    # httptools reads on after an early answer, so that a refused upload hears why.
    app = make_app(daemon, status, routes)
    sight = Sight(daemon, status, home, History(home.history), figures, deployment.router)
    desk = Desk(home, deployment.file, deployment.model)
    pages = _add_dashboard(app, sight, desk, Callers(store, gateway_key, limits))
    server = _Server(uvicorn.Config(app, http="httptools", log_level="warning", access_log=False))
    write_atomically(home.daemon_record, json.dumps(asdict(address)).encode(), mode=0o600)
    ended = _catch_signals()
    edge = asyncio.create_task(server.serve(sockets=[listener]))
    work = asyncio.create_task(daemon.run())
    engines = asyncio.create_task(_supervise(supervisor, on_ready))
    guard = asyncio.create_task(_guard(lock))
    beside = [
        asyncio.create_task(each) for each in (pages.watch(), messenger.run(), status.watch.beat())
    ]
    try:
        waited: set[asyncio.Future[Any]] = {ended, work, engines, guard}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    finally:
        failure = None if ended.done() else _failure_of(guard, engines, work)
        _end_within(CLEAN_STOP_S, failure)
        pages.close()
        status.watch.stop()
        for task in (work, engines, guard, *beside):
            task.cancel()
        await asyncio.gather(work, engines, guard, *beside, return_exceptions=True)
        server.should_exit = True
        await edge
        await supervisor.close()
    if failure is not None:
        raise failure
    return ended.result()


def _start_watch(status: Status, home: Home) -> None:
    """Have a thread watch the loop that runs now."""
    status.watch.on_end = partial(_begin_anew, home)
    status.watch.start()


def _begin_anew(home: Home, line: str) -> None:
    """The loop hangs: end, and where `up -d` started this process, start the next one."""
    record = process.read_record(home.daemon_process)
    if record is not None and record.pid == os.getpid():
        with suppress(OSError):
            process.spawn(
                [sys.executable, *sys.orig_argv[1:]],
                env=dict(os.environ),
                log_path=home.log / "daemon.log",
                record_path=home.daemon_process,
            )
    end_process(line)


def _daemon(
    deployment: Deployment, home: Home, kept: tuple[Store, FileBytes], slots: Sequence[Slot]
) -> Daemon:
    store, place = kept
    retention = deployment.retention
    return Daemon(
        store,
        slots,
        home.inputs,
        model_folder=partial(deployment.model_folder, home),
        retention_s=None if retention is None else parse_age_s(retention),
        files=place,
        images=ImageFetcher(ImageHosts(deployment.image_hosts)),
        python=engine_python(deployment.engines[0], home),
        key_limits=limits_in(deployment),
        kept_in=home.kept_rows,
        timeouts=deployment.timeouts,
    )


def _messenger(store: Store, deployment: Deployment, home: Home) -> Messenger:
    made = Messenger(store, deployment.on_done, home.path)
    made.load()
    return made


def _local_url(listen: str) -> str:
    """Where this machine reaches the gateway."""
    host, port = split_listen(listen)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _add_dashboard(app: FastAPI, sight: Sight, desk: Desk, callers: Callers) -> Pages:
    pages = Pages(sight, desk)
    app.include_router(dashboard_router(pages, sight, callers))
    return pages


def _failure_of(*tasks: asyncio.Task[None]) -> BatchrunError:
    """What ended the first of these tasks that ended, in one line: none of them ends by itself."""
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, BatchrunError):
                return error
            return EngineError(f"the daemon ended: {_innermost(error)}; daemon.log has more")
    return EngineError("the daemon ended by itself")


def _innermost(error: BaseException) -> str:
    """One line for an error, out of the groups that it comes in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, BatchrunError) else repr(error)


async def _supervise(supervisor: Supervisor, on_ready: Callable[[], None]) -> None:
    await supervisor.start()
    on_ready()
    await supervisor.watch()


async def _guard(lock: DaemonLock) -> None:
    """Watch the lock; raises StoreLockedError once another daemon has it."""
    trouble: str | None = None
    while True:
        try:
            await asyncio.to_thread(lock.check)
        except StoreUnreachableError as error:
            if trouble is None:
                log.error("%s", error)
            trouble = str(error)
        else:
            trouble = None
        await asyncio.sleep(LOCK_CHECK_S)


def _catch_signals() -> asyncio.Future[int]:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def on_signal(number: int) -> None:
        if not ended.done():
            ended.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return ended


def _end_within(limit_s: float, failure: BatchrunError | None) -> None:
    """Leave at the latest then, even if a thread is still writing a (temporary) output file."""

    def leave() -> None:
        if failure is None:
            os._exit(0)
        log.critical("%s", failure)
        os._exit(BatchrunError.exit_code)

    watchdog = threading.Timer(limit_s, leave)
    watchdog.daemon = True
    watchdog.start()
