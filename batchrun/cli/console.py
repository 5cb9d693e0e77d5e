"""What commands share: results on stdout, progress and errors on stderr, common options."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from batchrun.errors import EngineError, InputError
from batchrun.files import write_atomically

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


HomeOption = Annotated[
    Path | None,
    typer.Option("--home", help="Folder of the state. [default: ~/.local/state/batchrun]"),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="Deployment file. [default: ./batchrun.yaml when there is one]"),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="Folder or hub id of the model to serve, or `tiny`."),
]
ListenOption = Annotated[
    str | None, typer.Option("--listen", help="HOST:PORT of the online endpoint.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")]
JobArgument = Annotated[str, typer.Argument(help="Job id, unique prefix of one, or job name.")]
JobFileArgument = Annotated[Path, typer.Argument(help="Job file (YAML).")]


@contextmanager
def vllm_needed(command: str) -> Iterator[None]:
    """Around the import of what simulates. Raises EngineError, one line, where vLLM is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in {"vllm", "torch"}:
            raise EngineError(
                f"{command} runs vLLM's own scheduler, and vLLM cannot be imported here; use the "
                "Python in which the engines run"
            ) from error
        raise
