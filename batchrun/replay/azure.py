"""Arrivals from the Azure LLM inference traces of 2023: real times and lengths, made-up text."""

from __future__ import annotations

import csv
import gzip
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TextIO

from batchrun.errors import DataError
from batchrun.replay.trace import Arrival, make_prompt

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class AzureScale:
    """How the trace is cut and scaled: arrivals in [start_s, start_s + duration_s) of the trace.

    `keep_every` thins it, `tokens` multiplies both lengths (at least 1 token remains).
    """

    start_s: float = 0.0
    duration_s: float = 60.0
    keep_every: int = 1
    tokens: float = 1.0


def load_azure_trace(path: Path, *, seed: int, scale: AzureScale | None = None) -> list[Arrival]:
    """Arrivals of a `.csv` or `.csv.gz` file, timed from the cut's start. Raises DataError."""
    scale = scale or AzureScale()
    rng = random.Random(seed)
    arrivals = []
    end_s = scale.start_s + scale.duration_s
    for at_s, num_prompt_tokens, num_output_tokens in islice(
        _rows(path), 0, None, scale.keep_every
    ):
        if at_s >= end_s:
            break
        if at_s >= scale.start_s:
            prompt = make_prompt(max(1, round(num_prompt_tokens * scale.tokens)), rng=rng)
            max_tokens = max(1, round(num_output_tokens * scale.tokens))
            arrivals.append(Arrival(at_s - scale.start_s, prompt, max_tokens))
    return arrivals


def _rows(path: Path) -> Iterator[tuple[float, int, int]]:
    try:
        with _open(path) as file:
            reader = csv.DictReader(file)
            missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise DataError(f"{path}: line 1: no column {missing[0]}")
            first: datetime | None = None
            for row in reader:
                at, lengths = _values(row, where=f"{path}: line {reader.line_num}")
                first = first or at
                yield (at - first).total_seconds(), *lengths
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise DataError(f"{path}: cannot read the trace: {error}") from error


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _values(row: dict[str, str], *, where: str) -> tuple[datetime, tuple[int, int]]:
    try:
        # Seven digits of a second: one more than datetime reads.
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        return at, (int(row["ContextTokens"]), int(row["GeneratedTokens"]))
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: not a time and two token counts: {error}") from error
