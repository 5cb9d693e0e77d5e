"""The `up`, `down`, `init` and `version` commands, and the daemon as a background process."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import time
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
    ProgressBar,
    answer,
    note,
)
from batchrun.config import STOCK_POLICY, Deployment, load_deployment
from batchrun.engine import process
from batchrun.errors import BatchrunError, DaemonUnavailableError, InputError, StateError
from batchrun.home import Home

POLL_INTERVAL_S = 0.2
STOP_WAIT_S = 15.0


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


def up(
    *,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background; return when ready.")
    ] = False,
    model: ModelOption = None,
    listen: ListenOption = None,
    config: ConfigOption = None,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Start the daemon, the gateway and the engines (adopting those that still run)."""
    deployment = read_deployment(config, model=model, listen=listen)
    if detach:
        picture = start_in_background(home, flags_of(config, model, listen))
        answer(picture, f"online endpoint {picture['gateway']}/v1", as_json=as_json)
    else:
        _run_here(deployment, home)


def down(*, home: HomeOption, as_json: JsonOption = False) -> None:
    """Stop the daemon, the gateway and the engines. Jobs stay, and go on with the next `up`."""
    stopped = stop_everything(home)
    shown = f"stopped: {', '.join(stopped)}" if stopped else "nothing was running"
    answer({"stopped": stopped}, shown, as_json=as_json)


def start_in_background(home: Home, flags: list[str]) -> dict[str, Any]:
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
    stages = "starting"
    with ProgressBar(after_s=0) as progress:
        while process.is_alive(record):
            progress(stages, 0, 0)
            with suppress(DaemonUnavailableError):
                picture = DaemonClient(home).get("/status")
                engines = picture["engines"]
                if any(engine["state"] == "ready" for engine in engines):
                    return picture
                stages = "; ".join(f"engine {each['name']}: {each['stage']}" for each in engines)
            time.sleep(POLL_INTERVAL_S)
    raise BatchrunError(_last_words(log_path, log_size))


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

    ready = f"online endpoint http://{deployment.listen}/v1"
    try:
        ended_by = serve(deployment, home, on_ready=lambda: note(ready))
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


def _last_words(log_path: Path, start: int) -> str:
    """The daemon's own error line, from what it has logged since `start`."""
    with log_path.open("rb") as log:
        log.seek(start)
        lines = log.read().decode(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("batchrun: ")] or lines
    return said[-1].removeprefix("batchrun: ") if said else f"the daemon ended; log: {log_path}"


def flags_of(config: Path | None, model: str | None, listen: str | None) -> list[str]:
    """What was said of the deployment, for another `batchrun up`."""
    said = {"--config": config, "--model": model, "--listen": listen}
    return [word for flag, value in said.items() if value for word in (flag, str(value))]


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
        for path, text in zip(paths, texts.values(), strict=False):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        write_sample("loogle", data, rows=SAMPLE_ROWS)
    except (OSError, BatchrunError) as error:
        with suppress(OSError):
            for path in paths:
                path.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{folder}: cannot be written: {reason}") from error
    enter = "" if folder.absolute() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    written = [str(path) for path in paths]
    following = f"next: {enter}batchrun run jobs/sample.yaml"
    answer({"written": written}, *written, following, as_json=as_json)


def version(*, as_json: JsonOption = False) -> None:
    """Print the version."""
    answer({"version": __version__}, f"batchrun {__version__}", as_json=as_json)
