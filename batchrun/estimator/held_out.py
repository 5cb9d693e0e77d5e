"""How well a model predicts steps before it learns from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WORST_APE = 2.0
"""A prediction of three times the measured time; larger errors count as this one."""

KIND_WINDOW_STEPS = 64
"""Few, so that what a model got wrong while it was new is soon forgotten in rare kinds too."""


@dataclass(frozen=True, slots=True)
class HeldOutError:
    """Errors over the latest steps, each |predicted - measured| / measured, a share."""

    mape: float
    p95_ape: float
    num_steps: int


class HeldOutErrors:
    """One model's errors: over the latest steps, and over the latest of each kind of step.

    The latter for the choice between models: an hour of decodes says nothing about prefills.
    """

    __slots__ = ("_by_kind", "_latest")

    def __init__(self, num_kinds: int, window_steps: int) -> None:
        """`window_steps` latest steps are kept, and KIND_WINDOW_STEPS of each kind."""
        self._latest = _Window(window_steps)
        self._by_kind = tuple(_Window(KIND_WINDOW_STEPS) for _ in range(num_kinds))

    @property
    def num_steps(self) -> int:
        """Steps among the latest."""
        return len(self._latest.errors)

    @property
    def mape(self) -> float:
        """The mean over the latest steps as they came; 0 before the first. O(1)."""
        return self._latest.total / max(1, len(self._latest.errors))

    def add(self, kind: int, predicted_s: float, measured_s: float) -> None:
        """Count a step predicted before it was measured; `measured_s` is positive. 0.8 us."""
        error = min(abs(predicted_s - measured_s) / measured_s, WORST_APE)
        self._latest.add(error)
        self._by_kind[kind].add(error)

    def balanced_mape(self) -> float:
        """The mean over the latest steps of each kind; 0 before the first step.

        So kinds count alike once KIND_WINDOW_STEPS of each were seen, and less before.
        """
        num_steps = sum(len(window.errors) for window in self._by_kind)
        return sum(window.total for window in self._by_kind) / num_steps if num_steps else 0.0

    def summary(self) -> HeldOutError:
        """Over the latest steps as they came. For reports, not for every step."""
        errors = self._latest.errors
        p95 = float(np.quantile(errors, 0.95)) if errors else 0.0
        return HeldOutError(self.mape, p95, len(errors))


class _Window:
    """The latest errors and their sum."""

    __slots__ = ("_next", "_window_steps", "errors", "total")

    def __init__(self, window_steps: int) -> None:
        self._window_steps = window_steps
        self._next = 0
        self.total = 0.0
        self.errors: list[float] = []

    def add(self, error: float) -> None:
        if len(self.errors) < self._window_steps:
            self.errors.append(error)
            self.total += error
            return
        self.total += error - self.errors[self._next]
        self.errors[self._next] = error
        self._next = (self._next + 1) % self._window_steps
