"""The smallest number that holds: doubling, then bisection."""

from __future__ import annotations

from collections.abc import Callable


def smallest(holds: Callable[[int], bool], most: int) -> int | None:
    """A number up to `most` that holds while the one below it does not; None: `most` does not.

    1 needs no number below it. `holds` is asked at most about 2 log2(most) times. Where two
    questions differ so that the second holds wherever the first does, the second's answer is never
    larger: both are asked along one path, until the second holds where the first does not, and
    from there it looks below, the first above.
    """
    low, high = 0, 1
    while not holds(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high
