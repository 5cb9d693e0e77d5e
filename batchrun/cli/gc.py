"""The `gc` command: removes the results of jobs that ended long ago."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from batchrun.cli.console import LateProgress, note, out, print_json, say
from batchrun.cli.options import ConfigOption, HomeOption, JsonOption
from batchrun.config import load_deployment, load_home
from batchrun.durations import parse_age_s
from batchrun.errors import InputError, StoreLockedError
from batchrun.home import Home
from batchrun.output.api_files import file_bytes_of, remove_expired
from batchrun.output.keeping import UnusedLink, find_unused_links
from batchrun.scratch import remove_left_scratch
from batchrun.store import JobRecord, Store, StoreLock, files, jobs, open_store
from batchrun.store.files import FileRecord
from batchrun.store.retention import body_bytes, find_removable, remove_results
from batchrun.store.snapshot import give_disk_back, is_shrinkable, rewrite, unused_bytes


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
    retention = load_deployment(config).retention
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
