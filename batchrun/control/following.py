"""Watching work until it ends: progress on stderr, and one job from submission to its end."""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.text import Text

from batchrun.control.client import DaemonClient
from batchrun.errors import (
    DaemonUnavailableError,
    EngineError,
    JobFailedError,
    RowsFailedError,
    StoreFullError,
    shown_safely,
)
from batchrun.types import OFFLINE_OFF, JobState

FILE_WIDTH_CHARS = 10_000
"""Nothing is folded or cut in a file or a pipe."""
POLL_INTERVAL_S = 0.3
STALL_PATIENCE_S, SILENCE_PATIENCE_S = 5.0, 15.0


NOTEBOOK_WIDTH_CHARS = 100
NOTEBOOK_INTERVAL_S = 0.1


def _is_notebook() -> bool:
    """Whether a Jupyter kernel runs this."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class SafeConsole(Console):
    """A console that never hands a terminal what it would obey, whoever wrote it, and ends no line
    with blanks but on a full screen, where they cover what stood there before."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """As rich does, with each character that nobody can see as `shown_safely` has it."""
        blanks: list[Segment] = []
        for segment in super().render(renderable, options):
            text, style, control = segment
            if control:
                yield segment
                continue
            shown = shown_safely(text)
            said = shown if self.is_alt_screen else shown.rstrip(" ")
            if shown.startswith("\n"):
                blanks.clear()
            elif said:
                yield from blanks
                blanks.clear()
            if said:
                yield Segment(said, style)
            if len(said) < len(shown):
                blanks.append(Segment(" " * (len(shown) - len(said)), style))
        yield from blanks


def _for_notebook(console: Callable[..., Console], **more: Any) -> Console:
    """Plain lines: neither the widgets nor the colours that a kernel asks rich for."""
    width = NOTEBOOK_WIDTH_CHARS
    return console(width=width, force_jupyter=False, force_terminal=False, **more)


def _stderr() -> Console:
    console = partial(
        SafeConsole, stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False
    )
    if _is_notebook():
        return _for_notebook(console)
    return console(width=None if sys.stderr.isatty() else FILE_WIDTH_CHARS)


err = _stderr()


def note(line: str) -> None:
    """A line on stderr: not part of the result."""
    err.print(line)


class _Rate(ProgressColumn):
    """How many a second, where it is known of how many."""

    def render(self, task: Task) -> Text:
        if task.total is None or not task.speed:
            return Text("")
        return Text(f"{task.speed:,.0f}/s" if task.speed >= 10 else f"{task.speed:.1f}/s")


class _CellLine:
    """A line of a notebook cell's output that is written anew, and empty at the end: pages of
    notebooks do not obey what moves a terminal's cursor."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown_s = float("-inf")

    def show(self, renderable: RenderableType) -> None:
        """Show this in the place of what stood there, unless that is new itself."""
        if time.monotonic() - self._shown_s < NOTEBOOK_INTERVAL_S:
            return
        self._shown_s = time.monotonic()
        paper = io.StringIO()
        _for_notebook(Console, file=paper, color_system=None).print(renderable)
        self._write(shown_safely(paper.getvalue().strip()))

    def clear(self) -> None:
        """Leave nothing of it."""
        if self._handle is not None:
            self._write("")

    def _write(self, line: str) -> None:
        bundle = {"text/plain": line}
        if self._handle is None:
            display = sys.modules["IPython"].display.display
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


class ProgressBar:
    """A `ProgressSink` that draws on stderr, or under a notebook's cell, once the work has taken
    `after_s`, and is gone when it ends: how far, how fast, how long still. It draws nothing where
    nobody watches, nor without `is_shown`."""

    def __init__(self, after_s: float = 2.0, *, is_shown: bool = True) -> None:
        self._shown_from_s = time.monotonic() + after_s
        self._cell = _CellLine() if _is_notebook() else None
        is_seen = is_shown and (self._cell is not None or err.is_interactive)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            _Rate(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=err,
            transient=True,
            disable=not is_seen,
        )
        self._task = self._progress.add_task("", total=None)

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._progress.disable or time.monotonic() < self._shown_from_s:
            return
        if self._cell is None:
            self._progress.start()
        (task,) = self._progress.tasks
        if done < task.completed or (total or None) != task.total:
            self._progress.reset(self._task, total=total or None)
        self._progress.update(self._task, description=stage, completed=done, total=total or None)
        if self._cell is not None:
            self._cell.show(self._progress.get_renderable())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._cell is None:
            self._progress.stop()
        else:
            self._cell.clear()


def watch(
    client: DaemonClient,
    job_id: str,
    *,
    go_on: str | None = None,
    is_shown: bool = True,
    is_enough: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """The daemon's view of a job once it has ended or paused, or `is_enough`. Raises what `views`
    raises."""
    view: dict[str, Any] = {}
    with ProgressBar(after_s=0, is_shown=is_shown) as progress:
        for view in views(client, job_id, go_on=go_on):
            if is_enough():
                break
            progress(_describe(view), num_done(view), view["num_rows"])
    return view


def views(
    client: DaemonClient, job_id: str, *, go_on: str | None = None
) -> Iterator[dict[str, Any]]:
    """The daemon's views of a job until one in which it has ended or paused.

    That it waits for the switch of offline work is said once, as nothing else may happen for days.
    `go_on` is the command that takes the job up again. Raises DaemonUnavailableError, EngineError
    where no engine is left to run it, StoreFullError where its results cannot be written.
    """
    stalled_since_s: float | None = None
    is_told = False
    while True:
        view = _view_of(client, job_id)
        if view["stage"] == OFFLINE_OFF and not is_told:
            is_told = True
            note(f"{view['id']} {OFFLINE_OFF}")
        yield view
        if is_over(view):
            return
        if view["engine_failure"] is not None:
            raise EngineError(f"no engine is left to run {job_id}: {view['engine_failure']}")
        if view["stalled"] is None:
            stalled_since_s = None
        elif stalled_since_s is None:
            stalled_since_s = time.monotonic()
        elif time.monotonic() - stalled_since_s > STALL_PATIENCE_S:
            then = f"`batchrun {go_on}` goes" if go_on else "the job goes"
            raise StoreFullError(
                f"results cannot be written: {view['stalled']}; then {then} on where it was"
            )
        time.sleep(POLL_INTERVAL_S)


def is_over(view: Mapping[str, Any]) -> bool:
    """Whether a job in this view has ended or paused."""
    state = JobState(view["state"])
    return state.is_terminal or state is JobState.PAUSED


def _view_of(client: DaemonClient, job_id: str) -> dict[str, Any]:
    """Of a daemon that comes to lead in this moment it is waited for."""
    deadline_s = math.inf
    while True:
        try:
            return client.get(f"/jobs/{job_id}")
        except DaemonUnavailableError:
            deadline_s = min(deadline_s, time.monotonic() + SILENCE_PATIENCE_S)
            if time.monotonic() > deadline_s or not client.describe_silence():
                raise
        time.sleep(POLL_INTERVAL_S)


def check_end(view: Mapping[str, Any], *, then: str | None = None, strict: bool = False) -> None:
    """Raises JobFailedError for a job that paused, failed, was cancelled or expired, under `strict`
    RowsFailedError where rows failed; `then` is the command that goes on with a paused one."""
    job_id, state = view["id"], JobState(view["state"])
    if state is JobState.PAUSED:
        raise JobFailedError(
            f"{job_id} paused after {num_done(view):,} of {view['num_rows']:,} rows: "
            f"{str(view['reason']).rstrip('.')}; mend the cause, then "
            f"`batchrun {then or f'resume {job_id}'}` goes on where it was"
        )
    if state is JobState.FAILED and num_done(view) == view["num_rows"]:
        raise RowsFailedError(f"{job_id} failed: {view['reason']}; see `batchrun errors {job_id}`")
    if state is not JobState.COMPLETED:
        raise JobFailedError(f"{job_id} {state}: {view['reason'] or view['output_path']}")
    if view["num_failed"] and strict:
        raise RowsFailedError(
            f"rows failed: {view['num_failed']:,}; see `batchrun errors {job_id}`"
        )


def num_done(view: Mapping[str, Any]) -> int:
    """Rows of a job that have a result, good or bad."""
    return int(view["num_completed"]) + int(view["num_failed"])


def _describe(view: dict[str, Any]) -> str:
    """What holds a job up, or how far behind it is; how fast it goes, the bar says."""
    late = view["deadline_outlook"] if view["is_deadline_kept"] is False else None
    doing = view["stalled"] or view["stage"] or late
    return f"{view['name']}: {doing}" if doing else str(view["name"])
