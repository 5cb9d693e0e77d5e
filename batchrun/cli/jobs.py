"""Commands that change jobs: submit, cancel, pause, resume, offline."""

from __future__ import annotations

import time
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from batchrun.cli.console import LateProgress, note, print_json, say
from batchrun.cli.daemon_client import DaemonClient
from batchrun.cli.follow import follow
from batchrun.cli.options import HomeOption, JobArgument, JobFileArgument, JsonOption
from batchrun.config import load_home
from batchrun.errors import DaemonUnavailableError, UnknownJobError
from batchrun.home import Home

if TYPE_CHECKING:
    from batchrun.store import NewJob

LOCK_WAIT_S = 2.0


class Switch(StrEnum):
    """Whether offline work runs."""

    ON = "on"
    OFF = "off"


def submit(
    file: JobFileArgument,
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job has ended.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="With --wait: exit 1 when rows failed.")
    ] = False,
    home_path: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a job. Without a daemon it waits in the store until one runs."""
    home = load_home(home_path)
    job = prepare(file, home)
    if wait and not DaemonClient(home).is_running():
        raise DaemonUnavailableError(
            f"{file} was not submitted: no daemon runs to wait for; start one with "
            f"`batchrun up -d`, or use `batchrun run {file}`"
        )
    job_id, is_waiting = hand_over(job, home)
    if wait:
        follow(DaemonClient(home), job_id, strict=strict, as_json=as_json)
    elif as_json:
        print_json({"id": job_id, "rows": job.num_rows, "waits_for_daemon": is_waiting})
    else:
        say(f"{job_id}  {job.name}: {job.num_rows:,} rows")
        if is_waiting:
            note("no daemon runs; the job waits for `batchrun up -d`")


def cancel(job: JobArgument, *, home_path: HomeOption = None, as_json: JsonOption = False) -> None:
    """End a job now; what is done is kept in its output."""
    _change(job, "cancel", home_path, as_json=as_json)


def pause(job: JobArgument, *, home_path: HomeOption = None, as_json: JsonOption = False) -> None:
    """Stop running a job's rows until `resume`."""
    _change(job, "pause", home_path, as_json=as_json)


def resume(job: JobArgument, *, home_path: HomeOption = None, as_json: JsonOption = False) -> None:
    """Go on with a paused job."""
    _change(job, "resume", home_path, as_json=as_json)


def offline(
    switch: Annotated[Switch, typer.Argument(help="on or off")],
    *,
    home_path: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Turn all offline work on or off at once; online traffic goes on."""
    answer = DaemonClient(load_home(home_path)).post("/offline", {"on": switch is Switch.ON})
    if as_json:
        print_json(answer)
    else:
        say(f"offline work is {switch}")


def prepare(file: Path, home: Home) -> NewJob:
    """Read, check and pin a job file. Raises JobSpecError, DataError and ConfigError."""
    from batchrun.jobspec import load_job_file
    from batchrun.submission import prepare_job

    with LateProgress() as progress:
        spec = load_job_file(file, cwd=Path.cwd())
        home.create()
        return prepare_job(spec, links=home.inputs, progress=progress)


def hand_over(job: NewJob, home: Home) -> tuple[str, bool]:
    """Give a job to the daemon, or to the store when none runs; returns (id, it waits)."""
    try:
        answer = DaemonClient(home).post("/jobs", asdict(job))
        return str(answer["id"]), False
    except DaemonUnavailableError:
        return _add_to_store(job, home), True


def _add_to_store(job: NewJob, home: Home) -> str:
    from batchrun.store import StoreLock, jobs, open_store

    home.create()
    with StoreLock(home.store_lock, wait_s=LOCK_WAIT_S):
        store = open_store(home.store)
        try:
            return jobs.create(store, job, now_s=time.time()).id
        finally:
            store.close()


def _change(job: str, action: str, home_path: Path | None, *, as_json: bool) -> None:
    if not job or "/" in job:
        raise UnknownJobError(f"{job!r}: no such job; `batchrun status` lists the jobs")
    answer = DaemonClient(load_home(home_path)).post(f"/jobs/{quote(job, safe='')}/{action}")
    if as_json:
        print_json(answer)
    else:
        say(f"{answer['id']}  {answer['state']}")
