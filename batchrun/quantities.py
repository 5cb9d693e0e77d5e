"""Durations, addresses and failure limits as people write them."""

from __future__ import annotations

import math
import re
from contextlib import suppress

from pydantic import BaseModel, ConfigDict, model_validator

_UNIT_S = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[dhms]\s*)+")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")
_ENDLESS_S = 10**300
_AGE = re.compile(r"(\d{1,6})([dh])")


def parse_duration_s(value: object) -> float:
    """Seconds of `"6h"`, `"30m"`, `"1h30m"`, `"2d"` or a number of seconds; more than 0.

    Raises ValueError, which pydantic turns into one line.
    """
    duration_s = _duration_s(value)
    if not 0 < duration_s < math.inf:
        raise ValueError(f"must be longer than 0 and have an end (got {value!r:.100})")
    return duration_s


def parse_optional_duration_s(value: object) -> float | None:
    """As `parse_duration_s`; None stays None."""
    return None if value is None else parse_duration_s(value)


def parse_age_s(value: str) -> float:
    """Seconds of an age such as `"30d"` or `"12h"`. Raises ValueError."""
    match = _AGE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"must be an age such as 30d or 12h (got {value!r})")
    return float(match[1]) * _UNIT_S[match[2]]


def duration(value_s: float) -> str:
    """Days, hours, minutes or seconds, the largest two that matter."""
    if value_s < 60:
        return f"{value_s:.0f} s"
    minutes = round(value_s / 60)
    days, hours, minutes = minutes // 1440, minutes // 60 % 24, minutes % 60
    parts = [f"{days} d"] * (days > 0) + [f"{hours} h"] * (hours > 0)
    if not days and (minutes or not parts):
        parts.append(f"{minutes} min")
    return " ".join(parts)


def share(value: float) -> str:
    """A share in per cent, never rounded up: 98.97 % do not reach 99 %."""
    return f"{math.floor(value * 1000 + 1e-9) / 10:.1f} %"


def seconds(value_s: float) -> str:
    """A latency."""
    return f"{value_s:.3g} s" if value_s >= 1 else f"{1e3 * value_s:.3g} ms"


def count(number: int, noun: str) -> str:
    """`1 engine`, `2 engines`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def in_words(value: float, *, is_share: bool = False) -> str:
    """A figure as it is printed: shares in per cent, large ones without a fraction."""
    if is_share:
        return f"{value:.1%}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.3g}"


def _duration_s(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) < _ENDLESS_S else math.inf
    if isinstance(value, str) and _DURATION.fullmatch(value.strip()):
        parts = _DURATION_PART.findall(value)
        return sum(float(number) * _UNIT_S[unit] for number, unit in parts)
    raise ValueError(f"must be a duration such as 90s, 30m, 6h or 2d (got {value!r:.100})")


class FailureLimit(BaseModel):
    """How many rows of a job may fail before it pauses: a share (0 to 1) or a number of rows."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    share: float | None = None
    num_rows: int | None = None

    def max_failed_rows(self, num_rows: int) -> int:
        """The most failed rows that a job of `num_rows` rows bears without pausing."""
        if self.num_rows is not None:
            return self.num_rows
        return math.floor((self.share or 0.0) * num_rows + 1e-9)

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: object) -> object:
        if isinstance(value, dict | FailureLimit):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return {"num_rows": value}
        share = value if isinstance(value, float) else _percentage(value)
        if share is None or not 0 <= share <= 1:
            raise ValueError(
                f"must be a percentage (5%), a share (0.05) or a number of rows (got {value!r})"
            )
        return {"share": share}


def _percentage(value: object) -> float | None:
    """The share that `"5%"` stands for; None for anything else."""
    if isinstance(value, str) and value.strip().endswith("%"):
        with suppress(ValueError):
            return float(value.strip()[:-1]) / 100
    return None


def checked_age(text: str) -> str:
    """An age as it was written. Raises ValueError where it is none, or 0."""
    if parse_age_s(text) == 0:
        raise ValueError(f"must be longer than 0 (got {text!r})")
    return text


def checked_duration(text: str) -> str:
    """A duration as it was written. Raises ValueError where it is none."""
    parse_duration_s(text)
    return text


def checked_listen(value: object) -> str:
    """HOST:PORT as text. Raises ValueError where it is none."""
    listen = str(value)
    host, _, port = listen.rpartition(":")
    if not port.isdigit() or not 1 <= int(port) <= 65535 or not host:
        raise ValueError(f"must be HOST:PORT, for example 127.0.0.1:8000 (got {listen!r})")
    return listen
