"""A deployment as a thing that is started, found running, and stopped."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from batchrun.config import STOCK_POLICY, Deployment, load_deployment
from batchrun.control.client import DIRECT, DaemonClient
from batchrun.control.following import ProgressBar
from batchrun.engine import process
from batchrun.engine.replicas import end_fleet, leave_to_leader
from batchrun.errors import (
    BatchrunError,
    DaemonUnavailableError,
    EngineError,
    StateError,
    StoreError,
)
from batchrun.files import DAEMON, StoreLock, check_limits
from batchrun.home import Home
from batchrun.store.place import DaemonLock, open_for

POLL_INTERVAL_S = 0.2
CALLS_POLL_S = 0.05
CALLS_WAIT_S = 30.0
"""A gateway learns of an engine that is ready sooner, and waits no longer to see one answer."""
MEETING_WAIT_S = 5.0
"""A daemon that stands by, and so starts no engine, has met those that answer within so long."""
STOP_WAIT_S = 15.0
STANDBY_WAIT_S = 2.0
"""A daemon that stands by leads by then."""
LEAST_START_S = 5.0
ANSWER_WAIT_S = 10.0
"""A daemon that lives answers sooner."""
LOOK_WAIT_S = 5.0
"""Who only looks need not wait for so long."""
_SHOWN = {"gateway": "gateway", "agent": "agent of engine {}", "engine": "engine {}"}
"""What is said of a process that ended, by the first word of its record's name."""


def read_deployment(config: Path | None, **flags: str | None) -> Deployment:
    """The deployment, as `load_deployment` has it, with every name in it known to this batchrun."""
    from batchrun.cache.eviction import EVICTIONS
    from batchrun.estimator.forecast import ForecastRule
    from batchrun.routing.routers import ROUTERS
    from batchrun.scheduling.policies import POLICIES, QUEUES

    names = {
        "policy": (*POLICIES, STOCK_POLICY),
        "online_queue": QUEUES,
        "eviction": EVICTIONS,
        "router": ROUTERS,
        "forecast_rule": list(ForecastRule),
    }
    return load_deployment(config, names, **flags)


def flags_of(config: Path | None, **said: str | None) -> list[str]:
    """What was said of the deployment, for another `batchrun up`."""
    given = {"config": config, **said}
    flags = {f"--{name.replace('_', '-')}": value for name, value in given.items() if value}
    return [word for flag, value in flags.items() for word in (flag, str(value))]


def start_in_background(
    home: Home, flags: Sequence[str], *, is_shown: bool = True
) -> dict[str, Any]:
    """Start a detached daemon and wait until an engine is ready and the gateway passes calls to it,
    a little where it stands by; returns its status.

    Raises what made the daemon give up, as one line; then nothing runs that did not run before.
    """
    client = DaemonClient(home, timeout_s=ANSWER_WAIT_S)
    if client.is_running():
        raise StateError(f"a daemon runs already for {home.path}; stop it with `batchrun down`")
    if (silence := client.describe_silence()) is not None:
        raise StateError(f"{silence}; `batchrun down` ends it")
    check_limits(DAEMON)
    home.create()
    log_path = home.log / "daemon.log"
    log_size = log_path.stat().st_size if log_path.exists() else 0
    before = _recorded(home)
    try:
        record = process.spawn(
            [sys.executable, "-P", "-m", "batchrun", "up", "--home", str(home.path), *flags],
            env=dict(os.environ),
            log_path=log_path,
            record_path=home.daemon_process,
        )
        return _wait_until_ready(home, record, log_size, is_shown=is_shown)
    except (BatchrunError, OSError):
        # Engines that answer calls since before stay, and all that a daemon has which was faster.
        if StoreLock(home.store_lock).find_holder() is None:
            for nonce, path in _recorded(home).items():
                if nonce not in before:
                    process.stop_recorded(path, STOP_WAIT_S)
        raise


def _wait_until_ready(
    home: Home, record: process.ProcessRecord, log_size: int, *, is_shown: bool
) -> dict[str, Any]:
    started_s, usual = time.monotonic(), _usual_start(home)
    stages, met_by_s = "starting", 0.0
    with ProgressBar(after_s=0, is_shown=is_shown) as progress:
        while process.is_alive(record):
            progress(stages + usual, 0, 0)
            with suppress(DaemonUnavailableError):
                picture = _ask_own(home, record)
                engines = picture["engines"]
                now_s, is_standby = time.monotonic(), stands_by(picture)
                if any(engine["state"] == "ready" for engine in engines):
                    if not is_standby:
                        _remember_start(home, now_s - started_s)
                    _wait_for_calls(picture["gateway"], record)
                    return _ask_own(home, record)
                if is_standby and now_s > (met_by_s := met_by_s or now_s + MEETING_WAIT_S):
                    return picture
                stages = "; ".join(f"engine {each['name']}: {each['stage']}" for each in engines)
            time.sleep(POLL_INTERVAL_S)
    raise BatchrunError(last_words(home.log / "daemon.log", log_size))


def _ask_own(home: Home, daemon: process.ProcessRecord) -> dict[str, Any]:
    """The status that this daemon tells. Raises DaemonUnavailableError while it tells none: what
    answers may be another's, which was faster, and this one must not outlive it unseen."""
    address = home.read_daemon_address()
    if address is None or address.pid != daemon.pid:
        raise DaemonUnavailableError(f"the daemon of {home.path} that was started is not there yet")
    return DaemonClient(home).get("/status")


def _wait_for_calls(gateway_url: str, daemon: process.ProcessRecord) -> None:
    """Until the gateway says that calls can be answered, while the daemon lives."""
    deadline_s = time.monotonic() + CALLS_WAIT_S
    while time.monotonic() < deadline_s and process.is_alive(daemon):
        with suppress(OSError, http.client.HTTPException):
            DIRECT.open(gateway_url + "/readyz", timeout=ANSWER_WAIT_S).close()
            return
        time.sleep(CALLS_POLL_S)


def _recorded(home: Home) -> dict[str, Path]:
    """Where the daemon, the gateway and the engines of a home are recorded, by their nonces."""
    paths = (home.daemon_process, home.gateway_process, *sorted(home.run.glob("engine-*.json")))
    records = [(process.read_record(path), path) for path in paths]
    return {record.nonce: path for record, path in records if record is not None}


def stands_by(picture: dict[str, Any]) -> bool:
    """Whether another daemon leads."""
    known = picture["leadership"]
    return known is not None and known["role"] == "standby"


def _usual_start(home: Home) -> str:
    """How long the last start took that was one, in words; nothing where none is known."""
    with suppress(OSError, ValueError):
        return f" (the last start took {float(home.last_start.read_text()):.0f} s)"
    return ""


def _remember_start(home: Home, took_s: float) -> None:
    """Engines that ran already are there at once: that tells nothing of the next start."""
    if took_s >= LEAST_START_S:
        with suppress(OSError):
            home.last_start.write_text(f"{took_s:.1f}")


def find_running(home: Home) -> set[str]:
    """The daemon, gateway, engines, agents and fleets of a home that run, for `stop_everything`."""
    paths = [home.daemon_process, home.gateway_process]
    paths += [*home.run.glob("agent-*.json"), *home.run.glob("engine-*.json")]
    records = [process.read_record(path) for path in paths]
    running = {each.nonce for each in records if each is not None and process.find_family(each)}
    return running | {path.stem for path in home.run.glob("fleet-*.json")}


def find_daemon(home: Home) -> tuple[process.ProcessRecord | None, int | None]:
    """The daemon that was last started in the background, and the pid of the one that runs."""
    return process.read_record(home.daemon_process), StoreLock(home.store_lock).find_holder()


def is_led_by_another(home: Home) -> bool:
    """Whether the daemon of a home is not the one that was last started in the background."""
    own, holder = find_daemon(home)
    return holder is not None and (own is None or holder != own.pid)


def stop_everything(home: Home, *, spared: Collection[str] = ()) -> list[str]:
    """Stop daemon, gateway and engines of a home, but for those of `find_running` that are spared;
    returns what was running. Raises EngineError when Ray does not end a fleet, StoreError when the
    database does not tell whether to end any."""
    stopped: list[str] = []
    is_daemon_stopped = _stop_daemon(home)
    # A daemon that has only just been spawned does not hold the lock yet.
    if process.stop_recorded(home.daemon_process, STOP_WAIT_S) or is_daemon_stopped:
        stopped.append("daemon")
    ending = [home.gateway_process, *sorted(home.run.glob("agent-*.json"))]
    for record_path in [*ending, *sorted(home.run.glob("engine-*.json"))]:
        kind, _, name = record_path.stem.partition("-")
        record = process.read_record(record_path)
        if record is None or record.nonce in spared:
            continue
        end = process.stop_agent if kind == "agent" else process.stop_recorded
        if end(record_path):
            stopped.append(_SHOWN[kind].format(name))
    fleets = [each for each in sorted(home.run.glob("fleet-*.json")) if each.stem not in spared]
    if fleets:
        with _leading(home) as leads:
            if leads is not None:
                stopped += _end_fleets(fleets, home, leads)
            else:
                for seen in fleets:
                    leave_to_leader(seen)
    return stopped


def _end_fleets(fleets: Sequence[Path], home: Home, leads: Callable[[], bool]) -> list[str]:
    ended, failures = [], []
    for seen in fleets:
        try:
            name = _run(end_fleet(seen, home.log / f"{seen.stem}.log", leads))
            ended.append(f"fleet {name}")
        except EngineError as error:
            failures.append(str(error))
    if failures:
        raise EngineError("; ".join(failures))
    return ended


def _run(work: Coroutine[Any, Any, str]) -> str:
    """Also where a loop runs already, as in a cell of a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


@contextmanager
def _leading(home: Home) -> Iterator[Callable[[], bool] | None]:
    """Lead on the home's database, so that no daemon elsewhere places what is ended here: tells
    whether that still holds. None: another daemon leads now, and has the fleets."""
    if not home.store_url_file.exists():
        yield lambda: True
        return
    time.sleep(STANDBY_WAIT_S)
    with closing(open_for(home, str(home.store_location))) as store:
        lock = DaemonLock(store)
        try:
            yield partial(_still_leads, lock) if lock.take() else None
        finally:
            lock.release()


def _still_leads(lock: DaemonLock) -> bool:
    with suppress(StoreError):
        lock.check()
        return True
    return False


def _stop_daemon(home: Home) -> bool:
    """SIGTERM to the holder of the store's lock, SIGKILL after `STOP_WAIT_S`; then one that is not
    known is waited for no more."""
    lock = StoreLock(home.store_lock)
    deadline_s = time.monotonic() + STOP_WAIT_S
    signalled: int | None = None
    while (pid := lock.find_holder()) is not None:
        with suppress(ProcessLookupError):
            if pid and signalled != pid:
                os.kill(pid, signal.SIGTERM)
                signalled = pid
            elif time.monotonic() > deadline_s:
                if not pid:
                    break
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_INTERVAL_S)
    return signalled is not None


def last_words(log_path: Path, start: int) -> str:
    """The daemon's own error line, from what it has logged since `start`."""
    with log_path.open("rb") as log:
        log.seek(start)
        lines = log.read().decode(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("batchrun: ")] or lines
    return said[-1].removeprefix("batchrun: ") if said else f"the daemon ended; log: {log_path}"
