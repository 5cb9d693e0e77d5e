"""The `store` commands: check it, back it up; and `gc`, which removes results of old jobs."""

from __future__ import annotations

import glob
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from batchrun.cli.console import (
    ConfigOption,
    HomeOption,
    JsonOption,
    ProgressBar,
    answer,
    columns,
    command_group,
    note,
    out,
)
from batchrun.control.starting import read_deployment
from batchrun.errors import InputError, StoreLockedError
from batchrun.files import StoreLock, atomic_file, remove_left_scratch
from batchrun.files import name_of as file_name_of
from batchrun.home import Home
from batchrun.jobs.results.file_bytes import check_contents, file_bytes_of, remove_expired
from batchrun.jobs.results.keeping import (
    UnusedLink,
    check_files,
    find_unused_links,
    find_unused_rows,
    remove,
)
from batchrun.quantities import parse_age_s
from batchrun.store import files, jobs, retention
from batchrun.store.check import Violation, check_store, readable_jobs
from batchrun.store.database import Store, name_of, open_store, open_to_read
from batchrun.store.files import FileRecord
from batchrun.store.jobs import JobRecord
from batchrun.types import ProgressSink

MAX_SHOWN = 1_000
SQLITE_MAGIC = b"SQLite format 3\0"

store_app = command_group("Check the store, back it up.")


@store_app.command()
def check(
    file: Annotated[
        Path | None,
        typer.Argument(help="A backup to check. [default: the store of the home folder]"),
    ] = None,
    *,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Say what is wrong with the store; exits 1 when anything is. Changes nothing.

    Also beside a running daemon. Of a backup, what is inside is checked; of the home folder's store
    the files that it names, too.
    """
    location = home.store_location if file is None else file
    name = str(location) if file is not None else name_of(location)
    with ProgressBar() as progress:
        violations = _violations(location, home if file is None else None, progress)
    shown = [asdict(violation) for violation in violations[:MAX_SHOWN]]
    answer(
        {"path": name, "num_violations": len(violations), "violations": shown},
        *(_shown(violations) or [f"{name}: nothing is wrong"]),
        as_json=as_json,
    )
    if violations:
        sys.exit(1)


@store_app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="File to write; an older backup is replaced.")],
    *,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Copy the store as it is now into one file, also while a daemon runs; then check the copy."""
    _check_target(file, home.store)
    _remove_left_journals(file)
    with (
        closing(open_to_read(home.store_location)) as store,
        ProgressBar() as progress,
        atomic_file(file) as copy,
    ):
        os.fchmod(copy.fileno(), 0o600)
        progress("copying the store", 0, 0)
        retention.write_snapshot(store, Path(copy.name))
        violations = _violations(Path(copy.name), None, progress)
    num_bytes = file.stat().st_size
    document = {"path": str(file), "bytes": num_bytes, "num_violations": len(violations)}
    answer(document, f"{file}: {_mb(num_bytes)}", as_json=as_json)
    if violations:
        note(f"written, but the store has {len(violations):,} faults, and so has its copy:")
        for line in () if as_json else _shown(violations):
            out.print(line)
        sys.exit(1)


def _violations(location: str | Path, home: Home | None, progress: ProgressSink) -> list[Violation]:
    """What is wrong inside the store there, and with the files that it names in `home`."""
    with closing(open_to_read(location)) as store:
        found = list(check_store(store, progress=progress))
        if home is not None and not any(violation.hides_more for violation in found):
            found += check_files(readable_jobs(store), links=home.inputs)
            found += check_contents(store, file_bytes_of(home))
        return found


def _shown(violations: Sequence[Violation]) -> list[str]:
    lines = [str(violation) for violation in violations[:MAX_SHOWN]]
    more = len(violations) - MAX_SHOWN
    return [*lines, f"and {more:,} more"] if more > 0 else lines


def _remove_left_journals(file: Path) -> None:
    """Remove what backups to `file` that were killed left; `atomic_file` removes the rest."""
    for left in file.parent.glob(f".{glob.escape(file_name_of(file.name))}.*.part"):
        retention.journal_of(left).unlink(missing_ok=True)


def _check_target(file: Path, store: Path) -> None:
    """Raises InputError for a file that is no older backup."""
    if not file.exists():
        return
    if store.exists() and file.samefile(store):
        raise InputError(f"{file}: is the store itself; name another file")
    if file.is_file():
        with file.open("rb") as older:
            if older.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC:
                return
        raise InputError(f"{file}: is there already and is no backup; name another file")


def gc(
    *,
    older_than: Annotated[
        str | None, typer.Option(help="Age since the end, such as 30d. [default: `retention`]")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be removed.")
    ] = False,
    config: ConfigOption = None,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Remove the results and pinned inputs of jobs that ended long ago.

    The metadata and errors of batches go with them. Output files stay where they are, and so do
    the jobs with their counts.
    """
    age_s = _age_s(older_than, config)
    now_s = time.time()
    if not home.has_store:
        raise InputError(f"{home.path} holds no jobs yet")
    with closing(open_store(home.store_location)) as store:
        old = retention.find_removable(store, ended_before_s=now_s - age_s)
        sizes = [retention.body_bytes(store, record.seq) for record in old]
        is_file = store.is_sqlite
        before = home.store.stat().st_size if is_file else sum(sizes)
        expired = files.find_expired(store, now_s=now_s)
        if not dry_run:
            _remove_results(store, old, now_s)
        links = _unused_links(store, old, home, now_s)
        if not dry_run:
            _remove_files(store, links, home, now_s)
        is_given_back = dry_run or not retention.unused_bytes(store) or _give_back(store, home)
    after = home.store.stat().st_size if is_file else 0
    freed = sum(sizes) if dry_run else max(before - after, 0)
    freed += sum(link.size_bytes for link in links) + sum(file.size_bytes for file in expired)
    removed = [
        {"id": record.id, "name": record.name, "rows": record.num_rows, "bytes": size}
        for record, size in zip(old, sizes, strict=True)
    ]
    document = {
        "jobs": removed,
        "inputs": [str(link.path) for link in links],
        "files": [file.id for file in expired],
        "dry_run": dry_run,
        "freed_bytes": freed,
    }
    shown = list(_removed(old, sizes, links, expired))
    if shown or freed:
        shown.append(f"{'would free' if dry_run else 'freed'} {_mb(freed)} of disk")
    answer(document, *(shown or ["nothing to remove"]), as_json=as_json)
    if not is_given_back and not as_json:
        note(
            "the room inside the store is used for new results; to shorten the file, "
            "`batchrun down` and `batchrun gc` again"
        )


def _removed(
    old: Sequence[JobRecord],
    sizes: Sequence[int],
    links: Sequence[UnusedLink],
    expired: Sequence[FileRecord],
) -> Iterator[RenderableType]:
    """What goes, for people."""
    rows = []
    for record, size in zip(old, sizes, strict=True):
        ended = time.strftime("%Y-%m-%d", time.gmtime(record.finished_at or 0))
        rows.append((record.id, record.name, ended, f"{record.num_rows:,}", f"{size / 1e6:,.1f}"))
    if rows:
        yield columns("job", "name", "ended", "rows", "MB", rows=rows)
    for link in links:
        yield f"input {link.path.name}: {_mb(link.size_bytes)}"
    for file in expired:
        yield f"expired {file.id} {file.filename}: {_mb(file.size_bytes)}"


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _age_s(older_than: str | None, config: Path | None) -> float:
    if older_than is not None:
        try:
            return parse_age_s(older_than)
        except ValueError as error:
            raise InputError(f"--older-than: {error}") from None
    kept = read_deployment(config).retention
    if kept is None:
        raise InputError(
            "results are kept for ever; say --older-than 30d, or set `retention` in batchrun.yaml"
        )
    return parse_age_s(kept)


def _remove_results(store: Store, old: Sequence[JobRecord], now_s: float) -> None:
    """Rows before files: what a kill leaves is found again by the next call."""
    with ProgressBar() as progress:
        for record in old:
            for num_removed in retention.remove_results(store, record, now_s=now_s):
                progress(f"removing results of {record.id}", num_removed, record.num_rows)


def _unused_links(
    store: Store, old: Sequence[JobRecord], home: Home, now_s: float
) -> list[UnusedLink]:
    """The inputs that nobody needs once the results of `old` are gone."""
    going = {record.seq for record in old}
    records = [
        replace(record, results_removed_at=now_s) if record.seq in going else record
        for record in jobs.list_jobs(store)
    ]
    rows = find_unused_rows(records, kept_in=home.kept_rows, now_s=now_s)
    return [*rows, *find_unused_links(records, links=home.inputs, now_s=now_s)]


def _remove_files(store: Store, links: Sequence[UnusedLink], home: Home, now_s: float) -> None:
    for link in links:
        remove(link)
    if home.files.is_dir():
        remove_expired(store, file_bytes_of(home), now_s=now_s)
        remove_left_scratch(home.inputs)


def _give_back(store: Store, home: Home) -> bool:
    """Shorten the store's file; False when that has to wait until no daemon runs."""
    if retention.is_shrinkable(store):
        with ProgressBar() as progress:
            for num_left in retention.give_disk_back(store):
                progress("giving disk back (4 KiB pages left)", num_left, 0)
        return True
    with suppress(StoreLockedError), StoreLock(home.store_lock):
        retention.rewrite(store)
        return True
    return False
