"""What the user sees: results on stdout, progress and one-line errors on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

SHOW_PROGRESS_AFTER_S = 2.0
FILE_WIDTH_CHARS = 10_000
"""Nothing is folded or cut in a file or a pipe."""


def _console(stream: TextIO, *, is_err: bool = False) -> Console:
    width = None if stream.isatty() else FILE_WIDTH_CHARS
    return Console(stderr=is_err, highlight=False, soft_wrap=True, width=width)


out = _console(sys.stdout)
err = _console(sys.stderr, is_err=True)


def say(line: str) -> None:
    """A line on stdout, as it is."""
    out.print(line, markup=False)


def note(line: str) -> None:
    """A line on stderr: not part of the result."""
    err.print(line, markup=False)


def print_json(document: Mapping[str, object]) -> None:
    """One JSON object on stdout."""
    out.print(json.dumps(document, ensure_ascii=False), markup=False)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress display on stderr that disappears when it ends; none where nobody watches."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        yield progress


class LateProgress:
    """A `ProgressSink` that shows a bar once the work has taken over two seconds."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._progress: Progress | None = None
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not err.is_terminal or time.monotonic() - self._start_s < SHOW_PROGRESS_AFTER_S:
            return
        if self._progress is None:
            self._progress = Progress(console=err, transient=True)
            self._progress.start()
            self._progress.add_task(stage, total=None)
        task = self._progress.task_ids[0]
        self._progress.update(task, description=stage, completed=done, total=total or None)

    def __enter__(self) -> LateProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
