"""Durations as people write them: in a job file, in batchrun.yaml, on the command line."""

from __future__ import annotations

import math
import re

_UNIT_S = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[dhms]\s*)+")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")
_SHOWN_CHARS = 100
_SHOWN_BITS = 300
_AGE = re.compile(r"(\d{1,6})([dh])")


def parse_duration_s(value: object) -> float:
    """Seconds of `"6h"`, `"30m"`, `"1h30m"`, `"2d"` or a number of seconds; more than 0.

    Raises ValueError, which pydantic turns into one line.
    """
    try:
        duration_s = _duration_s(value)
    except OverflowError:
        duration_s = math.inf
    if not 0 < duration_s < math.inf:
        problem = "shorter" if duration_s == math.inf else "longer than 0"
        raise ValueError(f"must be {problem} (got {_shown(value)})")
    return duration_s


def parse_age_s(value: str) -> float:
    """Seconds of an age such as `"30d"` or `"12h"`. Raises ValueError."""
    match = _AGE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"must be an age such as 30d or 12h (got {value!r})")
    return float(match[1]) * _UNIT_S[match[2]]


def _duration_s(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and _DURATION.fullmatch(value.strip()):
        parts = _DURATION_PART.findall(value)
        return math.fsum(float(number) * _UNIT_S[unit] for number, unit in parts)
    raise ValueError(f"must be a duration such as 90s, 30m, 6h or 2d (got {_shown(value)})")


def _shown(value: object) -> str:
    """The value for a message, cut where it is endless: a number of 5,000 digits has no text."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return "a number of many digits"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
