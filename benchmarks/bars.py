"""A measured figure and what it must reach."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure and its bound: at least, or with `is_most` at most. Without a bound: to read."""

    name: str
    value: float
    bound: float | None = None
    is_most: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the figure keeps its bound."""
        if self.bound is None:
            return True
        return self.value <= self.bound if self.is_most else self.value >= self.bound

    def __str__(self) -> str:
        text = f"{self.name}: {self.value:.3f}"
        if self.bound is None:
            return text
        sign = "<=" if self.is_most else ">="
        return f"{text} ({sign} {self.bound:g}) {'met' if self.is_met else 'MISSED'}"
