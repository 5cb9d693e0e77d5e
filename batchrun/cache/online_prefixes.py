"""Prefixes that online requests hit again and again, such as a system prompt: they have a floor.

In Echo's order one offline row to come outranks the blocks of finished online requests, the system
prompt of every later online request among them; losing that costs online TTFT.
"""

from __future__ import annotations

from collections.abc import Iterable

FLOOR_S = 120.0
MAX_FLOOR_BLOCKS = 256


class OnlinePrefixes:
    """Block keys that at least two online requests hit, each within `floor_s` of the last.

    At most `max_blocks` of them, the latest hit ones. A hit covers a whole prefix, so the set is
    closed under prefixes at any time.
    """

    __slots__ = ("_floor_s", "_max_blocks", "_seen_s", "floored")

    def __init__(self, floor_s: float = FLOOR_S, max_blocks: int = MAX_FLOOR_BLOCKS) -> None:
        self._floor_s = floor_s
        self._max_blocks = max_blocks
        self._seen_s: dict[bytes, float] = {}
        self.floored: dict[bytes, float] = {}

    def hit(self, keys: Iterable[bytes], now_s: float) -> list[bytes]:
        """An online request hit this whole prefix, keys from its start, at `now_s` (never falls).

        Returns the keys that lost their floor for it. Cost: dictionary work per block hit, bounded
        by `max_blocks`.
        """
        prefix = [key for key, _ in zip(keys, range(self._max_blocks), strict=False)]
        for key in reversed(prefix):
            seen_s = self._seen_s.pop(key, None)
            last_s = self.floored.pop(key, seen_s)
            is_again = last_s is not None and last_s + self._floor_s > now_s
            (self.floored if is_again else self._seen_s)[key] = now_s
        _drop_first(self._seen_s, len(self._seen_s) - self._max_blocks)
        return _drop_first(self.floored, len(self.floored) - self._max_blocks)

    def expire(self, now_s: float) -> list[bytes]:
        """End the floor of prefixes not hit for `floor_s`; returns their keys, deepest first."""
        _drop_first(self._seen_s, self._num_older(self._seen_s, now_s))
        return _drop_first(self.floored, self._num_older(self.floored, now_s))

    def _num_older(self, hits: dict[bytes, float], now_s: float) -> int:
        num = 0
        for hit_s in hits.values():
            if hit_s + self._floor_s > now_s:
                break
            num += 1
        return num


def _drop_first(hits: dict[bytes, float], num: int) -> list[bytes]:
    dropped = [key for key, _ in zip(hits, range(num), strict=False)]
    for key in dropped:
        del hits[key]
    return dropped
