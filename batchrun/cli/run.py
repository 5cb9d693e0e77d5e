"""The `run` command: one job from nothing to its output file."""

from __future__ import annotations

import signal
from typing import Annotated, Any

import typer

from batchrun.cli.console import note
from batchrun.cli.daemon_client import DaemonClient
from batchrun.cli.deployment import start_in_background, stop_everything
from batchrun.cli.follow import follow
from batchrun.cli.jobs import hand_over, prepare
from batchrun.cli.options import (
    ConfigOption,
    HomeOption,
    JobFileArgument,
    JsonOption,
    ListenOption,
    ModelOption,
)
from batchrun.config import load_deployment, load_home
from batchrun.errors import DaemonUnavailableError
from batchrun.home import Home
from batchrun.store import NewJob, jobs, open_store
from batchrun.types import JobState


def run(
    file: JobFileArgument,
    *,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 when rows failed.")] = False,
    model: ModelOption = None,
    listen: ListenOption = None,
    config: ConfigOption = None,
    home_path: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a job file to its end: start what is needed, write the results, stop it again.

    Interrupted or killed, the same command goes on where it was.
    """
    home = load_home(home_path)
    deployment = load_deployment(config, model=model, listen=listen)
    job = prepare(file, home)
    client = DaemonClient(home)
    started = not client.is_running()
    if not started and (model or listen or config):
        note("a daemon runs already; --model, --listen and --config have no effect on it")
    job_id = None
    try:
        if started:
            flags = [] if config is None else ["--config", str(config)]
            flags += ["--model", model] if model else []
            flags += ["--listen", listen] if listen else []
            start_in_background(deployment, home, flags)
        job_id = _take_up(job, home, client)
        follow(client, job_id, strict=strict, as_json=as_json, go_on=f"run {file}")
    except KeyboardInterrupt:
        note(f"interrupted; `batchrun run {file}` goes on where it was")
        raise
    except DaemonUnavailableError as error:
        raise DaemonUnavailableError(
            f"the daemon ended while the job ran; `batchrun run {file}` goes on where it was "
            f"(log: {home.log / 'daemon.log'})"
        ) from error
    finally:
        if started:
            # A second Ctrl-C would leave an engine running.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            stop_everything(home)


def _take_up(job: NewJob, home: Home, client: DaemonClient) -> str:
    """The id of the unfinished job with this very content, resumed, or of a new one."""
    unfinished = _find_unfinished(job, home)
    if unfinished is None:
        return hand_over(job, home)[0]
    view: dict[str, Any] = client.get(f"/jobs/{unfinished}")
    note(
        f"going on with {unfinished}: {view['num_completed'] + view['num_failed']:,} of "
        f"{view['num_rows']:,} rows are done"
    )
    if JobState(view["state"]) is JobState.PAUSED:
        client.post(f"/jobs/{unfinished}/resume")
    return unfinished


def _find_unfinished(job: NewJob, home: Home) -> str | None:
    store = open_store(home.store_location)
    try:
        found = jobs.find_unfinished(store, job.content_hash)
    finally:
        store.close()
    same_input = found is not None and found.pin == job.pin
    return found.id if found is not None and same_input else None
