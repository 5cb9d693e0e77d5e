"""The files that belong to jobs: whether they are what the store says, and which are done with."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from batchrun.errors import BatchrunError
from batchrun.files import is_url
from batchrun.jobs import objects
from batchrun.jobs.pin import InputPin, PinnedFile, hash_blocks, link_name, link_names, pinned_path
from batchrun.jobs.results.output_parts import files_of
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.submit import KEPT_NAME
from batchrun.store.batches import BatchRecord, needs_kept_input
from batchrun.store.check import Violation
from batchrun.store.database import Store
from batchrun.store.files import ID_PREFIX
from batchrun.store.jobs import ID_ALPHABET, JobRecord

ORPHAN_AGE_S = 86_400.0
"""A link that no job names may belong to a submission under way, but not for so long."""
LINK_NAME = re.compile(r"[0-9a-f]{32}-.+", re.DOTALL)
_KEPT_ROWS = re.compile(
    rf"\.?[0-9a-f]{{16}}\..+|[{ID_ALPHABET}]{{12}}|{ID_PREFIX}[A-Za-z0-9]+", re.DOTALL
)
"""Rows of a DataFrame and their answers, a draft of the page, a file that no store lists."""
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class UnusedLink:
    """A link to an input, or rows that were kept, that no job needs; `size_bytes` is what the disk
    gets back. Rows whose `ctime_ns` is another by now were asked for since."""

    path: Path
    size_bytes: int
    ctime_ns: int | None = None


def check_files(records: Sequence[JobRecord], *, links: Path) -> Iterator[Violation]:
    """What is wrong with the inputs of unfinished jobs and the outputs of finished ones.

    Reads every byte of those inputs. Where several jobs wrote one output, the last counts.
    """
    written = filter(_has_output, records)
    ended = sorted(written, key=lambda record: record.finished_at or 0.0)
    last_of = {record.output_path: record for record in ended}
    for record in records:
        if not record.state.is_terminal:
            files = _pinned_files(record)
            if files is None:
                yield Violation("what it says of its input cannot be read", record.id)
            for file in files or ():
                yield from (Violation(what, record.id) for what in _input_faults(file, links))
    for path, record in last_of.items():
        yield from (Violation(what, record.id) for what in _output_faults(path, record))


def find_unused_links(
    records: Sequence[JobRecord], *, links: Path, now_s: float
) -> list[UnusedLink]:
    """What is kept of jobs, and links to inputs, in the folder `links` that no job needs: not one
    that runs or waits, and of links none whose results can still be written out. None while it is
    unknown what some job needs.

    A copy of an object is the only one: where one job is done with it, a submission under way may
    count on it, so it goes as late as a link that no job names.
    """
    kept: set[str] = set()
    known: set[str] = set()
    has_ended = {record.id: record.state.is_terminal for record in records}
    for record in records:
        files = _pinned_files(record)
        if files is None:
            return []
        names = {name for file in files for name in link_names(file)}
        known |= {name for file in files if not is_url(file.path) for name in link_names(file)}
        if record.results_removed_at is None:
            kept |= names
    found: list[UnusedLink] = []
    for path in sorted(links.iterdir()) if links.is_dir() else ():
        if not path.is_file():
            continue
        status = path.stat()
        if LINK_NAME.fullmatch(path.name):
            is_old = path.name in known or now_s - status.st_ctime > ORPHAN_AGE_S
            is_unused = path.name not in kept and is_old
        else:
            of_job = KEPT_NAME.fullmatch(path.name)
            is_old = now_s - status.st_mtime > ORPHAN_AGE_S
            is_unused = of_job is not None and has_ended.get(of_job[1], is_old)
        if is_unused:
            found.append(UnusedLink(path, status.st_size if status.st_nlink == 1 else 0))
    return found


def drop_input(store: Store, batch: BatchRecord, pin: str, *, links: Path) -> None:
    """Remove what was kept of the input of a batch that did not start, unless another needs it."""
    if not needs_kept_input(store, batch):
        for file in InputPin.model_validate_json(pin).files:
            with suppress(OSError):
                (links / link_name(file)).unlink()


def kept_files(links: Path) -> dict[str, list[Path]]:
    """What is kept of each job whose plan or rows lie in the folder `links`, by its id."""
    found: dict[str, list[Path]] = {}
    for path in links.iterdir() if links.is_dir() else ():
        if of_job := KEPT_NAME.fullmatch(path.name):
            found.setdefault(of_job[1], []).append(path)
    return found


def find_unused_rows(
    records: Sequence[JobRecord], *, kept_in: Sequence[Path], now_s: float
) -> list[UnusedLink]:
    """What `batchrun.map` and the page keep of rows and their answers, and daemons of files that no
    store lists, and no job needs: those that named it had their results removed, or none ever did.
    Rows that a new call may count on go a day after their last one. Others' files stay."""
    needed: set[str] = set()
    known: set[str] = set()
    for record in records:
        places = _places(record)
        known |= places
        if record.results_removed_at is None:
            needed |= places
    found: list[UnusedLink] = []
    for path in (
        path for folder in kept_in if folder.is_dir() for path in sorted(folder.iterdir())
    ):
        if not _KEPT_ROWS.fullmatch(path.name):
            continue
        files = [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]
        names = {str(each) for each in (path, *files)}
        is_over = path.is_dir() and names & known
        status = path.stat()
        if not names & needed and (is_over or now_s - status.st_ctime > ORPHAN_AGE_S):
            size_bytes = sum(each.stat().st_size for each in files)
            found.append(UnusedLink(path, size_bytes, status.st_ctime_ns))
    return found


def remove(unused: UnusedLink) -> None:
    """Remove a link, or kept rows unless they are in use again; one that is gone is no fault."""
    if unused.path.is_dir():
        shutil.rmtree(unused.path, ignore_errors=True)
        return
    with suppress(FileNotFoundError):
        if unused.ctime_ns in (None, unused.path.stat().st_ctime_ns):
            unused.path.unlink()


def _places(record: JobRecord) -> set[str]:
    """The paths of a job's input and output."""
    spec = json.loads(record.spec)
    paths = spec.get("input", {}).get("path", ())
    return {*([paths] if isinstance(paths, str) else paths), record.output_path}


def _pinned_files(record: JobRecord) -> tuple[PinnedFile, ...] | None:
    """A job's input files, or None when the store's word on them cannot be read."""
    try:
        return InputPin.model_validate_json(record.pin).files
    except ValidationError:
        return None


def _input_faults(file: PinnedFile, links: Path) -> Iterator[str]:
    path = pinned_path(file, links)
    try:
        now = hash_blocks(path, file.block_ends)
        size_bytes = path.stat().st_size
    except OSError as failure:
        yield f"its input {file.path} cannot be read: {failure.strerror}"
        return
    if size_bytes != file.size_bytes:
        yield f"its input {path} had {file.size_bytes} bytes and has {size_bytes}"
    pairs = enumerate(zip(file.block_hashes, now, strict=True))
    for index, (was, is_now) in pairs:
        if was != is_now:
            yield f"block {index} of its input {path} had xxh3 {was} and has {is_now}"


def _has_output(record: JobRecord) -> bool:
    return record.has_output and not record.is_batch and record.results_removed_at is None


def _output_faults(path: str, record: JobRecord) -> Iterator[str]:
    try:
        rows_per_file = JobSpec.model_validate_json(record.spec).output.rows_per_file
        num_rows = sum(map(_num_rows_of, files_of(path, rows_per_file)))
    except (BatchrunError, OSError, pa.ArrowException, ValidationError) as failure:
        problem = getattr(failure, "strerror", None) or " ".join(str(failure).split())
        yield (
            f"its output {path} cannot be read: {problem}; `batchrun results {record.id} -o PATH` "
            "writes it again"
        )
        return
    if num_rows != record.num_rows:
        yield f"its output {path} has {num_rows} rows, and the job has {record.num_rows}"


def _num_rows_of(place: str) -> int:
    with objects.open_to_read(place) as file:
        if place.endswith(".parquet"):
            return int(pq.read_metadata(file).num_rows)
        return sum(piece.count(b"\n") for piece in iter(lambda: file.read(_READ_BYTES), b""))
