"""A pace that changes over a day and repeats, and how far one gets at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Pace:
    """Tokens done by each of `at_s`, which run from 0 to the length of the day; linear between.

    After the day it begins anew.
    """

    at_s: Floats
    done_tokens: Floats

    @classmethod
    def through(
        cls, middles_s: Sequence[float], tokens_per_s: Sequence[float], day_s: float
    ) -> Pace:
        """Straight lines through the rates at the middles of windows, the last joined to the first.

        `middles_s` rise within [0, `day_s`].
        """
        at_s = np.linspace(0.0, day_s, 1_441)
        rates = np.interp(at_s, middles_s, tokens_per_s, period=day_s)
        steps = (rates[1:] + rates[:-1]) / 2 * np.diff(at_s)
        return cls(at_s, np.concatenate([[0.0], np.cumsum(steps)]))

    @property
    def day_s(self) -> float:
        """The length of the day."""
        return float(self.at_s[-1])

    @property
    def tokens_per_s(self) -> float:
        """On average over the day."""
        return float(self.done_tokens[-1]) / self.day_s

    def done_by(self, at_s: float) -> float:
        """Tokens done in [0, `at_s`)."""
        days, rest_s = divmod(at_s, self.day_s)
        return days * float(self.done_tokens[-1]) + float(
            np.interp(rest_s, self.at_s, self.done_tokens)
        )

    def reached_at_s(self, from_s: float, tokens: float) -> float:
        """When so many tokens are done that begin at `from_s`; infinity where none ever are."""
        whole = float(self.done_tokens[-1])
        if whole <= 0:
            return np.inf if tokens > 0 else from_s
        days, rest = divmod(self.done_by(from_s) + tokens, whole)
        return days * self.day_s + float(np.interp(rest, self.done_tokens, self.at_s))
