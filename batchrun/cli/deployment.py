"""The `up` and `down` commands, and the daemon as a background process."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from batchrun.cli.console import note, print_json, progress_bar, say
from batchrun.cli.daemon_client import DaemonClient
from batchrun.cli.options import ConfigOption, HomeOption, JsonOption, ListenOption, ModelOption
from batchrun.config import Deployment, load_deployment, load_home
from batchrun.engine import process
from batchrun.errors import BatchrunError, DaemonUnavailableError, StateError
from batchrun.home import Home

POLL_INTERVAL_S = 0.2
STOP_WAIT_S = 15.0


def up(
    *,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background; return when ready.")
    ] = False,
    model: ModelOption = None,
    listen: ListenOption = None,
    config: ConfigOption = None,
    home_path: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start the daemon, the gateway and the engines (adopting those that still run)."""
    home = load_home(home_path)
    deployment = load_deployment(config, model=model, listen=listen)
    if detach:
        picture = start_in_background(deployment, home, _passed_on(model, listen, config))
        if as_json:
            print_json(picture)
        else:
            say(f"online endpoint {picture['gateway']}/v1")
        return
    _run_here(deployment, home)


def down(*, home_path: HomeOption = None, as_json: JsonOption = False) -> None:
    """Stop the daemon, the gateway and the engines. Jobs stay, and go on with the next `up`."""
    stopped = stop_everything(load_home(home_path))
    if as_json:
        print_json({"stopped": stopped})
    else:
        say(f"stopped: {', '.join(stopped)}" if stopped else "nothing was running")


def start_in_background(deployment: Deployment, home: Home, flags: list[str]) -> dict[str, Any]:
    """Start a detached daemon and wait until an engine is ready; returns its status.

    Raises what made the daemon give up, as one line.
    """
    if DaemonClient(home).is_running():
        raise StateError(f"a daemon runs already for {home.path}; stop it with `batchrun down`")
    home.create()
    log_path = home.log / "daemon.log"
    log_size = log_path.stat().st_size if log_path.exists() else 0
    record = process.spawn(
        [sys.executable, "-m", "batchrun", "up", "--home", str(home.path), *flags],
        env=dict(os.environ),
        log_path=log_path,
        record_path=home.daemon_process,
    )

    def check() -> None:
        if not process.is_alive(record):
            raise BatchrunError(_last_words(log_path, log_size))

    return _wait_until_ready(home, deployment, check)


def stop_everything(home: Home) -> list[str]:
    """Stop daemon, gateway and engines of a home; returns what was running."""
    stopped: list[str] = []
    is_daemon_stopped = _stop_daemon(home)
    # A daemon that has only just been spawned does not hold the lock yet.
    if process.stop_recorded(home.daemon_process, STOP_WAIT_S) or is_daemon_stopped:
        stopped.append("daemon")
    if process.stop_recorded(home.gateway_process):
        stopped.append("gateway")
    for record_path in sorted(home.run.glob("engine-*.json")):
        if process.stop_recorded(record_path):
            stopped.append(record_path.stem.replace("engine-", "engine "))
    return stopped


def _run_here(deployment: Deployment, home: Home) -> None:
    from batchrun.api import serve

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )

    def on_ready() -> None:
        note(f"online endpoint http://{deployment.listen}/v1")

    try:
        ended_by = serve(deployment, home, on_ready=on_ready)
    except BatchrunError:
        if sys.stdin.isatty():
            stop_everything(home)
        raise
    if ended_by == signal.SIGINT:
        note("stopping the gateway and the engines too (jobs go on with the next `batchrun up`)")
        stop_everything(home)


def _stop_daemon(home: Home) -> bool:
    """SIGTERM to the holder of the store's lock, SIGKILL after `STOP_WAIT_S`."""
    from batchrun.store import StoreLock

    lock = StoreLock(home.store_lock)
    deadline_s = time.monotonic() + STOP_WAIT_S
    signalled: int | None = None
    while (pid := lock.find_holder()) is not None:
        with suppress(ProcessLookupError):
            if pid and signalled != pid:
                os.kill(pid, signal.SIGTERM)
                signalled = pid
            elif pid and time.monotonic() > deadline_s:
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_INTERVAL_S)
    return signalled is not None


def _wait_until_ready(
    home: Home, deployment: Deployment, check: Callable[[], None]
) -> dict[str, Any]:
    with progress_bar() as progress:
        task = progress.add_task("starting", total=None)
        while True:
            check()
            try:
                picture = DaemonClient(home).get("/status")
            except DaemonUnavailableError:
                time.sleep(POLL_INTERVAL_S)
                continue
            states = [engine["state"] for engine in picture["engines"]]
            if "ready" in states:
                return picture
            stages = {engine["name"]: engine["stage"] for engine in picture["engines"]}
            described = "; ".join(f"engine {name}: {stage}" for name, stage in stages.items())
            progress.update(task, description=described)
            time.sleep(POLL_INTERVAL_S)


def _last_words(log_path: Path, start: int) -> str:
    """The daemon's own error line, from what it has logged since `start`."""
    with log_path.open("rb") as log:
        log.seek(start)
        lines = log.read().decode(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("batchrun: ")] or lines
    return said[-1].removeprefix("batchrun: ") if said else f"the daemon ended; log: {log_path}"


def _passed_on(model: str | None, listen: str | None, config: Path | None) -> list[str]:
    flags: list[str] = []
    for flag, value in (("--model", model), ("--listen", listen), ("--config", config)):
        if value is not None:
            flags += [flag, str(value)]
    return flags
