"""Read a trace or a series of rates, whatever format it has (`docs/traces.md`), and save one.

Public traces are csv (Azure's, BurstGPT's) or JSON (Mooncake's), a line for each call; files of
rates are csv, one for each client in ServeGen's tars. Our traces are Parquet with a version.
"""

from __future__ import annotations

import io
import re
import tarfile
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from gzip import GzipFile
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import numpy as np
import polars as pl
from msgspec import Meta, Struct

from batchrun.errors import DataError
from batchrun.files import write_atomically
from batchrun.simulator.traces.rates import CHAT_LENGTHS, GapFamily, RateSeries, draw_trace
from batchrun.simulator.traces.trace import PrefixBlocks, Trace

GZIP_MAGIC = b"\x1f\x8b"
TAR_MAGIC = slice(257, 262)
MAX_TOKENS = 2**31
"""Of a prompt or an answer."""


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked when it is gzip-compressed. What cannot be read is a DataError."""
    try:
        with path.open("rb") as raw:
            is_packed = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            yield GzipFile(fileobj=raw) if is_packed else raw  # type: ignore[misc]  # typeshed
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot read the trace: {reason}") from error


@dataclass(frozen=True, slots=True)
class Column:
    """What is read of a column: `value`, null where its text is not `what` it must be."""

    value: pl.Expr
    what: str

    @classmethod
    def number(
        cls,
        name: str,
        *,
        above: float | None = None,
        most: float | None = None,
        default: float | None = None,
    ) -> Column:
        """A finite number, 0 or more, or more than `above`, at most `most`; `default` where the
        text is empty."""
        text = pl.col(name).str.strip_chars()
        number = text.cast(pl.Float64, strict=False)
        is_right = number.is_finite() & (number >= 0 if above is None else number > above)
        what = "a number, " + ("0 or more" if above is None else f"above {above:g}")
        if most is not None:
            is_right &= number <= most
            what += f" and at most {most:g}"
        value: pl.Expr = pl.when(is_right).then(number)
        if default is not None:
            value = pl.when(text.is_null() | (text == "")).then(default).otherwise(value)
        return cls(value, what)

    @classmethod
    def instant(cls, name: str) -> Column:
        """Seconds since 2020 from an ISO 8601 text; one without a zone counts as UTC.

        Since 2020 they are exact to 0.03 us, since 1970 to 0.24 us.
        """
        text = pl.col(name).str.replace("T", " ", literal=True).str.replace("Z$", "+00")
        zoned = pl.when(text.str.contains(r"[+-]\d\d(:?\d\d)?$")).then(text).otherwise(text + "+00")
        instant = zoned.str.to_datetime("%Y-%m-%d %H:%M:%S%.f%#z", time_unit="ns", strict=False)
        return cls((instant.dt.epoch("ns") - EPOCH_NS) / 1e9, "a time")

    @classmethod
    def count(cls, name: str) -> Column:
        """A whole number, 0 or more."""
        number = pl.col(name).cast(pl.Int64, strict=False)
        return cls(pl.when(number.is_between(0, MAX_TOKENS)).then(number), "a token count")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


EPOCH_NS = 1_577_836_800 * 10**9
"""The beginning of 2020."""
_MORE = "values behind the last column"


@dataclass(frozen=True, slots=True)
class CsvText:
    """Text of a csv file. `names` are its columns; rows begin after its first `num_skipped` lines.

    `path` stands in messages: the file, or a file in an archive.
    """

    path: Path
    content: bytes
    names: Sequence[str]
    num_skipped: int = 0

    @classmethod
    def with_header(cls, path: Path) -> CsvText:
        """The first line that is not blank names the columns. Raises DataError."""
        with opened(path) as file:
            content = file.read().removeprefix(BOM_UTF8)
        lead = len(content) - len(content.lstrip())
        end = content.find(b"\n", lead) + 1 or len(content)
        header = content[lead:end].decode(errors="replace")
        names = [name.strip().strip('"') for name in header.split(",")]
        return cls(path, content, names, content[:lead].count(b"\n") + 1)

    def read(self, columns: Mapping[str, Column]) -> pl.DataFrame:
        """The columns of all rows; blank lines are none. Raises DataError for the first bad one."""
        missing = [name for name in columns if name not in self.names]
        if missing:
            raise DataError(f"{self.path}: line {self.num_skipped}: no column {missing[0]}")
        # Only the first column of a name is read.
        unique = [n if n not in self.names[:i] else f"{i}" for i, n in enumerate(self.names)]
        try:
            texts = pl.scan_csv(
                self.content,
                has_header=False,
                skip_lines=self.num_skipped,
                schema=dict.fromkeys([*unique, _MORE], pl.String),
                missing_columns="insert",
                truncate_ragged_lines=True,
                extra_columns="ignore",
                encoding="utf8-lossy",
                raise_if_empty=False,
            ).collect()
        except pl.exceptions.PolarsError as error:
            raise DataError(f"{self.path}: cannot read the trace: {_first_line(error)}") from error
        is_blank = pl.all_horizontal(pl.col(pl.String).str.strip_chars().fill_null("") == "")
        texts = texts.with_row_index("line", self.num_skipped + 1).filter(~is_blank)
        values = texts.select(**{name: column.value for name, column in columns.items()})
        is_wrong = values.select(pl.any_horizontal(pl.all().is_null())).to_series()
        for row in (is_wrong | texts[_MORE].is_not_null()).arg_true().head(1):
            where = f"{self.path}: line {texts['line'][row]}: "
            if texts[_MORE][row] is not None:
                raise DataError(f"{where}more values than the {len(self.names)} columns")
            name = next(name for name in columns if values[name][row] is None)
            text = texts[name][row] or ""
            raise DataError(f"{where}{name} must be {columns[name].what}, not {text!r:.60}")
        return values


AZURE = {
    "TIMESTAMP": Column.instant("TIMESTAMP"),
    "ContextTokens": Column.count("ContextTokens"),
    "GeneratedTokens": Column.count("GeneratedTokens"),
}
"""Azure LLM inference traces of 2023 and 2024: the later ones write a zone behind the time."""
BURSTGPT = {
    "Timestamp": Column.number("Timestamp"),
    "Request tokens": Column.count("Request tokens"),
    "Response tokens": Column.count("Response tokens"),
}
"""BurstGPT, all releases; the later ones have columns more, which are ignored."""


NO_CALL = "{}: no call in it has prompt and output tokens"


def read_calls_csv(path: Path, layout: Mapping[str, Column]) -> Trace:
    """The trace, from columns of time, prompt tokens and output tokens. Raises DataError.

    Calls that failed stand there with 0 tokens; no engine worked on them, so they are left out.
    """
    calls = CsvText.with_header(path).read(layout)
    if not len(calls):
        raise DataError(f"{path}: has no calls")
    calls = calls.filter(pl.min_horizontal(list(layout)[1:]) > 0)
    if not len(calls):
        raise DataError(NO_CALL.format(path))
    return Trace.of(*calls.get_columns(), source=path.name)


BLOCK_TOKENS = 512
"""Tokens in a block of Mooncake's traces."""


class _Call(Struct):
    """`timestamp` is in milliseconds."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    output_length: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    hash_ids: list[Annotated[int, Meta(ge=0, le=2**63 - 1)]] | None = None


def read_mooncake(path: Path) -> Trace:
    """The trace; `prefix` where every call has hashes. Failed calls are left out as in
    `read_calls_csv`. Raises DataError."""
    decoder = msgspec.json.Decoder(_Call)
    calls: list[_Call] = []
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                calls.append(decoder.decode(line.removeprefix(BOM_UTF8)))
            except (msgspec.DecodeError, RecursionError) as error:
                raise DataError(f"{path}: line {number}: not a call: {error}") from error
    if not calls:
        raise DataError(f"{path}: has no calls")
    calls = [call for call in calls if call.input_length and call.output_length]
    if not calls:
        raise DataError(NO_CALL.format(path))
    blocks = [call.hash_ids for call in calls if call.hash_ids is not None]
    return Trace.of(
        [call.timestamp / 1000 for call in calls],
        [call.input_length for call in calls],
        [call.output_length for call in calls],
        prefix=PrefixBlocks.of(blocks, BLOCK_TOKENS) if len(blocks) == len(calls) else None,
        source=path.name,
    )


RATES = {"time_s": Column.number("time_s"), "rate_per_s": Column.number("rate_per_s")}
"""Our own layout of rates."""
OPTIONAL = {"cv": 1.0, **CHAT_LENGTHS}
"""Columns of our own layout that may be missing or empty, and what is then taken."""

_ABOVE = {"cv": 1e-3, "prompt_sigma": None, "output_sigma": None}
_MOST = {"cv": 100}

_FAMILY = pl.col("family").str.strip_chars().str.to_lowercase()
_RATE = Column.number("rate")
_GAMMA, _WEIBULL = Column.number("shape", above=1e-4), Column.number("shape", above=0.05)
_IS_IDLE = (_RATE.value == 0) | _FAMILY.is_null() | (_FAMILY == "")
_SERVEGEN = {
    "start": Column.number("start"),
    "rate": _RATE,
    "family": Column(
        pl
        .when(_IS_IDLE)
        .then(pl.lit(GapFamily.GAMMA.value))
        .otherwise(pl.when(_FAMILY.is_in(list(GapFamily))).then(_FAMILY)),
        "Gamma or Weibull",
    ),
    "shape": Column(
        pl
        .when(_IS_IDLE)
        .then(1.0)
        .when(_FAMILY.is_in([GapFamily.WEIBULL]))
        .then(_WEIBULL.value)
        .otherwise(_GAMMA.value),
        f"{_GAMMA.what}, for Weibull above 0.05",
    ),
}
"""A window without calls has neither family nor shape; below these shapes almost every gap is 0."""
_SERVEGEN_NAMES = ("start", "rate", "cv", "family", "shape", "scale")

MAX_MEMBERS = 10_000
MAX_MEMBER_BYTES = 16 << 20


def read_rates_csv(path: Path) -> list[RateSeries]:
    """Our own layout: a header with `RATES` and any of `OPTIONAL`. Raises DataError.

    The last window is as long as the one before it.
    """
    text = CsvText.with_header(path)
    known = [*RATES, *OPTIONAL]
    for name in text.names:
        if name not in known or text.names.count(name) > 1:
            raise DataError(
                f"{path}: line {text.num_skipped}: column {name!r}; each of {', '.join(known)} may "
                "stand once"
            )
    given = {
        name: Column.number(name, above=_ABOVE.get(name, 0), most=_MOST.get(name), default=default)
        for name, default in OPTIONAL.items()
        if name in text.names
    }
    usual = {name: pl.lit(value) for name, value in OPTIONAL.items() if name not in given}
    rows = text.read(RATES | given).with_columns(**usual)
    gaps = {"family": pl.lit(GapFamily.GAMMA.value), "shape": 1 / pl.col("cv") ** 2}
    return [_series(path, rows.rename({"time_s": "start_s"}).with_columns(**gaps))]


def read_servegen(path: Path) -> list[RateSeries]:
    """A client of ServeGen (start, rate, cv, family, shape, scale; no header), or all `*-trace.csv`
    of a tar, each a client. Nothing is unpacked to the disk."""
    with opened(path) as file:
        is_tar = file.read(TAR_MAGIC.stop)[TAR_MAGIC] == b"ustar"
    try:
        with opened(path) as file:
            return _clients(path, file) if is_tar else [_client(path, file.read())]
    except tarfile.TarError as error:
        raise DataError(f"{path}: cannot read the tar: {error}") from error


def _clients(path: Path, file: BinaryIO) -> list[RateSeries]:
    series = []
    with tarfile.open(fileobj=file, mode="r|") as archive:
        for number, member in enumerate(archive):
            if number >= MAX_MEMBERS:
                raise DataError(f"{path}: more than {MAX_MEMBERS} files in it")
            if member.isfile() and member.name.endswith("-trace.csv"):
                content = archive.extractfile(member)
                assert content is not None
                if member.size > MAX_MEMBER_BYTES:
                    raise DataError(f"{path}: {member.name} has more than {MAX_MEMBER_BYTES} bytes")
                series.append(_client(path / member.name, content.read()))
    if not series:
        raise DataError(f"{path}: no *-trace.csv in it")
    return series


def _client(path: Path, content: bytes) -> RateSeries:
    windows = CsvText(path, content.removeprefix(BOM_UTF8), _SERVEGEN_NAMES).read(_SERVEGEN)
    usual = {name: pl.lit(value) for name, value in CHAT_LENGTHS.items()}
    names = {"start": "start_s", "rate": "rate_per_s"}
    return _series(path, windows.rename(names).with_columns(**usual))


def _series(path: Path, windows: pl.DataFrame) -> RateSeries:
    if len(windows) < 2:
        raise DataError(f"{path}: at least two windows are needed to know how long one is")
    start_s = windows["start_s"].to_numpy()
    for place in np.flatnonzero(np.diff(start_s) <= 0)[:1]:
        raise DataError(
            f"{path}: the window at {start_s[place + 1]:g} s does not follow the others"
        )
    return RateSeries(windows, float(2 * start_s[-1] - start_s[-2]))


FORMAT_VERSION = 1
METADATA_KEY = "batchrun.trace"
BLOCKS = "prefix_blocks"
COLUMNS = {
    "arrival_s": pl.Float64(),
    "num_prompt_tokens": pl.Int64(),
    "num_output_tokens": pl.Int64(),
}


class _About(Struct, omit_defaults=True):
    """What the metadata of a trace's file say. `block_tokens` where it has prefix blocks."""

    version: int
    duration_s: float
    source: str
    block_tokens: int | None = None


def save_trace(trace: Trace, path: Path) -> None:
    """Write the trace; the file is wholly there or not at all. Raises DataError."""
    about = _About(FORMAT_VERSION, trace.duration_s, trace.source)
    frame = pl.DataFrame({name: getattr(trace, name) for name in COLUMNS}, schema=COLUMNS)
    if trace.prefix is not None:
        about.block_tokens = trace.prefix.block_tokens
        blocks = [trace.prefix.of_request(index).tolist() for index in range(len(trace))]
        frame = frame.with_columns(pl.Series(BLOCKS, blocks, pl.List(pl.Int64)))
    content = io.BytesIO()
    frame.write_parquet(content, metadata={METADATA_KEY: msgspec.json.encode(about).decode()})
    try:
        write_atomically(path, content.getvalue())
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error


def load_parquet(path: Path) -> Trace:
    """A trace that `save_trace` wrote. Raises DataError."""
    try:
        content = io.BytesIO(path.read_bytes())
        metadata = pl.read_parquet_metadata(content)
        if METADATA_KEY not in metadata:
            raise DataError(
                "Parquet, but no trace of batchrun; `batchrun trace convert` makes one from the "
                "formats that docs/traces.md names"
            )
        about = msgspec.json.decode(metadata[METADATA_KEY], type=_About)
        if about.version != FORMAT_VERSION:
            raise DataError(
                f"a trace of version {about.version}; this batchrun reads version {FORMAT_VERSION}"
            )
        frame = pl.read_parquet(content)
        calls = frame.select(list(COLUMNS)).cast(pl.Schema(COLUMNS))
        for name in calls.columns:
            if calls[name].null_count():
                raise DataError(f"column {name} has empty values")
        arrays = {name: calls[name].to_numpy(writable=True) for name in COLUMNS}
        prefix = None
        if about.block_tokens is not None:
            prefix = PrefixBlocks.of(frame[BLOCKS].to_list(), about.block_tokens)
        return Trace(**arrays, duration_s=about.duration_s, prefix=prefix, source=about.source)
    except (OSError, TypeError, ValueError, pl.exceptions.PolarsError) as error:
        raise DataError(f"{path}: cannot read the trace: {_first_line(error)}") from error
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


HEAD_BYTES = 4096
PARQUET_MAGIC = b"PAR1"
_NUMBER = re.compile(r"[-+]?\d*\.?\d+([eE][-+]?\d+)?")


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


_CALLS = {TraceFormat.AZURE: AZURE, TraceFormat.BURSTGPT: BURSTGPT}


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
        head = file.read(HEAD_BYTES).removeprefix(BOM_UTF8)
    if head.startswith(PARQUET_MAGIC):
        return TraceFormat.BATCHRUN
    if head[TAR_MAGIC] == b"ustar":
        return TraceFormat.SERVEGEN
    first = next((line for line in head.splitlines() if line.strip()), b"").strip()
    if first.startswith(b"{"):
        return TraceFormat.MOONCAKE
    cells = [cell.strip().strip('"') for cell in first.decode(errors="replace").split(",")]
    layouts = {**_CALLS, TraceFormat.RATES: RATES}
    for kind, layout in layouts.items():
        if set(layout) <= set(cells):
            return kind
    if len(cells) == len(_SERVEGEN_NAMES) and _NUMBER.fullmatch(cells[0]):
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
        drawing = drawing or Drawing()
        from_s, to_s = drawing.from_s, drawing.to_s
        series = read_rates(path, kind)
        there = [each for each in series if each.end_s > from_s and each.edges_s[0] < to_s]
        parts = [each.between(from_s, to_s).scaled(drawing.rate) for each in there or series]
        return draw_trace(parts, seed=drawing.seed, like=drawing.like, source=path.name)
    if kind in _CALLS:
        return read_calls_csv(path, _CALLS[kind])
    return read_mooncake(path) if kind is TraceFormat.MOONCAKE else load_parquet(path)


def read_rates(path: Path, kind: TraceFormat | None = None) -> list[RateSeries]:
    """The rates of a file, a series for each client; the first begins at 0. Raises DataError for a
    trace of calls."""
    kind = kind or detect_format(path)
    if not kind.has_rates:
        raise DataError(f"{path}: tells calls, not rates")
    series = read_rates_csv(path) if kind is TraceFormat.RATES else read_servegen(path)
    first_s = min(float(each.edges_s[0]) for each in series)
    return [each.between(first_s, float("inf")) for each in series]
