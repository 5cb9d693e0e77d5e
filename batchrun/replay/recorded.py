"""Arrivals from a recorded trace: real times and lengths, made-up text."""

from __future__ import annotations

import random

from batchrun.replay.trace import Arrival, make_prompt
from batchrun.traces import Trace


def arrivals_of(trace: Trace, *, seed: int) -> list[Arrival]:
    """The calls of a trace; prompts share nothing, whatever its prefix blocks say."""
    rng = random.Random(seed)
    calls = zip(
        trace.arrival_s.tolist(),
        trace.num_prompt_tokens.tolist(),
        trace.num_output_tokens.tolist(),
        strict=True,
    )
    return [
        Arrival(at_s, make_prompt(num_words, rng=rng), max_tokens)
        for at_s, num_words, max_tokens in calls
    ]
