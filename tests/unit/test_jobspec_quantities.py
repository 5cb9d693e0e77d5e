"""Durations and failure limits."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from batchrun.quantities import FailureLimit, parse_duration_s


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("90s", 90), ("30m", 1800), ("6h", 21_600), ("2d", 172_800), ("1h30m", 5400), (45, 45)],
)
def test_a_duration_is_read_in_seconds(text: object, duration_s: float) -> None:
    assert parse_duration_s(text) == duration_s


ENDLESS = [10**400, float("inf"), float("nan"), "9" * 400 + "d", f"{'9' * 308}s{'9' * 308}s"]


@pytest.mark.parametrize(
    "text", ["", "6", "six hours", "6w", "-1h", 0, -5, True, None, "0s", *ENDLESS]
)
def test_what_is_no_duration_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_duration_s(text)


@pytest.mark.parametrize(
    ("written", "num_rows", "allowed"),
    [("5%", 100, 5), ("5%", 10, 0), (0.5, 7, 3), (3, 1_000_000, 3), (0, 10, 0), ("100%", 4, 4)],
)
def test_a_failure_limit_counts_rows(written: object, num_rows: int, allowed: int) -> None:
    assert FailureLimit.model_validate(written).max_failed_rows(num_rows) == allowed


@pytest.mark.parametrize("written", ["101%", "x%", 1.5, -0.1, -3, True, "many", [1]])
def test_what_is_no_failure_limit_is_refused(written: object) -> None:
    with pytest.raises(ValidationError, match="must be a percentage"):
        FailureLimit.model_validate(written)


def test_a_failure_limit_survives_json() -> None:
    for written in ("5%", 0.05, 12):
        limit = FailureLimit.model_validate(written)
        assert FailureLimit.model_validate_json(limit.model_dump_json()) == limit
