"""The KV blocks that the calls of a trace would hold, without an engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchrun.simulator.traces.trace import Trace

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How long calls hold blocks: no call waits, none shares a block, all run at one pace.

    A call takes the blocks of its prompt when it arrives, reads the prompt at
    `prompt_tokens_per_s`, then makes a token every `tpot_s` and takes another block when the last
    is full; at its end it gives all of them back.
    """

    prompt_tokens_per_s: float = 10_000.0
    tpot_s: float = 0.03
    block_tokens: int = 16

    def by_second(self, trace: Trace) -> Ints:
        """The highest number of blocks held in each second of the trace."""
        times_s, changes = self._changes(trace)
        # Of changes at one instant, blocks are given back first.
        order = np.lexsort((changes, times_s))
        times_s, held = times_s[order], np.cumsum(changes[order])
        num = max(1, int(np.ceil(trace.duration_s)))
        edges = np.searchsorted(times_s, np.arange(num + 1))
        tops = np.concatenate([[0], held])[edges[:-1]]
        is_changed = edges[1:] > edges[:-1]
        if is_changed.any():
            highest = np.maximum.reduceat(held[: edges[-1]], edges[:-1][is_changed])
            tops[is_changed] = np.maximum(tops[is_changed], highest)
        return tops

    def _changes(self, trace: Trace) -> tuple[NDArray[np.float64], Ints]:
        size = self.block_tokens
        prompt_blocks = -(-trace.num_prompt_tokens // size)
        all_blocks = -(-trace.num_tokens // size)
        num_more = all_blocks - prompt_blocks
        decodes_at_s = trace.arrival_s + trace.num_prompt_tokens / self.prompt_tokens_per_s
        ends_at_s = decodes_at_s + trace.num_output_tokens * self.tpot_s
        call = np.repeat(np.arange(len(trace)), num_more)
        nth = np.arange(len(call)) - np.repeat(np.cumsum(num_more) - num_more, num_more)
        full_after = (prompt_blocks[call] + nth) * size - trace.num_prompt_tokens[call]
        times_s = [trace.arrival_s, decodes_at_s[call] + full_after * self.tpot_s, ends_at_s]
        changes = [prompt_blocks, np.ones(len(call), np.int64), -all_blocks]
        return np.concatenate(times_s), np.concatenate(changes)
