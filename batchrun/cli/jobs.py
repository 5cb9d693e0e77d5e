"""Commands that change jobs: submit, cancel, pause, resume, offline, and `run` for all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer

from batchrun.cli.console import (
    ConfigOption,
    HomeOption,
    JobArgument,
    JobFileArgument,
    JsonOption,
    ListenOption,
    ModelOption,
    answer,
    note,
)
from batchrun.control.client import DaemonClient
from batchrun.control.fitting import unfit_submission
from batchrun.control.following import check_end, num_done, watch
from batchrun.control.lending import deployment_up
from batchrun.control.starting import flags_of, read_deployment
from batchrun.control.submitting import find_or_add, go_on, hand_over, prepare
from batchrun.errors import DaemonUnavailableError, InputError, UnknownJobError
from batchrun.files import is_url
from batchrun.home import Home
from batchrun.jobs.spec import JobSpec
from batchrun.quantities import count
from batchrun.store.jobs import NewJob
from batchrun.types import JobState


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
            metavar="PRICE[xGPUS]", help="With --dry-run: price of a GPU-hour, GPUs of an engine."
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
    if wait and not (client := DaemonClient(home)).is_running():
        none_runs = (
            "no daemon runs to wait for; start one with `batchrun up -d`, or use "
            f"`batchrun run {file}`"
        )
        silence = client.describe_silence()
        why = none_runs if silence is None else f"{silence}; `batchrun down` ends it"
        raise DaemonUnavailableError(f"{file} was not submitted: {why}")
    warnings = unfit_submission(job, home, read_deployment(None))
    for line in warnings:
        note(line)
    tell_replaced(job)
    job_id, is_waiting = hand_over(job, home)
    if wait:
        _wait(job_id, job, home, strict=strict, as_json=as_json)
        return
    document = {
        "id": job_id,
        "rows": job.num_rows,
        "waits_for_daemon": is_waiting,
        "warning": "; ".join(warnings) or None,
    }
    answer(document, f"{job_id}  {job.name}: {count(job.num_rows, 'row')}", as_json=as_json)
    if is_waiting and not as_json:
        note("no daemon runs; the job waits for `batchrun up -d`")


def _wait(job_id: str, job: NewJob, home: Home, *, strict: bool, as_json: bool) -> None:
    if not as_json:
        note(f"{job_id}  {job.name}: {count(job.num_rows, 'row')} submitted")
    try:
        follow(DaemonClient(home), job_id, strict=strict, as_json=as_json)
    except KeyboardInterrupt:
        note(f"the job goes on; `batchrun status {job_id} --watch` shows it")
        raise


def tell_replaced(job: NewJob) -> None:
    """Say that the job's output file is there already."""
    path = JobSpec.model_validate_json(job.spec).output.path
    if not is_url(path) and Path(path).exists():
        note(f"{path} is there already; the job replaces it when it ends")


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
    deployment = read_deployment(config, model=model, listen=listen)
    job = prepare(file, home)
    if DaemonClient(home).is_running() and (model or listen or config):
        note("a daemon runs already; --model, --listen and --config have no effect on it")
    try:
        with deployment_up(home, flags_of(config, model=model, listen=listen)) as client:
            for line in unfit_submission(job, home, deployment):
                note(line)
            job_id = _take_up(job, home, client)
            follow(client, job_id, strict=strict, as_json=as_json, then=f"run {file}")
    except KeyboardInterrupt:
        note(f"interrupted; `batchrun run {file}` goes on where it was")
        raise
    except DaemonUnavailableError as error:
        goes_on = f"`batchrun run {file}` goes on where it was"
        if (silence := DaemonClient(home).describe_silence()) is not None:
            raise DaemonUnavailableError(
                f"{silence}; `batchrun down` ends it, then {goes_on}"
            ) from error
        raise DaemonUnavailableError(
            f"the daemon ended while the job ran; {goes_on} (log: {home.log / 'daemon.log'})"
        ) from error


def _take_up(job: NewJob, home: Home, client: DaemonClient) -> str:
    """The id of the unfinished job with this very content, resumed, or of a new one."""
    job_id, is_new = find_or_add(job, home)
    if is_new:
        tell_replaced(job)
        return job_id
    view = go_on(job_id, client)
    note(f"going on with {job_id}: {num_done(view):,} of {view['num_rows']:,} rows are done")
    return job_id


def follow(
    client: DaemonClient, job_id: str, *, strict: bool, as_json: bool, then: str | None = None
) -> None:
    """Show a job's progress until it ends, then its summary.

    `then` is the command that takes up a paused job again (default: `resume`).
    Raises JobFailedError when it paused, failed, was cancelled or expired, RowsFailedError under
    `strict`, StoreFullError when its results cannot be written.
    """
    view = watch(client, job_id, go_on=then)
    state = JobState(view["state"])
    done = _summary(view) if state is JobState.COMPLETED else ()
    answer(view, *done, as_json=as_json)
    check_end(view, then=then, strict=strict)
    if view["num_failed"] and not as_json:
        note(f"why rows failed: batchrun errors {job_id}")


def _summary(view: dict[str, Any]) -> tuple[str, str]:
    line = (
        f"{view['id']}  {view['name']}: {count(view['num_completed'], 'row')} done, "
        f"{view['num_failed']:,} failed, "
        f"{view['num_prompt_tokens'] + view['num_output_tokens']:,} tokens"
    )
    if view["hit_rate"] is not None:
        line += f", {view['hit_rate']:.0%} of prompt tokens from the prefix cache"
    if view["num_cut"]:
        line += f"; {view['num_cut']:,} answers cut off at the token limit"
    return line, view["output_path"]
