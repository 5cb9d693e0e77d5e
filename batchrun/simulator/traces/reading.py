"""Read a trace or a series of rates, whatever format it has (`docs/traces.md`), and save one.

Public traces are csv with a line for each call (Azure's, BurstGPT's) or JSON with the hashes of
prompt blocks (Mooncake's). Ours are Parquet with a version, so that a later batchrun can tell them
apart.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import polars as pl
from msgspec import Meta, Struct

from batchrun.errors import DataError
from batchrun.files import write_atomically
from batchrun.simulator.traces.rates import (
    REQUIRED,
    RateSeries,
    draw_trace,
    read_rates_csv,
    read_servegen_csv,
    read_servegen_tar,
)
from batchrun.simulator.traces.tables import Column, CsvText, lines_of, opened
from batchrun.simulator.traces.trace import PrefixBlocks, Trace

EPOCH_NS = 1_577_836_800 * 10**9
"""The beginning of 2020: instants since then are exact to 0.03 us, since 1970 to 0.24 us."""


def _instant(name: str) -> Column:
    """An instant from an ISO 8601 text; one without a zone counts as UTC."""
    text = pl.col(name).str.replace(r"(Z|[+-]00:?00)$", "")
    plain = text.str.replace("T", " ", literal=True)
    instant = plain.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="ns", strict=False)
    return Column(instant, "a time")


def _count(name: str) -> Column:
    number = pl.col(name).cast(pl.Int64, strict=False)
    return Column(pl.when(number >= 0).then(number), "a token count")


AZURE = {
    "TIMESTAMP": _instant("TIMESTAMP"),
    "ContextTokens": _count("ContextTokens"),
    "GeneratedTokens": _count("GeneratedTokens"),
}
"""Azure LLM inference traces of 2023 and 2024: the later ones write a zone behind the time."""
BURSTGPT = {
    "Timestamp": Column.number("Timestamp"),
    "Request tokens": _count("Request tokens"),
    "Response tokens": _count("Response tokens"),
}
"""BurstGPT, all releases; the later ones have columns more, which are ignored."""


def read_calls_csv(path: Path, layout: Mapping[str, Column]) -> Trace:
    """The trace, from columns of time, prompt tokens and output tokens. Raises DataError.

    Calls that failed stand there with 0 tokens; no engine worked on them, so they are left out.
    """
    calls = CsvText.with_header(path).read(layout)
    if not len(calls):
        raise DataError(f"{path}: has no calls")
    time, *lengths = layout
    calls = calls.filter(pl.min_horizontal(lengths) > 0)
    if not len(calls):
        raise DataError(f"{path}: no call in it has prompt and output tokens")
    at_s = calls[time].to_numpy()
    if calls.schema[time] == pl.Datetime:
        at_s = (at_s.astype(np.int64) - EPOCH_NS) / 1e9
    return Trace.of(at_s, *(calls[name] for name in lengths), source=path.name)


BLOCK_TOKENS = 512
"""Tokens in a block of the published traces."""

Tokens = Annotated[int, Meta(ge=1)]
Hash = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Call(Struct):
    """`timestamp` is in milliseconds."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[Hash] | None = None


def read_mooncake(path: Path) -> Trace:
    """The trace; `prefix` where every call has hashes. Raises DataError."""
    decoder = msgspec.json.Decoder(_Call)
    calls: list[_Call] = []
    with opened(path) as file:
        for number, line in lines_of(file, path):
            try:
                calls.append(decoder.decode(line))
            except (msgspec.DecodeError, RecursionError) as error:
                raise DataError(f"{path}: line {number}: not a call: {error}") from error
            hashes = calls[-1].hash_ids or ()
            if len(hashes) > -(-calls[-1].input_length // BLOCK_TOKENS):
                raise DataError(
                    f"{path}: line {number}: {len(hashes)} blocks of {BLOCK_TOKENS} tokens for a "
                    f"prompt of {calls[-1].input_length}"
                )
    if not calls:
        raise DataError(f"{path}: has no calls")
    blocks = [call.hash_ids for call in calls if call.hash_ids is not None]
    return Trace.of(
        [call.timestamp / 1000 for call in calls],
        [call.input_length for call in calls],
        [call.output_length for call in calls],
        prefix=PrefixBlocks.of(blocks, BLOCK_TOKENS) if len(blocks) == len(calls) else None,
        source=path.name,
    )


FORMAT_VERSION = 1
METADATA_KEY = "batchrun.trace"
BLOCKS = "prefix_blocks"
COLUMNS = {
    "arrival_s": pl.Float64(),
    "num_prompt_tokens": pl.Int64(),
    "num_output_tokens": pl.Int64(),
}


def save_trace(trace: Trace, path: Path) -> None:
    """Write the trace; the file is wholly there or not at all. Raises DataError."""
    about: dict[str, object] = {
        "version": FORMAT_VERSION,
        "duration_s": trace.duration_s,
        "source": trace.source,
    }
    frame = pl.DataFrame({name: getattr(trace, name) for name in COLUMNS}, schema=COLUMNS)
    if trace.prefix is not None:
        about["block_tokens"] = trace.prefix.block_tokens
        blocks = [trace.prefix.of_request(index).tolist() for index in range(len(trace))]
        frame = frame.with_columns(pl.Series(BLOCKS, blocks, pl.List(pl.Int64)))
    content = io.BytesIO()
    frame.write_parquet(content, metadata={METADATA_KEY: json.dumps(about)})
    try:
        write_atomically(path, content.getvalue())
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error


def load_parquet(path: Path) -> Trace:
    """A trace that `save_trace` wrote. Raises DataError."""
    try:
        content = path.read_bytes()
        about = _about(path, pl.read_parquet_metadata(io.BytesIO(content)))
        frame = pl.read_parquet(io.BytesIO(content))
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DataError(f"{path}: cannot read the trace: {_first_line(error)}") from error
    for name, kind in COLUMNS.items():
        if frame.schema.get(name) != kind:
            raise DataError(f"{path}: no column {name} of type {kind}")
        if frame[name].null_count():
            raise DataError(f"{path}: column {name} has empty values")
    try:
        return Trace(
            **{name: frame[name].to_numpy(writable=True) for name in COLUMNS},
            duration_s=float(str(about["duration_s"])),
            prefix=_prefix(frame, about),
            source=str(about["source"]),
        )
    except (KeyError, TypeError, ValueError, pl.exceptions.PolarsError) as error:
        raise DataError(f"{path}: not a whole trace of batchrun: {_first_line(error)}") from error
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _about(path: Path, metadata: Mapping[str, str]) -> dict[str, object]:
    if METADATA_KEY not in metadata:
        raise DataError(
            f"{path}: Parquet, but no trace of batchrun; `batchrun trace convert` makes one from "
            "the formats that docs/traces.md names"
        )
    about: dict[str, object] = json.loads(metadata[METADATA_KEY])
    if about.get("version") != FORMAT_VERSION:
        raise DataError(
            f"{path}: a trace of version {about.get('version')}; this batchrun reads version "
            f"{FORMAT_VERSION}"
        )
    return about


def _prefix(frame: pl.DataFrame, about: Mapping[str, object]) -> PrefixBlocks | None:
    if BLOCKS not in frame.columns:
        return None
    blocks = frame[BLOCKS]
    offsets = np.zeros(len(blocks) + 1, np.int64)
    np.cumsum(blocks.list.len(), out=offsets[1:])
    hashes = blocks.explode(empty_as_null=False).cast(pl.Int64).to_numpy()
    return PrefixBlocks(hashes, offsets, int(str(about["block_tokens"])))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


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
        if set(layout) <= set(cells):
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
