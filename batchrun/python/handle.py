"""`batchrun.submit`: a job file becomes a `Job`, which can be waited for, looked at and changed."""

from __future__ import annotations

import glob
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Self

import polars as pl
from polars.datatypes import DataTypeClass

from batchrun.control.client import DaemonClient
from batchrun.control.following import check_end, is_over, watch
from batchrun.control.submitting import find_or_add, go_on, prepare, stored_job, view_jobs
from batchrun.errors import DaemonUnavailableError, StateError
from batchrun.files import is_url
from batchrun.home import Home
from batchrun.jobs.results.output_parts import files_of
from batchrun.jobs.spec import OUTPUT_COLUMNS, JobSpec
from batchrun.python.asking import deployment, home_of
from batchrun.store import results
from batchrun.types import JobState


@dataclass(frozen=True, slots=True)
class Job:
    """A job in a deployment's home. Every method reads its state anew."""

    id: str
    home: Home

    def status(self) -> dict[str, Any]:
        """What `batchrun status JOB --json` shows of it: state, rows, rates, ETA."""
        try:
            return DaemonClient(self.home).get(f"/jobs/{self.id}")
        except DaemonUnavailableError:
            return dict(view_jobs(self.home, self.id)["jobs"][0])

    def wait(self, *, progress: bool = True, timeout_s: float | None = None) -> Self:
        """Wait until it has completed; one that is paused goes on. A deployment is started, and
        stopped again, if none runs.

        Returns the job itself, also when `timeout_s` have passed. Raises JobFailedError where it
        paused, failed, was cancelled or expired.
        """
        view = self.status()
        if not JobState(view["state"]).is_terminal:
            until_s = None if timeout_s is None else time.monotonic() + timeout_s
            with deployment(None, self.home, progress=progress) as client:
                if is_over(view):
                    go_on(self.id, client)
                view = watch(
                    client,
                    self.id,
                    is_shown=progress,
                    is_enough=lambda: until_s is not None and time.monotonic() > until_s,
                )
        if is_over(view):
            check_end(view)
        return self

    def results(self) -> pl.LazyFrame:
        """Its output file: `.head()`, `.filter(...)` and `.collect()` read what they need. A JSONL
        file is first read once for the types of its columns.

        Raises StateError while it is not written, and once a later job's is in its place.
        """
        with stored_job(self.id, self.home) as (store, record):
            spec = JobSpec.model_validate_json(record.spec)
            place, why = record.output_path, record.reason or "see `wait`"
            if not record.has_output:
                raise StateError(f"{self.id} is {record.state}: its output is not written: {why}")
            if not is_url(place) and not Path(place).exists():
                raise StateError(f"{self.id} is {record.state}: {place} is not there any more")
            results.refuse_replaced(store, record)
        files = files_of(place, spec.output.rows_per_file)
        if PurePath(place).suffix == ".parquet":
            return pl.scan_parquet(files, glob=False)
        return _scan_parts([glob.escape(file) for file in files])

    def errors(self) -> pl.DataFrame:
        """The rows that failed so far: `row` (from 0), `attempts`, `code`, `message`."""
        with stored_job(self.id, self.home) as (store, record):
            failed = list(results.read(store, record.seq, failed_only=True))
        columns = {"row": pl.Int64, "attempts": pl.Int64, "code": pl.String, "message": pl.String}
        found = [
            (result.row, result.attempts, result.error.code, result.error.message)
            for result in failed
            if result.error is not None
        ]
        return pl.DataFrame(found, schema=columns, orient="row")

    def pause(self) -> None:
        """Stop running its rows until `resume`."""
        self._change("pause")

    def resume(self) -> None:
        """Go on with it where it was."""
        self._change("resume")

    def cancel(self) -> None:
        """End it now; what is done is kept in its output."""
        self._change("cancel")

    def _change(self, action: str) -> None:
        DaemonClient(self.home).post(f"/jobs/{self.id}/{action}")


def _scan_parts(parts: list[str]) -> pl.LazyFrame:
    """JSONL files as one table, each column of one type in all of them."""
    schemas = [_schema_of(part) for part in parts]
    names = dict.fromkeys(name for schema in schemas for name in schema)
    common = {
        name: _common_type([each[name] for each in schemas if name in each]) for name in names
    }
    return pl.scan_ndjson(parts, schema=common)


def _schema_of(part: str) -> Mapping[str, pl.DataType]:
    """The types of the columns in one of the files: those that polars tells, unless it cannot read
    kept values by them."""
    scan, kept = pl.scan_ndjson(part, infer_schema_length=None), None
    schema = dict[str, pl.DataType]()
    with suppress(pl.exceptions.PolarsError):
        schema |= scan.collect_schema()
        names = [name for name in schema if name not in OUTPUT_COLUMNS]
        kept = [name for name in names if schema[name] not in {pl.String, pl.Null}]
        scan.select(pl.col(kept).null_count()).collect(engine="streaming")
        return schema
    return schema | _types_in(part, kept)


def _types_in(part: str, names: Sequence[str] | None) -> dict[str, pl.DataType]:
    """The types of these columns, or of all, by their values."""
    forms = dict[str, object]()
    for lines in pl.scan_lines(part).collect_batches():
        for line in lines["line"]:
            row = json.loads(line)
            for name in row if names is None else names:
                forms[name] = _form(forms.get(name), row.get(name))
    return {name: _type_of(form) for name, form in forms.items()}


_TEXT, _FLOAT, _MIXED = pl.String(), pl.Float64(), pl.String()
_PLAIN = {str: _TEXT, bool: pl.Boolean(), float: _FLOAT}
_NUMBERS = (pl.Int64(), pl.Int128(), _FLOAT)


def _form(form: object, value: object) -> object:
    """What is known of values once this one is seen too: the polars type of plain ones, a dict or
    list of forms, None of nulls, or `_MIXED` where something in them is of several kinds."""
    if value is None or form is _MIXED:
        return form
    if not isinstance(value, dict | list):
        return _plain_form(form, value)
    parts: Any = form if form is not None else type(value)()
    if not isinstance(value, type(parts)):
        return _MIXED
    if isinstance(value, list):
        inner = parts[0] if parts else None
        for item in value:
            inner = _form(inner, item)
        parts[:] = [inner]
        return _MIXED if inner is _MIXED else parts
    for name, item in value.items():
        parts[name] = _form(parts.get(name), item)
        if parts[name] is _MIXED:
            return _MIXED
    return parts


def _plain_form(form: object, value: object) -> object:
    own: object = _PLAIN.get(type(value))
    if own is None and isinstance(value, int):
        num_bits = value.bit_length()
        own = _MIXED if num_bits > 127 else _NUMBERS[num_bits > 63]
    if form is None or form is own:
        return own
    numbers = [kind for kind in _NUMBERS if kind is form or kind is own]
    return numbers[-1] if len(numbers) == 2 else _MIXED


def _type_of(form: object) -> pl.DataType:
    if isinstance(form, dict):
        return pl.Struct({name: _type_of(item) for name, item in form.items()})
    if isinstance(form, list):
        return pl.List(_type_of(form[0]))
    return form if isinstance(form, pl.DataType) else pl.Null()


def _common_type(kinds: Sequence[pl.DataType]) -> pl.DataType:
    """The type that holds what columns of all these types do; text, which is then JSON, where
    polars would make other values of some."""
    if not _go_together(kinds):
        return pl.String()
    empty = [pl.DataFrame(schema={"": kind}) for kind in kinds]
    return pl.concat(empty, how="vertical_relaxed").dtypes[0]


def _go_together(kinds: Iterable[pl.DataType | DataTypeClass]) -> bool:
    """Whether these types are equal or numbers, or lists or structs of such."""
    told = {kind for kind in kinds if kind != pl.Null}
    if len(told) <= 1 or all(kind.is_numeric() for kind in told):
        return True
    parts = defaultdict(list)
    for kind in told:
        if isinstance(kind, pl.List):
            parts[""].append(kind.inner)
        elif isinstance(kind, pl.Struct):
            for field in kind.fields:
                parts[field.name].append(field.dtype)
    return len({kind.base_type() for kind in told}) == 1 and all(map(_go_together, parts.values()))


def submit(
    file: Path | str,
    *,
    continue_from: str | None = None,
    progress: bool = True,
    home: Path | str | None = None,
) -> Job:
    """Add a job file's job, or find the one of the same content that has not ended.

    Without a daemon it waits in the store; `Job.wait` starts one. Raises JobSpecError, DataError
    and ConfigError; UnknownJobError for `continue_from`.
    """
    place = home_of(home)
    job = prepare(Path(file), place, continue_from, is_shown=progress)
    return Job(find_or_add(job, place, is_shown=progress)[0], place)
