"""What vLLM's API server needs for one request, from the processor time of lone calls."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import psutil

from batchrun.samples.generators import TextSource
from batchrun.simulator.cluster import FrontEndTimes
from batchrun.simulator.replay import Arrival, ReplayTarget, replay

NUM_CALLS = 40
TOKENS_SHORT, TOKENS_LONG = 20, 3_000
SPACING_S = 0.2

CountTokens = Callable[[str], int]


async def measure_front_end(
    target: ReplayTarget, server: psutil.Process, count_tokens: CountTokens
) -> FrontEndTimes:
    """A line through short and long calls, each sent alone and answered with one token.

    The prompts of a length are one text, so that the engine finds the KV of all but the first call.
    """
    idle_s = await _cpu_s(target, server, [])
    costs_s, lengths = [], []
    source = TextSource(1)
    for num_tokens in (TOKENS_SHORT, TOKENS_LONG):
        prompt = " ".join(source.sentences(Random(num_tokens), num_tokens))
        await replay([Arrival(0.0, prompt, 1)], target)
        calls = [Arrival(SPACING_S * i, prompt, 1) for i in range(NUM_CALLS)]
        costs_s.append((await _cpu_s(target, server, calls) - idle_s) / NUM_CALLS)
        lengths.append(count_tokens(prompt))
    token_s = max(0.0, (costs_s[1] - costs_s[0]) / (lengths[1] - lengths[0]))
    return FrontEndTimes(max(0.0, costs_s[0] - token_s * lengths[0]), token_s)


async def _cpu_s(target: ReplayTarget, server: psutil.Process, calls: list[Arrival]) -> float:
    """Processor time of the server in the time of all calls; without calls: of as long a wait."""
    before_s = _spent_s(server)
    await replay([*calls, Arrival(SPACING_S * NUM_CALLS, "end", 1)], target)
    return _spent_s(server) - before_s


def _spent_s(server: psutil.Process) -> float:
    times = server.cpu_times()
    return times.user + times.system
