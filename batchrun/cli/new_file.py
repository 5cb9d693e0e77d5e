"""Files that a command writes after long work."""

from __future__ import annotations

from pathlib import Path

from batchrun.errors import InputError
from batchrun.files import write_atomically


def prepare_file(path: Path) -> None:
    """Make the folder before minutes are spent. Raises InputError when nothing can be written."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path.with_name(f".{path.name}.probe"), b"")
        path.with_name(f".{path.name}.probe").unlink()
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
