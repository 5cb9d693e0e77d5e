"""Commands that change jobs: submit, cancel, pause, resume, offline, and `run` for all at once."""

from __future__ import annotations

import signal
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import quote

import typer

from batchrun.cli.client import DaemonClient, follow
from batchrun.cli.console import (
    ConfigOption,
    HomeOption,
    JobArgument,
    JobFileArgument,
    JsonOption,
    ListenOption,
    ModelOption,
    ProgressBar,
    answer,
    note,
)
from batchrun.cli.deployment import flags_of, read_deployment, start_in_background, stop_everything
from batchrun.errors import DaemonUnavailableError, InputError, UnknownJobError
from batchrun.home import Home
from batchrun.store import jobs
from batchrun.store.database import open_store
from batchrun.store.jobs import NewJob
from batchrun.types import JobState

LOCK_WAIT_S = 2.0


def submit(
    file: JobFileArgument,
    *,
    continue_from: Annotated[
        str | None, typer.Option(metavar="JOB", help="Take over finished rows that are the same.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job has ended.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="With --wait: exit 1 when rows failed.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Submit nothing: check it; tell its tokens, ETA and cost."),
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="With --dry-run: simulate beside these online calls.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE",
            help="With --dry-run: engine to simulate, as in `batchrun plan`. [default: the "
            "deployment's first, if calibrated]",
        ),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(
            metavar="PRICE[xGPUS]",
            help="With --dry-run: price of a GPU-hour, GPUs of an engine.",
        ),
    ] = None,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Add a job. Without a daemon it waits in the store until one runs."""
    if dry_run:
        if wait or strict:
            option = "--wait" if wait else "--strict"
            raise InputError(f"--dry-run submits nothing to wait for; leave out {option}")
        if continue_from:
            raise InputError(
                "--dry-run does not tell what --continue-from would take over; leave out one of "
                "the two"
            )
        from batchrun.cli.dry_run import predict, rendered

        found = predict(file, home, trace, profile, price)
        answer(found.record(), rendered(found), as_json=as_json)
        return
    for option, value in {"--trace": trace, "--profile": profile, "--price": price}.items():
        if value:
            raise InputError(f"{option} says what --dry-run is to assume; give --dry-run too")
    job = prepare(file, home, continue_from)
    if wait and not DaemonClient(home).is_running():
        raise DaemonUnavailableError(
            f"{file} was not submitted: no daemon runs to wait for; start one with "
            f"`batchrun up -d`, or use `batchrun run {file}`"
        )
    job_id, is_waiting = hand_over(job, home)
    if wait:
        follow(DaemonClient(home), job_id, strict=strict, as_json=as_json)
        return
    document = {"id": job_id, "rows": job.num_rows, "waits_for_daemon": is_waiting}
    answer(document, f"{job_id}  {job.name}: {job.num_rows:,} rows", as_json=as_json)
    if is_waiting and not as_json:
        note("no daemon runs; the job waits for `batchrun up -d`")


def cancel(job: JobArgument, *, home: HomeOption, as_json: JsonOption = False) -> None:
    """End a job now; what is done is kept in its output."""
    _change(job, "cancel", home, as_json=as_json)


def pause(job: JobArgument, *, home: HomeOption, as_json: JsonOption = False) -> None:
    """Stop running a job's rows until `resume`."""
    _change(job, "pause", home, as_json=as_json)


def resume(
    job: JobArgument,
    *,
    accept_input: Annotated[
        bool, typer.Option("--accept-input", help="Go on with the input as it is now.")
    ] = False,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Go on with a paused job.

    With --accept-input rows keep their numbers, and those that are done keep their results.
    """
    action = "resume-accepting-input" if accept_input else "resume"
    _change(job, action, home, as_json=as_json)


def offline(
    switch: Annotated[Literal["on", "off"], typer.Argument(help="on or off")],
    *,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Turn all offline work on or off at once; online traffic goes on."""
    done = DaemonClient(home).post("/offline", {"on": switch == "on"})
    answer(done, f"offline work is {switch}", as_json=as_json)


def prepare(file: Path, home: Home, continue_from: str | None = None) -> NewJob:
    """Read, check and pin a job file.

    Raises JobSpecError, DataError and ConfigError; for `continue_from` UnknownJobError, and
    DataError where that job's input is not what it was any more.
    """
    from batchrun.cli.results import stored_job
    from batchrun.jobs.job_file import load_job_file
    from batchrun.jobs.spec import JobSpec
    from batchrun.jobs.submit import open_submitted, prepare_job

    with ProgressBar() as progress:
        spec = load_job_file(file, cwd=Path.cwd())
        if continue_from is not None:
            with stored_job(continue_from, home) as (_, record):
                before = JobSpec.model_validate_json(record.spec)
                open_submitted(record, before, links=home.inputs).close()
                spec = spec.model_copy(update={"continue_from": record.id})
        home.create()
        return prepare_job(spec, links=home.inputs, progress=progress)


def hand_over(job: NewJob, home: Home) -> tuple[str, bool]:
    """Give a job to the daemon, or to the store when none runs; returns (id, it waits)."""
    try:
        return str(DaemonClient(home).post("/jobs", asdict(job))["id"]), False
    except DaemonUnavailableError:
        return _add_to_store(job, home), True


def _add_to_store(job: NewJob, home: Home) -> str:
    from batchrun.files import StoreLock
    from batchrun.store.place import DaemonLock, open_for

    home.create()
    with StoreLock(home.store_lock, wait_s=LOCK_WAIT_S):
        if home.has_store:
            store = open_store(home.store_location)
        else:
            store = open_for(home, read_deployment(None).store_url)
        with closing(store), DaemonLock(store, wait_s=LOCK_WAIT_S):
            return jobs.create(store, job, now_s=time.time()).id


def _change(job: str, action: str, home: Home, *, as_json: bool) -> None:
    if not job or "/" in job:
        raise UnknownJobError(f"{job!r}: no such job; `batchrun status` lists the jobs")
    done = DaemonClient(home).post(f"/jobs/{quote(job, safe='')}/{action}")
    answer(done, f"{done['id']}  {done['state']}", as_json=as_json)


def run(
    file: JobFileArgument,
    *,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 when rows failed.")] = False,
    model: ModelOption = None,
    listen: ListenOption = None,
    config: ConfigOption = None,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Run a job file to its end: start what is needed, write the results, stop it again.

    Interrupted or killed, the same command goes on where it was.
    """
    read_deployment(config, model=model, listen=listen)  # A mistake in it shows here, in a line.
    job = prepare(file, home)
    client = DaemonClient(home)
    started = not client.is_running()
    if not started and (model or listen or config):
        note("a daemon runs already; --model, --listen and --config have no effect on it")
    try:
        if started:
            start_in_background(home, flags_of(config, model, listen))
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
    with closing(open_store(home.store_location)) as store:
        found = jobs.find_unfinished(store, job.content_hash)
    if found is None or found.pin != job.pin:
        return hand_over(job, home)[0]
    view = client.get(f"/jobs/{found.id}")
    note(
        f"going on with {found.id}: {view['num_completed'] + view['num_failed']:,} of "
        f"{view['num_rows']:,} rows are done"
    )
    if JobState(view["state"]) is JobState.PAUSED:
        client.post(f"/jobs/{found.id}/resume")
    return found.id
