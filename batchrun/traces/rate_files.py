"""Files of rates: ServeGen's, one csv for each client and tars of them, and our own csv."""

from __future__ import annotations

import csv
import io
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from batchrun.errors import DataError
from batchrun.traces.rates import CallLengths, GapFamily, LogNormalTokens, RateSeries
from batchrun.traces.tables import lines_of, opened

REQUIRED = ("time_s", "rate_per_s")
OPTIONAL = (
    "cv",
    "prompt_median_tokens",
    "prompt_sigma",
    "output_median_tokens",
    "output_sigma",
)
MAX_MEMBERS = 10_000
MAX_MEMBER_BYTES = 16 << 20
_Row = tuple[float, float, float, GapFamily, CallLengths]
"""Start in seconds, rate per second, shape of the gaps, their family, lengths."""


def read_rates_csv(path: Path) -> list[RateSeries]:
    """Our own layout: a header with `REQUIRED` and any of `OPTIONAL`. Raises DataError.

    The last window is as long as the one before it.
    """
    with opened(path) as file:
        lines = lines_of(file, path)
        _, header = next(lines, (1, b""))
        columns = [name.strip() for name in header.decode(errors="replace").split(",")]
        _check_columns(path, columns)

        def read(values: Sequence[str]) -> _Row:
            return _own_row(dict(zip(columns, values, strict=True)))

        return [_series(path.name, list(_rows(path.name, lines, len(columns), read)))]


def read_servegen_csv(path: Path) -> list[RateSeries]:
    """One client of ServeGen: start, rate, cv, family, shape, scale, no header."""
    with opened(path) as file:
        return [_client(path.name, file, path)]


def read_servegen_tar(path: Path) -> list[RateSeries]:
    """All `*-trace.csv` of a tar, each a client. Nothing is unpacked to the disk."""
    series = []
    try:
        with opened(path) as file, tarfile.open(fileobj=file, mode="r|") as archive:
            for number, member in enumerate(archive):
                if number >= MAX_MEMBERS:
                    raise DataError(f"{path}: more than {MAX_MEMBERS} files in it")
                if member.isfile() and member.name.endswith("-trace.csv"):
                    content = archive.extractfile(member)
                    assert content is not None
                    text = content.read(MAX_MEMBER_BYTES + 1)
                    if len(text) > MAX_MEMBER_BYTES:
                        raise DataError(
                            f"{path}: {member.name} has more than {MAX_MEMBER_BYTES} bytes"
                        )
                    series.append(_client(member.name, io.BytesIO(text), path / member.name))
    except tarfile.TarError as error:
        raise DataError(f"{path}: cannot read the tar: {error}") from error
    if not series:
        raise DataError(f"{path}: no *-trace.csv in it")
    return series


def _client(name: str, file: BinaryIO, path: Path) -> RateSeries:
    return _series(name, list(_rows(name, lines_of(file, path), 6, _servegen_row)))


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    for name in REQUIRED:
        if name not in columns:
            raise DataError(f"{path}: line 1: no column {name}")
    for name in columns:
        if name not in REQUIRED + OPTIONAL or columns.count(name) > 1:
            known = ", ".join(REQUIRED + OPTIONAL)
            raise DataError(f"{path}: line 1: column {name!r}; each of {known} may stand once")


def _rows(
    name: str,
    lines: Iterator[tuple[int, bytes]],
    num_columns: int,
    read: Callable[[Sequence[str]], _Row],
) -> Iterator[_Row]:
    for number, line in lines:
        (values,) = csv.reader([line.decode(errors="replace")])
        if len(values) != num_columns:
            raise DataError(
                f"{name}: line {number}: {len(values)} values where {num_columns} belong"
            )
        try:
            yield read([value.strip() for value in values])
        except ValueError as error:
            raise DataError(f"{name}: line {number}: {error}") from error


def _number(text: str, what: str, *, least: float = 0.0, above: float | None = None) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not (least <= value < float("inf")) or (above is not None and value <= above):
        bound = f"{least:g} or more" if above is None else f"above {above:g}"
        raise ValueError(f"{what} must be a number, {bound}, not {text!r:.40}")
    return value


def _own_row(values: dict[str, str]) -> _Row:
    chat = CallLengths()
    cv = _number(values.get("cv") or "1", "cv", above=0)

    def lengths(kind: str, usual: LogNormalTokens) -> LogNormalTokens:
        median = values.get(f"{kind}_median_tokens") or str(usual.median)
        sigma = values.get(f"{kind}_sigma") or str(usual.sigma)
        return LogNormalTokens(
            _number(median, f"{kind}_median_tokens", above=0), _number(sigma, f"{kind}_sigma")
        )

    return (
        _number(values["time_s"], "time_s"),
        _number(values["rate_per_s"], "rate_per_s"),
        1 / cv**2,
        GapFamily.GAMMA,
        CallLengths(lengths("prompt", chat.prompt), lengths("output", chat.output)),
    )


def _servegen_row(values: Sequence[str]) -> _Row:
    start, rate, _, family, shape, _ = values
    rate_per_s = _number(rate, "the rate")
    if not rate_per_s or not family:
        return _number(start, "the start"), rate_per_s, 1.0, GapFamily.GAMMA, CallLengths()
    if family.lower() not in list(GapFamily):
        raise ValueError(f"the family must be Gamma or Weibull, not {family!r:.40}")
    return (
        _number(start, "the start"),
        rate_per_s,
        _number(shape, "the shape", above=0),
        GapFamily(family.lower()),
        CallLengths(),
    )


def _series(name: str, rows: Sequence[_Row]) -> RateSeries:
    if len(rows) < 2:
        raise DataError(f"{name}: at least two windows are needed to know how long one is")
    starts, rates, shapes, families, lengths = zip(*rows, strict=True)
    start_s = np.array(starts)
    for place in np.flatnonzero(np.diff(start_s) <= 0)[:1]:
        raise DataError(f"{name}: the window at {starts[place + 1]:g} s does not follow the others")
    end_s = float(2 * start_s[-1] - start_s[-2])
    return RateSeries(start_s, end_s, np.array(rates), np.array(shapes), families, lengths)
