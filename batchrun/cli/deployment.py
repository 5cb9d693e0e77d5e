"""The `up`, `down`, `init` and `version` commands, and the daemon as a background process."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from batchrun import __version__
from batchrun.cli.client import DaemonClient
from batchrun.cli.console import (
    ConfigOption,
    HomeOption,
    JsonOption,
    ListenOption,
    ModelOption,
    note,
    print_json,
    progress_bar,
    say,
)
from batchrun.config import STOCK_POLICY, Deployment, load_deployment, load_home
from batchrun.engine import process
from batchrun.errors import BatchrunError, DaemonUnavailableError, InputError, StateError
from batchrun.home import Home

POLL_INTERVAL_S = 0.2
STOP_WAIT_S = 15.0


def read_deployment(config: Path | None, **flags: str | None) -> Deployment:
    """The deployment, as `load_deployment` has it, with every name in it known to this batchrun."""
    from batchrun.cache.eviction import EVICTIONS
    from batchrun.estimator.forecast import ForecastRule
    from batchrun.scheduling.policies import POLICIES, QUEUES

    names = {
        "policy": (*POLICIES, STOCK_POLICY),
        "online_queue": QUEUES,
        "eviction": EVICTIONS,
        "forecast_rule": list(ForecastRule),
    }
    return load_deployment(config, names, **flags)


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
    deployment = read_deployment(config, model=model, listen=listen)
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
    from batchrun.server.api.process import serve

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
    from batchrun.files import StoreLock

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


SAMPLE_ROWS = 16

DEPLOYMENT_FILE = """\
# The deployment: what `batchrun up` and `batchrun run` start. Every key may be left out.

# A folder, a Hugging Face id, or `tiny`: a small model with random weights that batchrun builds
# itself, to try things out. Its answers are noise.
model: tiny

# Where your applications find the online endpoint (OpenAI's API, under /v1).
listen: 127.0.0.1:8000

# One engine that batchrun starts; vllm_args go to vLLM as they are. To use a vLLM server that
# runs already, write instead:   - attach: http://127.0.0.1:8001
engines:
  - vllm_args: []
"""

JOB_FILE = """\
# A batch job: rows in, one answer a row out.   batchrun run jobs/sample.yaml
name: sample
model: default                    # the model of batchrun.yaml

input:
  path: ../data/sample.parquet    # relative to this file; Parquet, JSONL or CSV
  id: id                          # a unique column; left out: the row number
  messages:                       # Jinja2 over the row's columns; what rows share comes first
    - role: user
      content: "{{ document }}\\n\\nQuestion: {{ question }}\\nAnswer:"

request: {max_tokens: 32, temperature: 0}

output:
  path: results/sample.parquet    # relative to the folder you call batchrun from
  keep: [question, answer]        # input columns to join back
"""


def init(
    folder: Annotated[Path, typer.Argument(help="Where to write.")] = Path(),
    *,
    as_json: JsonOption = False,
) -> None:
    """Write batchrun.yaml, a job file and a small sample, so that `run` works at once."""
    from batchrun.samples.generators import write_sample

    texts = {"batchrun.yaml": DEPLOYMENT_FILE, "jobs/sample.yaml": JOB_FILE}
    data = folder / "data" / "sample.parquet"
    paths = [*(folder / name for name in texts), data]
    for path in paths:
        if path.exists():
            raise InputError(f"{path} exists already; init overwrites nothing")
    try:
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        write_sample("loogle", data, rows=SAMPLE_ROWS)
    except (OSError, InputError) as error:
        with suppress(OSError):
            for path in paths:
                path.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{folder}: cannot be written: {reason}") from error
    names = [*texts, "data/sample.parquet"]
    if as_json:
        print_json({"written": [str(folder / name) for name in names]})
        return
    for name in names:
        say(str(folder / name))
    enter = "" if folder.absolute() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    say(f"next: {enter}batchrun run jobs/sample.yaml")


def version(*, as_json: JsonOption = False) -> None:
    """Print the version."""
    if as_json:
        print_json({"version": __version__})
    else:
        say(f"batchrun {__version__}")
