"""The threshold on offline KV (Echo, section 4.2): room is kept for a burst of online requests."""

from __future__ import annotations

from dataclasses import dataclass

COLD_START_SHARE = 0.15
"""Share of all blocks kept until the forecast has enough data."""


@dataclass(frozen=True, slots=True)
class KvUse:
    """Who holds an engine's blocks, and what a candidate would add; all counts in blocks.

    `wanted_blocks` are free blocks whose content a planned row will hit; the ones that running
    offline rows hold are in `offline_running_blocks` alone. `subtree_blocks` are the blocks that
    the rows to admit need and that neither of the two counts holds.
    """

    total_blocks: int
    online_blocks: int
    offline_running_blocks: int
    wanted_blocks: int
    subtree_blocks: int

    def fits_beside(self, reserved_blocks: int) -> bool:
        """Whether the candidate leaves `reserved_blocks` to online requests, those they hold
        included."""
        offline_blocks = self.offline_running_blocks + self.wanted_blocks + self.subtree_blocks
        return offline_blocks <= self.total_blocks - reserved_blocks


@dataclass(frozen=True, slots=True)
class OnlineReserve:
    """How much of the KV cache offline work leaves alone.

    `share` is a constant share of all blocks (0-1), or None to follow the forecast.
    """

    share: float | None

    def blocks(self, total_blocks: int, online_blocks: int, forecast_blocks: float | None) -> int:
        """Blocks kept for online requests: never less than they hold now.

        `forecast_blocks` is None while there is not enough data for one.
        """
        expected = forecast_blocks
        if self.share is not None:
            expected = self.share * total_blocks
        elif expected is None:
            expected = COLD_START_SHARE * total_blocks
        return min(total_blocks, max(online_blocks, round(expected)))


FORECAST_RESERVE = OnlineReserve(None)
