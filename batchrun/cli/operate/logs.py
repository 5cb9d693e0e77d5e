"""The `logs` command: what daemon, gateway and engines have written, and go on writing."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from batchrun.cli.console import HomeOption
from batchrun.control.starting import is_led_by_another
from batchrun.errors import InputError, shown_safely, suggestion
from batchrun.home import Home

POLL_INTERVAL_S = 0.2
BLOCK_BYTES = 1 << 16
PARTS = ("daemon", "gateway", "engine")


def logs(
    part: Annotated[
        str, typer.Argument(help="daemon, gateway, engine (every engine), or one engine's name.")
    ] = "daemon",
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C with what is written.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Lines of the end to show of each log.")
    ] = 100,
    home: HomeOption,
) -> None:
    """Show the end of a log: when, how grave, and what; a line for each job's begin and end."""
    files = [LogFile(path) for path in _paths(part, home)]
    for file in files:
        _show(file, file.last_lines(lines), is_named=len(files) > 1)
    while follow:
        for file in files:
            _show(file, file.new_lines(), is_named=len(files) > 1)
        time.sleep(POLL_INTERVAL_S)


class LogFile:
    """A log that is read on from where it ended; one that was begun anew is read from its start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = path.stat().st_size
        self._rest = b""

    def last_lines(self, num_lines: int) -> Sequence[str]:
        """The last lines of what was there at first, without reading what comes before them."""
        with self.path.open("rb") as file:
            text = _end_of(file, self._position, num_lines)
        found = _lines_in(text)
        return found[-num_lines:] if num_lines else []

    def new_lines(self) -> Iterator[str]:
        """The whole lines that were added since."""
        try:
            size_bytes = self.path.stat().st_size
        except FileNotFoundError:
            return
        if size_bytes < self._position:
            self._position, self._rest = 0, b""
        with self.path.open("rb") as file:
            file.seek(self._position)
            text = self._rest + file.read(size_bytes - self._position)
        self._position = size_bytes
        whole, end, self._rest = text.rpartition(b"\n")
        yield from _lines_in(whole + end)


def _lines_in(text: bytes) -> list[str]:
    """Its lines, in which nothing stands that a terminal would obey: engines and what they load
    write there what they like."""
    return [shown_safely(line) for line in text.decode(errors="replace").splitlines()]


def _end_of(file: BinaryIO, position: int, num_lines: int) -> bytes:
    """So much of what is before `position` that it holds more than these lines, or all of it."""
    text = b""
    while position and text.count(b"\n") <= num_lines:
        start = max(position - BLOCK_BYTES, 0)
        file.seek(start)
        text = file.read(position - start) + text
        position = start
    return text


def _paths(part: str, home: Home) -> list[Path]:
    """The logs of a part. Raises InputError where there is none here."""
    if part == "daemon" and is_led_by_another(home):
        raise InputError(
            "daemon: it was not started by `up -d`, and writes its log where that collects it: "
            "`journalctl -u batchrun`, `docker compose logs`, or its terminal"
        )
    names = sorted(path.stem for path in home.log.glob("*.log")) if home.log.is_dir() else []
    wanted = [name for name in names if name.startswith("engine-")] if part == "engine" else []
    wanted += [name for name in names if name in {part, f"engine-{part}"}]
    if wanted:
        return [home.log / f"{name}.log" for name in wanted]
    known = [*PARTS, *(name.removeprefix("engine-") for name in names)]
    if part in PARTS or not names:
        raise InputError(f"{part}: nothing was logged yet in {home.log}; `batchrun up` starts it")
    raise InputError(f"{part}: no such log{suggestion(part, known)}; there are {', '.join(names)}")


def _show(file: LogFile, found: Sequence[str] | Iterator[str], *, is_named: bool) -> None:
    prefix = f"{file.path.stem}: " if is_named else ""
    for line in found:
        sys.stdout.write(f"{prefix}{line}\n")
    sys.stdout.flush()
