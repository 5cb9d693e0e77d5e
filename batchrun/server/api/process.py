"""The daemon process: lock, store, engines, gateway, loop and HTTP edge, in that order."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import uvloop

from batchrun.config import Deployment, split_listen
from batchrun.daemon.daemon import Daemon
from batchrun.daemon.engine_link import Slot
from batchrun.daemon.fleets import lone_fleet
from batchrun.daemon.supervisor import Supervisor, engine_python
from batchrun.daemon.writer import cancel_all
from batchrun.engine import process
from batchrun.errors import (
    BatchrunError,
    ConfigError,
    EngineError,
    NotLeadingError,
    StoreError,
    StoreUnreachableError,
)
from batchrun.files import StoreLock, allow_many_open_files, remove_left_scratch, write_atomically
from batchrun.home import Home
from batchrun.jobs.on_done import Messenger
from batchrun.jobs.results.file_bytes import FileBytes, open_file_bytes, recover_files
from batchrun.media.fetching import ImageFetcher
from batchrun.media.hosts import ImageHosts
from batchrun.quantities import parse_age_s
from batchrun.server.api.app import Edge, make_app
from batchrun.server.api.cheap_start import CheapStarts
from batchrun.server.api.errors import Callers
from batchrun.server.api.key_list import KeyList, limits_in
from batchrun.server.api.order_taker import OrderTaker
from batchrun.server.api.picture import Status
from batchrun.server.api.replica_follower import ReplicaFollower, fleets_to_follow
from batchrun.server.api.rolling import Rolling
from batchrun.server.api.standby import LocalServer, Standby, catch_signals
from batchrun.server.api.watch import end_process
from batchrun.server.web.calls_of_all import CallsOfAll, keep_reporting
from batchrun.server.web.gateway_figures import GatewayFigures
from batchrun.server.web.history import History
from batchrun.server.web.pages import Pages, dashboard_router
from batchrun.server.web.sight import Sight
from batchrun.server.web.uploads import Desk
from batchrun.store import jobs
from batchrun.store.database import Store
from batchrun.store.place import SILENT_S, DaemonLock, open_for

log = logging.getLogger(__name__)

LOCK_WAIT_S = 5.0
LEAD_WAIT_S = 1.0
"""A leader that was only just ended may still seem to lead for so long."""
LOCK_CHECK_S = 1.0
BEGAN_ANEW = "BATCHRUN_STANDS_BY_AGAIN"
"""Set in the environment of a daemon that led and was succeeded, or whose database went just as it
began to lead."""
CLEAN_STOP_S = 9.5
BEGIN_AGAIN_S = 5.0
SWITCH_INTERVAL_S = 0.001
"""Threads that plan or write output give the interpreter to the event loop so soon: an answer takes
several such turns."""


@dataclass(frozen=True, slots=True)
class Foreground:
    """Who runs the daemon in this process: hears that an engine is ready, and how long it goes on
    after each signal."""

    on_ready: Callable[[], None]
    after_s: Mapping[int, float] = field(default_factory=dict)

    def time_after(self, ended: asyncio.Future[int]) -> float:
        return self.after_s.get(ended.result(), 0.0) if ended.done() else 0.0


def serve(reread: Callable[[], Deployment], home: Home, foreground: Foreground) -> int:
    """Run the daemon until SIGTERM or SIGINT; returns the signal that ended it. `reread` tells the
    deployment as it is described now.

    On a database where another daemon leads it stands by first. The gateway and managed engines
    outlive this. The process ends 9.5 s after the signal, and the time that `foreground` has,
    whatever its threads do. Raises StoreLockedError, StoreError, EngineError, ConfigError.
    """
    deployment = reread()
    # A standby that lacks a profile would only find out when it has to lead.
    fleets_to_follow(deployment, home)
    home.create()
    allow_many_open_files()
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with StoreLock(home.store_lock, wait_s=LOCK_WAIT_S), closing(_open(home, deployment)) as store:
        secret = {"engines": {"__all__": {"api_key"}}}
        resolved = deployment.model_dump_json(indent=2, exclude=secret)
        write_atomically(home.resolved_config, resolved.encode(), mode=0o600)
        keys = KeyList(store, home.api_keys, limits_in(deployment))
        lone, is_heir = lone_fleet(deployment), False
        lock = DaemonLock(store, wait_s=LEAD_WAIT_S + (SILENT_S if lone else 0))
        try:
            # Recorded before it leads: `store check` and `gc` go by that.
            place = open_file_bytes(home, deployment.files, store)
            keys.check(split_listen(deployment.listen)[0])
            keys.publish()
            is_heir = not _leads_at_once(lock)
            if is_heir:
                is_new = BEGAN_ANEW not in os.environ
                if lone and is_new and jobs.read_leader(store).name != _name_of(home):
                    raise ConfigError(
                        f"engine {lone}: another daemon leads, and several on a database need one "
                        "secret of a fleet: `secret_file: PATH`, with the same content for each"
                    )
                ended = uvloop.run(_stand_by(deployment, home, keys, lock))
                if ended is not None:
                    return ended
            with _held(lock):
                return _lead(deployment, home, (store, place), reread, foreground, is_heir=is_heir)
        except StoreUnreachableError as error:
            if not is_heir and BEGAN_ANEW not in os.environ:
                raise
            log.error("%s", error)
            _stand_by_anew()
        finally:
            home.daemon_record.unlink(missing_ok=True)


def _open(home: Home, deployment: Deployment) -> Store:
    """The store; a former leader waits for one that does not answer, as it did before."""
    trouble = ""
    while True:
        try:
            return open_for(home, deployment.store_url)
        except StoreUnreachableError as error:
            if BEGAN_ANEW not in os.environ:
                raise
            if str(error) != trouble:
                log.error("%s", error)
            trouble = str(error)
        time.sleep(LOCK_CHECK_S)


def _leads_at_once(lock: DaemonLock) -> bool:
    try:
        lock.acquire()
    except NotLeadingError:
        return False
    except StoreUnreachableError:
        if BEGAN_ANEW not in os.environ:
            raise
        return False
    return True


async def _stand_by(
    deployment: Deployment, home: Home, keys: KeyList, lock: DaemonLock
) -> int | None:
    """Returns once this daemon leads (None), or the signal that ended it before."""
    server = LocalServer()
    supervisor = Supervisor(deployment, home, server.for_gateway)
    ended = catch_signals()
    figures = GatewayFigures(_local_url(deployment.listen), server.gateway_key)
    tells = keep_reporting(keys.store, _name_of(home), figures)
    standby = Standby(keys.store, lock, supervisor, keys, deployment.timeouts.job)
    work = asyncio.create_task(standby.run(server, home, tells))
    waited: set[asyncio.Future[Any]] = {ended, work}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        work.cancel()
        await asyncio.wait([work])
        return ended.result()
    work.result()
    return None


@contextmanager
def _held(lock: DaemonLock) -> Iterator[None]:
    """See to it that this daemon leads, in a thread that nothing else holds up. Once another does,
    the process begins anew and stands by: no memory of its time as a leader is left."""
    stopped = threading.Event()

    def hold() -> None:
        trouble: str | None = None
        while not stopped.wait(LOCK_CHECK_S):
            try:
                lock.check()
            except NotLeadingError as error:
                log.critical("from now on it stands by: %s", str(error).partition(";")[0])
                _stand_by_anew()
            except StoreError as error:
                if trouble is None:
                    log.error("%s", error)
                trouble = str(error)
            else:
                trouble = None

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(LOCK_CHECK_S)
        if not thread.is_alive():
            lock.release()


def _stand_by_anew() -> NoReturn:
    os.environ[BEGAN_ANEW] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _lead(
    deployment: Deployment,
    home: Home,
    kept: tuple[Store, FileBytes],
    reread: Callable[[], Deployment],
    foreground: Foreground,
    *,
    is_heir: bool,
) -> int:
    """`is_heir`: it stood by before, and engines that are not there now are waited for."""
    recover_files(*kept)
    remove_left_scratch(home.inputs)
    # What is imported stays: to look through it again and again would stop the loop for 70 ms.
    gc.freeze()
    return uvloop.run(_run(deployment, home, kept, reread, foreground, is_heir=is_heir))


async def _run(
    deployment: Deployment,
    home: Home,
    kept: tuple[Store, FileBytes],
    reread: Callable[[], Deployment],
    foreground: Foreground,
    *,
    is_heir: bool,
) -> int:
    store, place = kept
    server = LocalServer()
    supervisor = Supervisor(deployment, home, server.for_gateway, store)
    keys = KeyList(store, home.api_keys, limits_in(deployment))
    daemon = _daemon(deployment, home, kept, supervisor.slots)
    figures = GatewayFigures(_local_url(deployment.listen), server.gateway_key)
    calls = CallsOfAll(store, daemon.name, figures)
    follower = ReplicaFollower(deployment, home, daemon, supervisor.fleets, calls)
    cheap = CheapStarts(daemon, calls)
    messenger = _messenger(store, deployment, home)
    status = Status(
        *(daemon, supervisor, figures),
        tellings=messenger.tellings,
        price_per_hour=deployment.price_per_hour,
    )
    _start_watch(status, home)
    edge = Edge(
        home,
        place,
        server.address.token,
        server.gateway_key,
        deployment.completion_windows,
        Rolling(daemon, supervisor.fleets, home, reread),
        keys,
    )
    app = make_app(daemon, status, edge)
    sight = Sight(daemon, status, home, History(home.history), figures, deployment.router)
    desk = Desk(home, deployment.file, deployment.model, edge.traffic.uploads)
    pages = Pages(sight, desk, edge.traffic.downloads)
    app.include_router(
        dashboard_router(pages, sight, Callers(store, server.gateway_key, keys.defaults))
    )
    ended = catch_signals()
    server.start(app, home)
    work = asyncio.create_task(daemon.run())
    engines = asyncio.create_task(
        supervisor.run(foreground.on_ready, lambda: store.leads_surely, is_heir=is_heir)
    )
    works = [pages.watch, messenger.run, status.watch.beat, follower.run, cheap.run]
    if not store.is_sqlite:
        works += [keys.keep_published, OrderTaker(store, server.address).run]
    beside = [asyncio.create_task(_keep_up(each)) for each in works]
    try:
        waited: set[asyncio.Future[Any]] = {ended, work, engines}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    finally:
        failure = None if ended.done() else _failure_of(engines, work)
        _end_within(CLEAN_STOP_S + foreground.time_after(ended), failure)
        pages.close()
        status.watch.stop()
        await cancel_all((work, engines, *beside))
        await server.stop()
        await supervisor.close()
    if failure is not None:
        raise failure
    return ended.result()


async def _keep_up(work: Callable[[], Awaitable[None]]) -> None:
    """What goes on beside the daemon: where an error ends it, it begins again."""
    while True:
        try:
            return await work()
        except Exception:
            log.exception("%s ended, and begins again", getattr(work, "__qualname__", work))
            await asyncio.sleep(BEGIN_AGAIN_S)


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
        name=_name_of(home),
        first_model=deployment.first_model_of(deployment.engines[0]),
        gateway=deployment.gateway_for_others,
    )


def _name_of(home: Home) -> str:
    """What other daemons on the same database know this one by."""
    return f"{socket.gethostname()}:{home.path}"


def _messenger(store: Store, deployment: Deployment, home: Home) -> Messenger:
    made = Messenger(store, deployment.on_done, home.path)
    made.load()
    return made


def _local_url(listen: str) -> str:
    """Where this machine reaches the gateway."""
    host, port = split_listen(listen)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
