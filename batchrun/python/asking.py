"""One call over rows: as a job that the same call finds again, and its answers as columns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from pydantic import BaseModel, JsonValue, ValidationError

from batchrun.config import TINY_MODELS, load_home
from batchrun.control.client import DaemonClient
from batchrun.control.following import check_end, watch
from batchrun.control.lending import deployment_up, in_turn
from batchrun.control.starting import read_deployment
from batchrun.control.submitting import (
    SameJob,
    answering_model,
    default_model,
    find_same,
    go_on,
    hand_over,
    prepare_spec,
    stored_job,
)
from batchrun.daemon.ending import export
from batchrun.errors import (
    InputError,
    JobSpecError,
    RowsFailedError,
)
from batchrun.files import absolute
from batchrun.home import Home
from batchrun.jobs.prompts.template import RequestTemplate
from batchrun.jobs.spec import JobSpec, told_fields
from batchrun.jobs.submit import check_uses_columns
from batchrun.python.frames import NAME_CHARS, Frame, kept_rows
from batchrun.python.schemas import parsed, response_format
from batchrun.store.jobs import NewJob
from batchrun.types import DEFAULT_MODEL, JobState

Template = str | Sequence[Mapping[str, Any]]
"""The user's message of every row, or all messages; Jinja2 over the row's columns."""

ANSWER_COLUMNS = ("response", "finish_reason", "error")
OUTPUT = dict.fromkeys(ANSWER_COLUMNS, pl.String)
"""The columns of an output file that answers are made of."""


def home_of(home: Path | str | None) -> Home:
    """The home folder: as given, else BATCHRUN_HOME, else the default."""
    return load_home(None if home is None else Path(home))


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about every row, and how the answers are wanted back."""

    template: Template
    model: str | None = None
    schema: type[BaseModel] | None = None
    request: Mapping[str, Any] = field(default_factory=dict)

    def check(self, columns: Sequence[str]) -> None:
        """Raises InputError for a schema that is none, and where an answer's column would stand in
        the way of a frame's."""
        given = self.schema
        fields: Sequence[str] = ANSWER_COLUMNS[:1]
        if given is not None:
            if not (isinstance(given, type) and issubclass(given, BaseModel)):
                raise InputError(f"schema must be a pydantic model, a class, not {given!r:.80}")
            fields = list(given.model_fields)
        for name in fields:
            if name in ANSWER_COLUMNS[1:]:
                raise InputError(f"a field of the schema cannot be named {name!r}; rename it")
        for name in (*fields, *ANSWER_COLUMNS[1:]):
            if name in columns:
                raise InputError(
                    f"the frame has a column {name!r} already, as the answers do; rename it"
                )

    def spec(self, rows: Path, folder: Path) -> JobSpec:
        """The job that asks it of the rows in a file; equal questions are equal jobs."""
        messages: Any = self.template
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        request = dict(self.request)
        if self.schema is not None:
            if "response_format" in request:
                raise InputError("give schema or response_format, not both")
            request["response_format"] = response_format(self.schema)
        model = served(self.model)
        values = {
            "name": "map",
            "model": model.name,
            "input": {"path": [str(rows)], "format": "parquet", "messages": messages},
            "request": request,
        }
        values = _as_json(values)
        digest = _digest(values, model.place)
        output = {"path": str(folder / f"{digest}.answers.parquet")}
        try:
            return JobSpec.model_validate({**values, "name": f"map {digest}", "output": output})
        except ValidationError as failure:
            first = failure.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise JobSpecError(f"{place}: {first['msg']}") from None

    def columns_of(self, output: pl.DataFrame, errors: str) -> pl.DataFrame:
        """What is added to the frame, from the columns of an output file."""
        faults = [error_line(text) for text in output["error"]]
        table = output.select("response")
        if self.schema is not None:
            table, misfits = parsed(self.schema, output["response"].to_list())
            pairs = zip(faults, misfits, strict=True)
            faults = [fault or misfit for fault, misfit in pairs]
        if errors == "raise":
            _raise_first(faults)
        return table.with_columns(
            output["finish_reason"], pl.Series("error", faults, dtype=pl.String)
        )


def _digest(values: Mapping[str, Any], place: str | None) -> str:
    """Names a question. The order within fields of the request counts where it is not sorted, and
    so does what the model's name stands for."""
    text = json.dumps(values, sort_keys=True) + (place or "")
    fields = told_fields(values["request"])
    if fields != json.dumps(values["request"], sort_keys=True, separators=(",", ":")):
        text += fields
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:NAME_CHARS]


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as a job holds them. Raises InputError for what JSON or UTF-8 cannot hold."""
    try:
        held: dict[str, Any] = json.loads(json.dumps(values, default=_plain))
        json.dumps(held, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as failure:
        raise InputError(f"no job can hold the template and its fields: {failure}") from None
    return held


def _plain(value: object) -> JsonValue:
    """A scalar of numpy as Python's; nothing else that JSON does not know."""
    if isinstance(value, np.generic):
        plain: JsonValue = value.item()
        return plain
    raise InputError(f"a request cannot hold a {type(value).__name__}: {value!r:.80}")


class Served(NamedTuple):
    """The id by which a question names a model, the folder that it was given as, and what a
    deployment that is started needs to be told to serve it. `is_other`: engines of batchrun.yaml
    serve something else by that id."""

    name: str
    place: str | None = None
    flags: tuple[str, ...] = ()
    is_other: bool = False


def served(model: str | None) -> Served:
    """A model as the deployment of batchrun.yaml serves it, or would; None: its default."""
    if model is None:
        return Served(DEFAULT_MODEL)
    deployment = read_deployment(None)
    places: dict[str, str] = {}
    for config in (each for each in deployment.engines if each.may_be_calibrated):
        own = deployment.for_engine(config)
        for known, where in ((own.model_name, own.model), *deployment.adapters_of(config).items()):
            places.setdefault(known, _place(where))
    place = _place(model)
    folder = None if place == model else place
    names = [model, *(name for name, where in places.items() if where == place)]
    name = next((each for each in names if each in places), None)
    if name is not None:
        return Served(name, folder)
    if not all(each.may_be_calibrated for each in deployment.engines):
        name = Path(place).name if folder else model
        return Served(name, folder, is_other=name in places)
    name = read_deployment(None, model=place).model_name
    return Served(name, folder, ("--model", place), is_other=name in places)


def _place(model: str) -> str:
    """A model's folder by its one path, a hub id as it is."""
    folder = Path(absolute(Path(), model))
    return str(folder.resolve()) if folder.is_dir() and model not in TINY_MODELS else model


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about a frame's rows, on its way: the job it is, or will be."""

    question: Question
    frame: Frame
    job: NewJob
    home: Home

    def found(self) -> str | None:
        """The id of the job that has answered all of it already."""
        answers = self._answers
        same = find_same(self.job, self.home, lambda each: each.is_whole and answers(each))
        return None if same is None else same.record.id

    def _answers(self, same: SameJob) -> bool:
        """Whether a job of this very question has no answer of another model."""
        if self.question.model is not None:
            return True
        answered = answering_model(same.record.id, self.home)
        return answered is None or default_model(self.home) in {None, answered}

    def begin(self, client: DaemonClient) -> str:
        """The id of the job that answers it: taken up where it was, or new. Of equal questions at
        once one makes it.

        What an ended one has of answers is taken over; its failed rows run again.
        """
        with in_turn(self.home.run / "questions.lock", is_shown=False):
            return self._begin(client)

    def _begin(self, client: DaemonClient) -> str:
        same = find_same(
            self.job,
            self.home,
            lambda each: (each.goes_on or each.may_continue) and self._answers(each),
        )
        if same is not None and same.goes_on:
            go_on(same.record.id, client)
            return same.record.id
        spec = JobSpec.model_validate_json(self.job.spec)
        path = Path(spec.output.path).with_suffix(f".{self.job.id}.parquet")
        output = spec.output.model_copy(update={"path": str(path)})
        changes: dict[str, object] = {"output": output}
        if same is not None:
            changes["continue_from"] = same.record.id
        job = replace(self.job, spec=spec.model_copy(update=changes).model_dump_json())
        return hand_over(job, self.home)[0]

    def answers(self, job_id: str, errors: str) -> pl.DataFrame:
        """The answers in the order of the rows. Raises RowsFailedError where errors are raised."""
        return self.question.columns_of(_read_output(job_id, self.home), errors)


def columns_used(question: Question, frame: Frame, home: Home) -> Sequence[str]:
    """The frame's columns that the question reads. Raises InputError and JobSpecError where it
    cannot be asked of this frame."""
    question.check(frame.columns)
    draft = question.spec(Path("rows.parquet"), home.frames)
    template = RequestTemplate(draft, frame.columns, model=draft.model)
    check_uses_columns(draft, template, frame.columns)
    for name in template.columns_used:
        if frame.columns.count(name) > 1:
            raise InputError(f"the frame has more than one column {name!r}; rename the others")
    return template.columns_used


def ask(question: Question, frame: Frame, home: Home, *, progress: bool) -> Asked:
    """Keep the rows that the template reads, and check the job over them.

    Raises InputError, JobSpecError and DataError.
    """
    used = columns_used(question, frame, home)
    home.create()
    spec = question.spec(kept_rows(frame.select(used), home.frames), home.frames)
    return Asked(question, frame, prepare_spec(spec, home, is_shown=progress), home)


def run(asked: Asked, *, progress: bool) -> str:
    """See a question through to its end; returns the id of the job.

    Raises JobFailedError where the job paused or ended without having run every row.
    """
    found = asked.found()
    if found is not None:
        return found
    with deployment(asked.question.model, asked.home, progress=progress) as client:
        job_id = asked.begin(client)
        check_whole(watch(client, job_id, is_shown=progress))
        return job_id


def check_whole(view: Mapping[str, Any]) -> None:
    """Raises JobFailedError where the job paused or ended without having run every row. That all
    of them failed is told row by row."""
    if view["state"] != JobState.FAILED:
        check_end(view)


def deployment(
    model: str | None, home: Home, *, progress: bool
) -> AbstractContextManager[DaemonClient]:
    """The deployment that runs, or one started for as long as calls need it. Raises InputError
    where the one that runs has another model by that name."""
    asked, is_running = served(model), DaemonClient(home).is_running()
    if asked.is_other and (is_running or not asked.flags):
        raise InputError(f"model {model}: engines of batchrun.yaml serve another as {asked.name!r}")
    return deployment_up(home, () if is_running else asked.flags, is_shown=progress)


def error_line(text: str | None) -> str | None:
    """An output file's error as a line: `code: message`."""
    if text is None:
        return None
    error = json.loads(text)
    return f"{error['code']}: {error['message']}"


HINT = 'errors="column" gives the others\' answers'


def _raise_first(faults: Sequence[str | None]) -> None:
    failed = [(row, fault) for row, fault in enumerate(faults) if fault is not None]
    if failed:
        row, fault = failed[0]
        raise RowsFailedError(
            f"{len(failed):,} of {len(faults):,} rows failed; the first is row {row}: {fault}; "
            f"{HINT}"
        )


def _read_output(job_id: str, home: Home) -> pl.DataFrame:
    with stored_job(job_id, home) as (store, record):
        path = Path(JobSpec.model_validate_json(record.spec).output.path)
        is_own = job_id in path.name
        if not (is_own and path.exists()):
            export(store, record, links=home.inputs)
    return pl.read_parquet(path, columns=["response", "finish_reason", "error"], glob=False)
