"""From a job file to a job that the store can take, and from its input to the order of its rows.

Checking and pinning start nothing; planning reads every row once. That takes minutes with millions
of rows, so the plan of a large job is kept in a file for who takes the job up again.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np
import xxhash

from batchrun import __version__
from batchrun.errors import BatchrunError, ConfigError, DataError, JobSpecError, MissingObjectError
from batchrun.files import atomic_file, is_url
from batchrun.jobs import objects
from batchrun.jobs.inputs.input_data import (
    InputData,
    check_ids,
    check_kept,
    open_input,
    open_pinned,
)
from batchrun.jobs.job_file import CONTENT_KEYS
from batchrun.jobs.pin import (
    InputPin,
    Origins,
    fetch_missing,
    fetched_input,
    keep_input,
    verify_pin,
)
from batchrun.jobs.prompts.template import RequestTemplate, RowRenderError
from batchrun.jobs.prompts.tokens import PLAIN_PROMPTS, PromptReader, TokenRatio, sample_rows
from batchrun.jobs.results.output_parts import foreign_file, holds_input
from batchrun.jobs.spec import MAX_SPEC_CHARS, JobSpec, read_secret
from batchrun.pool.prefix_groups import group_rows
from batchrun.pool.prefix_keys import CHUNK_BYTES, ChainBuilder, ChainTable, IntArray, salt_of
from batchrun.pool.radix_tree import PrefixOrder, build_radix_tree, order_by_prefix
from batchrun.store.jobs import JobRecord, NewJob
from batchrun.types import ProgressSink, RowError

log = logging.getLogger(__name__)

FIRST_ROWS = 16
FIRST_BYTES = 1 << 20
"""How much of the input is tried on the template at submission; the daemon reads all of it."""


def prepare_job(spec: JobSpec, *, links: Path, progress: ProgressSink | None = None) -> NewJob:
    """Check a job against its input and pin the input (linked into `links` where possible; objects
    are copied there).

    Raises JobSpecError (a template or a kept column does not fit the input, the output cannot be
    written where it should go, or the job is too long), DataError (the input cannot be read, is
    empty, or repeats an id), StorageError and StoreFullError (an object cannot be had, or there is
    no room for it).
    """
    text = spec.model_dump_json()
    if len(text) > MAX_SPEC_CHARS:
        raise JobSpecError(
            f"{spec.name}: its template and fields take {len(text):,} characters, and a job holds "
            f"{MAX_SPEC_CHARS:,}; put long text into a column of the input"
        )
    _check_places(spec)
    pin = _pin(spec, links, progress)
    return NewJob(
        name=spec.name,
        spec=text,
        pin=pin.model_dump_json(),
        content_hash=spec.content_hash(),
        num_rows=pin.num_rows,
        deadline_s=spec.deadline_s,
    )


def pin_again(record: JobRecord, *, links: Path) -> str:
    """The pin of a job's input as it is now, checked as at submission.

    Rows keep their numbers, and those with a result keep it. Raises JobSpecError and DataError, the
    latter also when there are more or fewer rows than before.
    """
    spec = JobSpec.model_validate_json(record.spec)
    pin = _pin(spec, links, None)
    if pin.num_rows != record.num_rows:
        raise DataError(
            f"{record.id}: its input has {pin.num_rows:,} rows now and had {record.num_rows:,}; "
            "put the old file back, or cancel the job and submit the new file"
        )
    return pin.model_dump_json()


@contextmanager
def checked_job(
    spec: JobSpec, *, scratch: Path, progress: ProgressSink | None = None
) -> Iterator[tuple[InputData, RequestTemplate]]:
    """A job's input, with all the checks of `prepare_job` made and nothing kept.

    Copies of objects lie in `scratch` meanwhile. Raises what `prepare_job` raises.
    """
    _check_places(spec)
    with (
        fetched_input(spec.input, scratch, progress) as (given, origins),
        open_input(given) as data,
    ):
        template, _ = _checked(spec, data, origins, progress)
        yield data, template


def _pin(spec: JobSpec, links: Path, progress: ProgressSink | None) -> InputPin:
    with fetched_input(spec.input, links, progress) as (given, origins):
        with open_input(given) as data:
            _, pin = _checked(spec, data, origins, progress)
        return keep_input(pin, origins, links)


def _checked(
    spec: JobSpec, data: InputData, origins: Origins, progress: ProgressSink | None
) -> tuple[RequestTemplate, InputPin]:
    """The template that fits the input, and what the files are now: pinning finds those that are
    being written to. `origins` are the URLs of copies."""
    files = (str(path.absolute()) for path, *_ in data.places())
    if holds_input(spec.output.path, (origins.get(path, path) for path in files)):
        raise JobSpecError(f"{spec.where('output.path')}: would overwrite the input file")
    template = RequestTemplate(spec, data.columns, model=spec.model)
    check_kept(spec, data)
    check_uses_columns(spec, template, data.columns)
    _check_first_rows(data, template)
    check_ids(data, progress=progress)
    if data.id_column is None:
        data.check_lines(progress)
    return template, data.pin(progress)


def check_uses_columns(spec: JobSpec, template: RequestTemplate, columns: Sequence[str]) -> None:
    """Raises JobSpecError when every row would be the same request."""
    if template.columns_used:
        return
    place = spec.where(f"input.{CONTENT_KEYS[spec.endpoint]}")
    known = f"its columns are {', '.join(columns[:40])}: write {{{{ {columns[0]} }}}}"
    raise JobSpecError(
        f"{place}: uses no column, so every row would be the same request; "
        f"{known if columns else 'the input has none'}"
    )


def _check_first_rows(data: InputData, template: RequestTemplate) -> None:
    """Raises DataError when every one of the first rows has the same fault: so will the rest."""
    reasons: list[str | None] = []
    for first_row, rows in data.iter_rows(template.columns_used, max_bytes=FIRST_BYTES):
        for number, row in enumerate(rows, first_row):
            try:
                template.render(row, row_number=number, folder=data.folder(number))
                reasons.append(None)
            except RowRenderError as problem:
                reasons.append(problem.row_error.message)
        if len(reasons) >= FIRST_ROWS:
            break
    if None not in reasons and len(set(reasons)) == 1:
        others = f", and all of the first {len(reasons)} rows" if len(reasons) > 1 else ""
        raise DataError(f"row 0{others}: {reasons[0]}")


def _check_places(spec: JobSpec) -> None:
    """Raises JobSpecError for an output that cannot be written, or a secret that cannot be read."""
    _check_output_place(spec)
    try:
        if spec.on_done is not None:
            read_secret(spec.on_done)
    except ConfigError as error:
        raise JobSpecError(f"{spec.where('on_done.secret_file')}: {error}") from None


def _check_output_place(spec: JobSpec) -> None:
    """Raises JobSpecError now for what would else show when all the work is done."""
    if is_url(spec.output.path):
        try:
            objects.check_bucket(spec.output.path)
        except MissingObjectError as error:
            raise JobSpecError(f"{spec.where('output.path')}: {error}") from None
        return
    path = Path(spec.output.path)
    try:
        problem = _output_problem(path, in_parts=spec.output.rows_per_file is not None)
    except OSError as failure:
        problem = f"cannot be written: {failure.strerror}"
    if problem is not None:
        raise JobSpecError(f"{spec.where('output.path')}: {path}: {problem}")


def _output_problem(path: Path, *, in_parts: bool) -> str | None:
    """Why there can be no output; None where nothing is in the way. Raises OSError."""
    folder = next(parent for parent in path.parents if os.path.lexists(parent))
    if path.is_dir() and not in_parts:
        return "is a folder; name a file"
    if (foreign := foreign_file(path)) is not None:
        return f"{foreign} there is no output of a job; name a folder of its own"
    if not folder.is_dir():
        return f"{folder} is not a folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} cannot be written to"
    if max(len(os.fsencode(name)) for name in path.parts) > os.pathconf(folder, "PC_NAME_MAX"):
        return f"cannot be written: {os.strerror(errno.ENAMETOOLONG)}"
    return None


def open_submitted(record: JobRecord, spec: JobSpec, *, links: Path) -> InputData:
    """The input as it was at submission. Raises DataError naming the file that changed, and what
    `fetch_missing` raises."""
    pin = InputPin.model_validate_json(record.pin)
    fetch_missing(pin, links)
    verify_pin(pin, links=links)
    data = open_pinned(spec.input, pin, links=links)
    if data.num_rows != record.num_rows:
        data.close()
        raise DataError(
            f"{record.id}: its input has {data.num_rows:,} rows, and had {record.num_rows:,} when "
            "it was submitted; cancel the job and submit the file again"
        )
    return data


TextWatch = Callable[[Sequence[bytes], Sequence[int]], None]
"""Told of all rows' prompt texts and salts, some rows at a time; a row with an error has no text.
"""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Every row of a job, known as a whole.

    `chains` are the salted keys of all rows' prompts; `order` runs over all rows;
    `text_bytes[row]` is the length of the row's prompt text, `new_bytes[row]` of what no row before
    it in the order has, and `tokens` makes tokens of either;
    `errors` holds the rows that cannot be rendered, which end with that error and never run.
    """

    chains: ChainTable
    order: PrefixOrder
    text_bytes: IntArray
    new_bytes: IntArray
    tokens: TokenRatio
    errors: dict[int, RowError] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        chains: ChainTable,
        order: PrefixOrder,
        text_bytes: IntArray,
        tokens: TokenRatio,
        errors: dict[int, RowError],
    ) -> Self:
        """The plan in which rows share what neighbours in the order do."""
        new_bytes = text_bytes.copy()
        new_bytes[order.rows] -= order.shared_chunks * CHUNK_BYTES
        return cls(chains, order, text_bytes, new_bytes, tokens, errors)

    @property
    def num_rows(self) -> int:
        """Rows of the input, the faulty ones included."""
        return len(self.text_bytes)

    @property
    def num_groups(self) -> int:
        """Prefix groups of two rows or more."""
        nodes = build_radix_tree(self.order.shared_chunks)
        sizes = np.bincount(group_rows(self.order, nodes, self.chains))
        return int(np.count_nonzero(sizes > 1))

    @property
    def shared_share(self) -> float:
        """Share (0 to 1) of prompt text that a row before it in the order already holds.

        Whole chunks count: an unlimited prefix cache hits up to one more of each row.
        """
        total_bytes = int(self.text_bytes.sum())
        shared_bytes = int(self.order.shared_chunks.sum()) * CHUNK_BYTES
        return shared_bytes / total_bytes if total_bytes else 0.0

    def estimate_tokens(self, row: int) -> int:
        """Estimated prompt tokens of a row."""
        return self.tokens.estimate_tokens(int(self.text_bytes[row]))


def plan_job(
    spec: JobSpec,
    data: InputData,
    template: RequestTemplate,
    *,
    prompts: PromptReader = PLAIN_PROMPTS,
    progress: ProgressSink | None = None,
    watch: TextWatch | None = None,
) -> JobPlan:
    """Render every row once, and order the rows by shared prefix, as the model reads them.

    Reads the input in a stream; keeps 8 bytes for each 256 bytes of prompt text. `watch` is shown
    the texts on their way. Raises DataError when the input cannot be read.
    """
    builder = ChainBuilder(0)
    text_bytes = np.zeros(data.num_rows, dtype=np.int64)
    errors: dict[int, RowError] = {}
    alike: dict[RowError, RowError] = {}
    text_of = prompts.text if template.may_name_media else prompts.layout
    sampled = set(sample_rows(data.num_rows).tolist())
    sample: list[bytes] = []
    for first_row, rows in data.iter_rows(template.columns_used):
        texts: list[bytes] = []
        salts: list[int] = []
        for row, values in enumerate(rows, start=first_row):
            try:
                body = template.render(values, row_number=row, folder=data.folder(row))
                texts.append(text_of(body))
                salts.append(_salt_of_row(spec, body))
            except RowRenderError as problem:
                errors[row] = alike.setdefault(problem.row_error, problem.row_error)
                texts.append(b"")
                salts.append(0)
        builder.add(texts, salts)
        if watch is not None:
            watch(texts, salts)
        sample += [text for row, text in enumerate(texts, start=first_row) if row in sampled]
        text_bytes[first_row : first_row + len(texts)] = [len(text) for text in texts]
        if progress is not None:
            progress("reading rows", first_row + len(texts), data.num_rows)
    chains = builder.build()
    tokens = TokenRatio.sampled(sample, prompts.count)
    return JobPlan.of(chains, order_by_prefix(chains), text_bytes, tokens, errors)


def _salt_of_row(spec: JobSpec, body: Mapping[str, object]) -> int:
    """Rows with another model or another `cache_salt` share no KV."""
    model, cache_salt = str(body["model"]), body.get("cache_salt")
    return salt_of(model, spec.endpoint, *([str(cache_salt)] if cache_salt else []))


KEPT_ROWS, KEPT_BYTES = 100_000, 256 << 20
"""A job with as many rows, or as much text, has its plan kept."""
FORMAT = "2"
"""Another one where a file of this kind, or what a plan is, changes."""


KEPT_NAME = re.compile(r"\.?((?:job|batch)_\w+)\.(?:plan|rows)(?:\.[0-9a-f]+\.part)?")
"""Of a job's kept files, or what a killed writer left of one; its group is the job's id."""


def plan_file(links: Path, job_id: str) -> Path:
    """The file of a job's plan, beside the `links` to inputs."""
    return links / f"{job_id}.plan"


def rows_file(links: Path, job_id: str) -> Path:
    """The file of a job's rows in the order of its plan, where there is need of one."""
    return links / f"{job_id}.rows"


def source_of(record: JobRecord) -> bytes:
    """Names the input, what the job says and the batchrun that reads it."""
    parts = (__version__, record.pin, record.spec)
    return "\0".join(parts).encode("utf-8", "surrogatepass")


def plan_again(
    record: JobRecord,
    data: InputData,
    template: RequestTemplate,
    *,
    links: Path,
    prompts: PromptReader = PLAIN_PROMPTS,
    progress: ProgressSink | None = None,
) -> JobPlan:
    """As `plan_job`, but from the file of an earlier time where the input, what the job says and
    the model's files are as they were; else the file is made, if that is worth it. Without the
    `errors`, which a run finds again, row by row, and would hold until its end."""
    path = plan_file(links, record.id)
    model = f"{FORMAT}\0{prompts.source}".encode("utf-8", "surrogatepass")
    key = xxhash.xxh3_128_digest(b"\0".join((source_of(record), model)))
    plan = _read(path, key)
    if plan is None:
        spec = JobSpec.model_validate_json(record.spec)
        plan = plan_job(spec, data, template, prompts=prompts, progress=progress)
        plan = replace(plan, errors={})
        if plan.num_rows >= KEPT_ROWS or plan.text_bytes.sum() >= KEPT_BYTES:
            _keep(path, key, plan)
    return plan


def _keep(path: Path, key: bytes, plan: JobPlan) -> None:
    try:
        with atomic_file(path, mode=0o600) as file:
            np.savez(
                file,
                key=np.frombuffer(key, np.uint8),
                keys=plan.chains.keys,
                starts=plan.chains.starts,
                rows=plan.order.rows,
                shared_chunks=plan.order.shared_chunks,
                by_chain=plan.order.by_chain,
                text_bytes=plan.text_bytes,
                sample=np.array(plan.tokens.counted),
            )
    except (BatchrunError, OSError) as problem:
        log.warning("the plan is not kept, a restart makes it anew: %s", problem)


UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


def _read(path: Path, key: bytes) -> JobPlan | None:
    """The plan that was kept under this key, each array as it was written; None for none."""
    try:
        with path.open("rb") as file, np.load(file) as kept:
            if kept["key"].tobytes() != key:
                return None
            return JobPlan.of(
                ChainTable(kept["keys"], kept["starts"]),
                PrefixOrder(kept["rows"], kept["shared_chunks"], kept["by_chain"]),
                kept["text_bytes"],
                TokenRatio(*kept["sample"].tolist()),
                {},
            )
    except FileNotFoundError:
        return None
    except UNREADABLE as problem:
        log.warning("%s: cannot be read, the plan is made anew: %s", path, problem)
        return None
