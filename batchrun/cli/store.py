"""The `store` commands: check it, back it up."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from batchrun.cli.console import LateProgress, note, print_json, say
from batchrun.cli.options import HomeOption, JsonOption
from batchrun.config import load_home
from batchrun.errors import InputError
from batchrun.home import Home
from batchrun.output import atomic_file
from batchrun.output.api_files import check_contents, file_bytes_of
from batchrun.output.keeping import check_files
from batchrun.store import Violation, check_store, name_of, open_to_read, readable_jobs
from batchrun.store.snapshot import journal_of, write_snapshot
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
