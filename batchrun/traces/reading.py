"""Read a trace or a series of rates, whatever format it has."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from batchrun.errors import DataError
from batchrun.traces.calls_csv import AZURE, BURSTGPT, read_calls_csv
from batchrun.traces.mooncake import read_mooncake
from batchrun.traces.parquet_file import load_parquet
from batchrun.traces.rate_files import (
    REQUIRED,
    read_rates_csv,
    read_servegen_csv,
    read_servegen_tar,
)
from batchrun.traces.rates import RateSeries, draw_trace
from batchrun.traces.tables import opened
from batchrun.traces.trace import Trace

HEAD_BYTES = 4096
PARQUET_MAGIC = b"PAR1"
TAR_MAGIC = slice(257, 262)


class TraceFormat(StrEnum):
    """The formats that are read; `docs/traces.md` has the layout of each."""

    BATCHRUN = "batchrun"
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    MOONCAKE = "mooncake"
    SERVEGEN = "servegen"
    RATES = "rates"

    @property
    def has_rates(self) -> bool:
        """Whether it tells rates, of which calls have to be drawn."""
        return self in {TraceFormat.SERVEGEN, TraceFormat.RATES}


@dataclass(frozen=True, slots=True)
class Drawing:
    """How calls are drawn where a file tells rates only: seconds [from_s, to_s) at `rate` times
    what it says, with lengths of the trace `like` or of the file. Unused for traces of calls."""

    seed: int = 0
    rate: float = 1.0
    from_s: float = 0.0
    to_s: float = float("inf")
    like: Trace | None = None


def detect_format(path: Path) -> TraceFormat:
    """What the file's beginning looks like. Raises DataError."""
    with opened(path) as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(PARQUET_MAGIC):
        return TraceFormat.BATCHRUN
    if head[TAR_MAGIC] == b"ustar":
        return TraceFormat.SERVEGEN
    first = next((line for line in head.splitlines() if line.strip()), b"").strip()
    if first.startswith(b"{"):
        return TraceFormat.MOONCAKE
    cells = [cell.strip() for cell in first.decode(errors="replace").split(",")]
    for layout, kind in ((AZURE, TraceFormat.AZURE), (BURSTGPT, TraceFormat.BURSTGPT)):
        if {layout.time, *layout.lengths} <= set(cells):
            return kind
    if set(REQUIRED) <= set(cells):
        return TraceFormat.RATES
    if len(cells) == 6 and _is_number(cells[0]) and _is_number(cells[1]):
        return TraceFormat.SERVEGEN
    raise DataError(
        f"{path}: line 1: not the beginning of a trace; known are "
        f"{', '.join(TraceFormat)}; docs/traces.md has their layouts"
    )


def read_trace(
    path: Path, kind: TraceFormat | None = None, drawing: Drawing | None = None
) -> Trace:
    """The calls of a file; `kind` None: of the format that it looks like. Raises DataError."""
    kind = kind or detect_format(path)
    if kind.has_rates:
        return _drawn(path, kind, drawing or Drawing())
    if kind is TraceFormat.AZURE:
        return read_calls_csv(path, AZURE)
    if kind is TraceFormat.BURSTGPT:
        return read_calls_csv(path, BURSTGPT)
    return read_mooncake(path) if kind is TraceFormat.MOONCAKE else load_parquet(path)


def read_rates(path: Path, kind: TraceFormat | None = None) -> list[RateSeries]:
    """The rates of a file, a series for each client. Raises DataError for a trace of calls."""
    kind = kind or detect_format(path)
    if not kind.has_rates:
        raise DataError(f"{path}: tells calls, not rates")
    if kind is TraceFormat.RATES:
        return read_rates_csv(path)
    with opened(path) as file:
        is_tar = file.read(TAR_MAGIC.stop)[TAR_MAGIC] == b"ustar"
    return read_servegen_tar(path) if is_tar else read_servegen_csv(path)


def _drawn(path: Path, kind: TraceFormat, drawing: Drawing) -> Trace:
    series = [
        each.between(drawing.from_s, drawing.to_s).scaled(drawing.rate)
        for each in read_rates(path, kind)
    ]
    return draw_trace(series, seed=drawing.seed, like=drawing.like, source=path.name)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
