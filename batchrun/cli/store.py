"""The `store` commands: check it, back it up; and `gc`, which removes results of old jobs."""

from __future__ import annotations

import glob
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from batchrun.cli.console import (
    ConfigOption,
    HomeOption,
    JsonOption,
    LateProgress,
    note,
    out,
    print_json,
    say,
)
from batchrun.cli.deployment import read_deployment
from batchrun.config import load_home
from batchrun.errors import InputError, StoreLockedError
from batchrun.files import StoreLock, atomic_file, remove_left_scratch
from batchrun.home import Home
from batchrun.jobs.results.file_bytes import check_contents, file_bytes_of, remove_expired
from batchrun.jobs.results.keeping import UnusedLink, check_files, find_unused_links
from batchrun.quantities import parse_age_s
from batchrun.store import files, jobs
from batchrun.store.check import Violation, check_store, readable_jobs
from batchrun.store.database import Store, name_of, open_store, open_to_read
from batchrun.store.files import FileRecord
from batchrun.store.jobs import JobRecord
from batchrun.store.retention import (
    body_bytes,
    find_removable,
    give_disk_back,
    is_shrinkable,
    journal_of,
    remove_results,
    rewrite,
    unused_bytes,
    write_snapshot,
)
from batchrun.types import ProgressSink

MAX_SHOWN = 1_000
SQLITE_MAGIC = b"SQLite format 3\0"

store_app = typer.Typer(
    help="Check the store, back it up.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@store_app.command()
def check(
    file: Annotated[
        Path | None,
        typer.Argument(help="A backup to check. [default: the store of the home folder]"),
    ] = None,
    *,
    home_path: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what is wrong with the store; exits 1 when anything is. Changes nothing.

    Also beside a running daemon. Of a backup, what is inside is checked; of the home folder's store
    the files that it names, too.
    """
    home = load_home(home_path)
    location = home.store_location if file is None else file
    name = str(location) if file is not None else name_of(location)
    with LateProgress() as progress:
        violations = _violations(location, home if file is None else None, progress)
    if as_json:
        shown = [asdict(violation) for violation in violations[:MAX_SHOWN]]
        print_json({"path": name, "num_violations": len(violations), "violations": shown})
    else:
        _say_all(violations)
        if not violations:
            say(f"{name}: nothing is wrong")
    if violations:
        sys.exit(1)


@store_app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="File to write; an older backup is replaced.")],
    *,
    home_path: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy the store as it is now into one file, also while a daemon runs; then check the copy."""
    home = load_home(home_path)
    _check_target(file, home.store)
    _remove_left_journals(file)
    store = open_to_read(home.store_location)
    try:
        with LateProgress() as progress, atomic_file(file) as copy:
            os.fchmod(copy.fileno(), 0o600)
            progress("copying the store", 0, 0)
            write_snapshot(store, Path(copy.name))
            violations = _violations(Path(copy.name), None, progress)
    finally:
        store.close()
    num_bytes = file.stat().st_size
    if as_json:
        document = {"path": str(file), "bytes": num_bytes, "num_violations": len(violations)}
        print_json(document)
    else:
        say(f"{file}: {num_bytes / 1e6:,.1f} MB")
    if violations:
        note(f"written, but the store has {len(violations):,} faults, and so has its copy:")
        _say_all(violations)
        sys.exit(1)


def _violations(location: str | Path, home: Home | None, progress: ProgressSink) -> list[Violation]:
    """What is wrong inside the store there, and with the files that it names in `home`."""
    store = open_to_read(location)
    try:
        found = list(check_store(store, progress=progress))
        if home is not None and not any(violation.hides_more for violation in found):
            found += check_files(readable_jobs(store), links=home.inputs)
            found += check_contents(store, file_bytes_of(home))
        return found
    finally:
        store.close()


def _say_all(violations: Sequence[Violation]) -> None:
    for violation in islice(violations, MAX_SHOWN):
        say(str(violation))
    if len(violations) > MAX_SHOWN:
        note(f"and {len(violations) - MAX_SHOWN:,} more")


def _remove_left_journals(file: Path) -> None:
    """Remove what backups to `file` that were killed left; `atomic_file` removes the rest."""
    for left in file.parent.glob(f".{glob.escape(file.name)}.*.part"):
        journal_of(left).unlink(missing_ok=True)


def _check_target(file: Path, store: Path) -> None:
    """Raises InputError for a file that is no older backup."""
    if not file.exists():
        return
    if store.exists() and file.samefile(store):
        raise InputError(f"{file}: is the store itself; name another file")
    if file.is_file() and file.open("rb").read(len(SQLITE_MAGIC)) != SQLITE_MAGIC:
        raise InputError(f"{file}: is there already and is no backup; name another file")


def gc(
    *,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", help="Age since the end, such as 30d. [default: `retention`]"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be removed.")
    ] = False,
    config: ConfigOption = None,
    home_path: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove the results and pinned inputs of jobs that ended long ago.

    Output files stay where they are, and so do the jobs with their counts.
    """
    home = load_home(home_path)
    age_s = _age_s(older_than, config)
    now_s = time.time()
    if not home.has_store:
        raise InputError(f"{home.path} holds no jobs yet")
    store = open_store(home.store_location)
    try:
        old = find_removable(store, ended_before_s=now_s - age_s)
        sizes = [body_bytes(store, record.seq) for record in old]
        is_file = store.is_sqlite
        before = home.store.stat().st_size if is_file else sum(sizes)
        links = _remove(store, old, home, now_s) if not dry_run else _would_go(store, old, home)
        expired = files.find_expired(store, now_s=now_s)
        if not dry_run and home.files.is_dir():
            remove_expired(store, file_bytes_of(home), now_s=now_s)
            remove_left_scratch(home.inputs)
        is_given_back = dry_run or not unused_bytes(store) or _give_back(store, home)
    finally:
        store.close()
    after = home.store.stat().st_size if is_file else 0
    freed = sum(sizes) if dry_run else max(before - after, 0)
    freed += sum(link.size_bytes for link in links) + sum(file.size_bytes for file in expired)
    if as_json:
        document = _document(old, sizes, links) | {"files": [file.id for file in expired]}
        print_json(document | {"dry_run": dry_run, "freed_bytes": freed})
        return
    _show(old, sizes, links, expired)
    if old or links or expired or freed:
        say(f"{'would free' if dry_run else 'freed'} {freed / 1e6:,.1f} MB of disk")
    if not is_given_back:
        note(
            "the room inside the store is used for new results; to shorten the file, "
            "`batchrun down` and `batchrun gc` again"
        )


def _age_s(older_than: str | None, config: Path | None) -> float:
    if older_than is not None:
        try:
            return parse_age_s(older_than)
        except ValueError as error:
            raise InputError(f"--older-than: {error}") from None
    retention = read_deployment(config).retention
    if retention is None:
        raise InputError(
            "results are kept for ever; say --older-than 30d, or set `retention` in batchrun.yaml"
        )
    return parse_age_s(retention)


def _remove(store: Store, old: Sequence[JobRecord], home: Home, now_s: float) -> list[UnusedLink]:
    """Rows first, files after: what a kill leaves is found again by the next call."""
    with LateProgress() as progress:
        for record in old:
            for num_removed in remove_results(store, record, now_s=now_s):
                progress(f"removing results of {record.id}", num_removed, record.num_rows)
    links = find_unused_links(jobs.list_jobs(store), links=home.inputs, now_s=now_s)
    for link in links:
        link.path.unlink(missing_ok=True)
    return links


def _would_go(store: Store, old: Sequence[JobRecord], home: Home) -> list[UnusedLink]:
    now_s = time.time()
    going = {record.seq for record in old}
    records = [
        replace(record, results_removed_at=now_s) if record.seq in going else record
        for record in jobs.list_jobs(store)
    ]
    return find_unused_links(records, links=home.inputs, now_s=now_s)


def _give_back(store: Store, home: Home) -> bool:
    """Shorten the store's file; False when that has to wait until no daemon runs."""
    if is_shrinkable(store):
        with LateProgress() as progress:
            for num_left in give_disk_back(store):
                progress("giving disk back (4 KiB pages left)", num_left, 0)
        return True
    with suppress(StoreLockedError), StoreLock(home.store_lock):
        rewrite(store)
        return True
    return False


def _document(
    old: Sequence[JobRecord], sizes: Sequence[int], links: Sequence[UnusedLink]
) -> dict[str, object]:
    removed = [
        {"id": record.id, "name": record.name, "rows": record.num_rows, "bytes": size}
        for record, size in zip(old, sizes, strict=True)
    ]
    return {"jobs": removed, "inputs": [str(link.path) for link in links]}


def _show(
    old: Sequence[JobRecord],
    sizes: Sequence[int],
    links: Sequence[UnusedLink],
    expired: Sequence[FileRecord],
) -> None:
    if not old and not links and not expired:
        say("nothing to remove")
        return
    table = Table("job", "name", "ended", "rows", "MB", box=None)
    for record, size in zip(old, sizes, strict=True):
        ended = time.strftime("%Y-%m-%d", time.gmtime(record.finished_at or 0))
        size_mb = f"{size / 1e6:,.1f}"
        table.add_row(record.id, record.name, ended, f"{record.num_rows:,}", size_mb)
    if old:
        out.print(table, markup=False)
    for link in links:
        say(f"input {link.path.name}: {link.size_bytes / 1e6:,.1f} MB")
    for file in expired:
        say(f"expired {file.id} {file.filename}: {file.size_bytes / 1e6:,.1f} MB")
