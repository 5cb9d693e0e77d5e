"""Failure limits as people write them in a job file."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, model_validator


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
        if isinstance(value, str) and value.strip().endswith("%"):
            return {"share": _checked_share(_number(value.strip()[:-1], value) / 100, value)}
        if isinstance(value, float):
            return {"share": _checked_share(value, value)}
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return {"num_rows": value}
        raise ValueError(_failure_limit_message(value))


def _number(text: str, value: object) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(_failure_limit_message(value)) from None


def _checked_share(share: float, value: object) -> float:
    if not 0 <= share <= 1:
        raise ValueError(_failure_limit_message(value))
    return share


def _failure_limit_message(value: object) -> str:
    return f"must be a percentage (5%), a share (0.05) or a number of rows (got {value!r})"
