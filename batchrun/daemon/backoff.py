"""How long to wait before a row is tried again."""

from __future__ import annotations

import random

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 60.0


def retry_delay_s(attempt: int, retry_after_s: float | None, rng: random.Random) -> float:
    """Exponential with full jitter on the upper half; never less than the engine asked for.

    `attempt` is the attempt that just failed, starting at 1.
    """
    ceiling_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (attempt - 1))
    delay_s = rng.uniform(ceiling_s / 2, ceiling_s)
    return max(delay_s, min(retry_after_s or 0.0, LONGEST_DELAY_S))
