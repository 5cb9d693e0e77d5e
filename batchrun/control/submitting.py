"""Handing jobs over, finding the one that is the same, and looking at them, daemon or not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from batchrun.control.client import DaemonClient
from batchrun.control.following import ProgressBar, note
from batchrun.control.lending import in_turn
from batchrun.control.starting import LOOK_WAIT_S, read_deployment
from batchrun.errors import (
    BatchrunError,
    DaemonUnavailableError,
    JobSpecError,
    NotLeadingError,
    StoreLockedError,
    UnknownJobError,
)
from batchrun.files import StoreLock, is_url
from batchrun.home import Home
from batchrun.jobs.pin import InputPin
from batchrun.jobs.spec import ASIDE, JobSpec, told_fields
from batchrun.store import jobs
from batchrun.store.database import Store, open_store, open_to_read
from batchrun.store.jobs import JobRecord, NewJob
from batchrun.types import DEFAULT_MODEL, JobState

LOCK_WAIT_S = 2.0
LOOK_S = 0.2
MODEL_WAIT_S = 10.0


@contextmanager
def stored_job(job: str, home: Home) -> Iterator[tuple[Store, JobRecord]]:
    """A job as it stands in the store, beside a daemon or without one. Raises UnknownJobError."""
    if not home.has_store:
        raise UnknownJobError(f"{job}: no such job; {home.path} holds no jobs yet")
    with closing(open_store(home.store_location)) as store:
        yield store, jobs.get(store, job)


def prepare(
    file: Path, home: Home, continue_from: str | None = None, *, is_shown: bool = True
) -> NewJob:
    """Read, check and pin a job file.

    Raises JobSpecError, DataError and ConfigError; for `continue_from` UnknownJobError,
    DataError where that job's input is not what it was any more, and JobSpecError where another
    model answered it.
    """
    from batchrun.jobs.job_file import load_job_file

    spec = load_job_file(file, cwd=Path.cwd())
    return prepare_spec(spec, home, continue_from, is_shown=is_shown)


def prepare_spec(
    spec: JobSpec, home: Home, continue_from: str | None = None, *, is_shown: bool = True
) -> NewJob:
    """Check and pin a job that was read, or made; raises what `prepare` raises."""
    from batchrun.jobs.submit import open_submitted, prepare_job

    with ProgressBar(is_shown=is_shown) as progress:
        if continue_from is not None:
            with stored_job(continue_from, home) as (_, record):
                before = JobSpec.model_validate_json(record.spec)
                open_submitted(record, before, links=home.inputs).close()
            _check_model(spec, before, record.id, home)
            spec = spec.model_copy(update={"continue_from": record.id})
        home.create()
        return prepare_job(spec, links=home.inputs, progress=progress)


def _check_model(spec: JobSpec, before: JobSpec, job_id: str, home: Home) -> None:
    """Raises JobSpecError where the answers to take over are another model's than the new ones."""
    if spec.model != DEFAULT_MODEL or before.model != DEFAULT_MODEL or before.is_openai_batch:
        return
    answered = answering_model(job_id, home)
    answers = None if answered is None else default_model(home)
    if answers is not None and answers != answered:
        raise JobSpecError(
            f"{job_id} was answered by the model {answered!r}, and {answers!r} answers now; "
            "submit it without continuing that job"
        )


def answering_model(job_id: str, home: Home) -> str | None:
    """The model that gave a job's answers; None where there is none, or they do not tell."""
    from batchrun.store import results

    with stored_job(job_id, home) as (store, record):
        return results.answering_model(store, record.seq)


def default_model(home: Home, wait_s: float = MODEL_WAIT_S) -> str | None:
    """The model that answers where none is named, as far as it is known; engines that begin have a
    while to tell. Of attached ones it is not: their replies may tell another name than their lists.
    """
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            engines = DaemonClient(home).get("/status")["engines"]
        except DaemonUnavailableError:
            deployment = read_deployment(None)
            first = deployment.engines[0]
            return deployment.for_engine(first).model_name if first.is_vllm else None
        if any(engine["is_attached"] for engine in engines):
            return None
        model = next((engine["model"] for engine in engines if engine["model"]), None)
        may_tell = any(engine["state"] in {"starting", "ready"} for engine in engines)
        if model is not None or not may_tell or time.monotonic() > deadline_s:
            return None if model is None else str(model)
        time.sleep(LOOK_S)


def hand_over(job: NewJob, home: Home) -> tuple[str, bool]:
    """Give a job to the daemon, or to the store when none runs; returns (id, it waits).

    Where another daemon leads on the database, it gets the job. Raises NotLeadingError for one
    whose input only this home has, BatchrunError where a daemon hangs that may have taken it.
    """
    client = DaemonClient(home)
    try:
        return str(client.post("/jobs", asdict(job))["id"]), False
    except NotLeadingError as error:
        leader = error
    except DaemonUnavailableError:
        try:
            return _add_to_store(job, home), True
        except NotLeadingError as error:
            leader = error
        except StoreLockedError:
            silence = client.describe_silence()
            if silence is None or not client.may_have_heard:
                raise
            raise BatchrunError(
                f"{silence}; once it answers, `batchrun status {job.id}` tells whether it took the "
                "job"
            ) from None
    inputs = [file.path for file in InputPin.model_validate_json(job.pin).files]
    if any(is_url(path) or Path(path).is_relative_to(home.path) for path in inputs):
        raise NotLeadingError(f"{leader}: the input of {job.name} lies in this home")
    return str(client.ask_leader("POST", "/jobs", asdict(job))["id"]), False


def _add_to_store(job: NewJob, home: Home) -> str:
    from batchrun.store.place import DaemonLock, open_for

    home.create()
    with StoreLock(home.store_lock, wait_s=LOCK_WAIT_S):
        store = open_for(home, read_deployment(None).store_url or home.recorded_store_url)
        with closing(store), DaemonLock(store, wait_s=LOCK_WAIT_S):
            return jobs.create(store, job, now_s=time.time()).id


@dataclass(frozen=True, slots=True)
class SameJob:
    """A job of the same content over the same input, as the store has it."""

    record: JobRecord
    num_failed: int

    @property
    def is_whole(self) -> bool:
        """Whether it completed, every row has an answer, and the answers are still there."""
        is_done = self.record.state is JobState.COMPLETED and not self.num_failed
        return is_done and self.record.results_removed_at is None

    @property
    def goes_on(self) -> bool:
        """Whether it has not ended, nor is about to be cancelled or expire."""
        ends_as, expires_at = self.record.ends_as, self.record.expires_at
        if ends_as is None and expires_at is not None and expires_at <= time.time():
            return False
        is_cut_short = ends_as in {JobState.CANCELLED, JobState.EXPIRED}
        return not self.record.state.is_terminal and not is_cut_short

    @property
    def may_continue(self) -> bool:
        """Whether it has ended, and a new job can take over the answers it has."""
        return self.record.state.is_terminal and self.record.results_removed_at is None


def find_same(
    job: NewJob, home: Home, fits: Callable[[SameJob], bool] = lambda _: True
) -> SameJob | None:
    """The newest job with this very content that `fits`, one that has not ended before those that
    have: its input, and the order within its request's fields, are the same too."""
    if not home.has_store:
        return None
    with closing(open_store(home.store_location)) as store:
        older_hash = JobSpec.model_validate_json(job.spec).limits_hash()
        alike = jobs.list_alike(store, job.content_hash, older_hash)
    content = _content_of(job)
    same = (_same_job(record) for record in alike if _content_of(record) == content)
    return next(filter(fits, same), None)


def find_or_add(job: NewJob, home: Home, *, is_shown: bool = True) -> tuple[str, bool]:
    """The id of the unfinished job with this very content, or of a new one, and whether it is new;
    of equal ones at once one is added. Says which keys the old one has otherwise, and keeps. What
    continues another job is the same only as what continues it too."""
    new = JobSpec.model_validate_json(job.spec)

    def fits(same: SameJob) -> bool:
        old = JobSpec.model_validate_json(same.record.spec)
        return same.goes_on and new.continue_from in {None, old.continue_from}

    with in_turn(home.run / "submissions.lock", "submits a file", is_shown=is_shown):
        same = find_same(job, home, fits)
        if same is None:
            return hand_over(job, home)[0], True
    old = JobSpec.model_validate_json(same.record.spec)
    kept = [key for key in ASIDE if getattr(old, key) != getattr(new, key)]
    if kept:
        note(
            f"{same.record.id} goes on with its own {', '.join(kept)}; to change that, cancel it "
            f"and submit the file with --continue-from {same.record.id}"
        )
    return same.record.id, False


def _content_of(job: NewJob | JobRecord) -> tuple[list[tuple[str, ...]], str]:
    files = InputPin.model_validate_json(job.pin).files
    fields = told_fields(JobSpec.model_validate_json(job.spec).request)
    return [(file.path, *file.block_hashes) for file in files], fields


def _same_job(record: JobRecord) -> SameJob:
    return SameJob(record, 0 if record.counts is None else record.counts.num_failed)


def go_on(job_id: str, client: DaemonClient) -> dict[str, Any]:
    """Let an unfinished job go on where it was, resumed if it is paused; its view before that."""
    view = client.get(f"/jobs/{job_id}")
    if JobState(view["state"]) is JobState.PAUSED:
        client.post(f"/jobs/{job_id}/resume")
    return view


def view_jobs(home: Home, job: str | None = None) -> dict[str, Any]:
    """The daemon's snapshot, or what the store alone can tell of the jobs, oldest first; given
    `job`, which is as in `jobs.get`, of that one alone. Raises UnknownJobError."""
    picture = _view_jobs(home, job)
    if job is not None:
        views = picture["jobs"]
        is_prefix = len(job.partition("_")[2]) >= jobs.LEAST_PREFIX_CHARS
        meant = (
            [view for view in views if view["id"] == job]
            or [view for view in views if view["name"] == job]
            or [view for view in views if is_prefix and view["id"].startswith(job)]
        )
        if not meant:
            raise UnknownJobError(f"{job}: no such job; `batchrun status` lists the jobs")
        picture["jobs"] = meant[-1:]
    return picture


def _view_jobs(home: Home, job: str | None) -> dict[str, Any]:
    asked = "" if job is None else f"?job={quote(job, safe='')}"
    client = DaemonClient(home, timeout_s=LOOK_WAIT_S)
    try:
        return client.get(f"/status{asked}")
    except DaemonUnavailableError:
        silence = client.describe_silence()
    views: dict[str, object] = {"jobs": [], "num_more_ended": 0}
    if home.has_store:
        from batchrun.daemon.view import view_stored

        # A daemon that was stopped may keep the store from everybody who could write there.
        opened = open_store if silence is None else open_to_read
        with closing(opened(home.store_location)) as store:
            views = view_stored(store, job)
    nothing: dict[str, Any] = {"gateway": None, "leadership": None, "offline": None}
    nothing |= {"stalled": silence, "progress": None, "engines": [], "felt": []}
    return nothing | views
