"""Does a forecast made at the start of a minute cover that minute, and what does it cost?

    python -m benchmarks.forecast [--data FOLDER] [--json FILE]

The KV blocks that online calls want are made from arrivals and lengths (`kv_demand`). FOLDER holds
the public traces; those that are not there are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchrun.estimator.forecast import ForecastRule, KvForecast
from batchrun.simulator.traces.rates import RateSeries, draw_trace
from batchrun.simulator.traces.reading import Drawing, read_trace
from batchrun.simulator.traces.trace import Trace, scale_rate
from benchmarks.records import Bar, Record, finish, parser, shown
from benchmarks.scenarios import KV_PRESSURE_TIDE, draw_calls

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


DATA = Path(__file__).parents[2] / "shared" / "datasets"
AZURE = "azure_llm_2023/AzureLLMInferenceTrace_conv.csv.gz"
MOONCAKE = "mooncake/conversation_trace.jsonl.gz"
SERVEGEN = "servegen/m-small-traces.tar.gz"
DAY_S = 86_400.0
BEST = ForecastRule.MINUTE_MAX
LEAST_COVERAGE, MOST_OF_CONSTANT = 0.95, 1.5


def traces(folder: Path) -> Iterator[tuple[str, Trace]]:
    """The arrivals that are looked at, by name."""
    scenario = KV_PRESSURE_TIDE
    calls = draw_calls(scenario, seed=0)
    columns = [(c.arrival_at_s, c.num_prompt_tokens, c.num_output_tokens) for c in calls]
    yield "kv-pressure-tide", Trace.of(*zip(*columns, strict=True), source=scenario.name)
    for name, path in (("mooncake", folder / MOONCAKE), ("azure", folder / AZURE)):
        if path.is_file():
            trace = read_trace(path)
            yield name, trace
            yield f"{name} / 5", scale_rate(trace, 0.2, seed=0)
    if not (folder / AZURE).is_file():
        return
    azure = read_trace(folder / AZURE)
    day = RateSeries.steady(np.arange(1440) * 60, DAY_S, echo_tide())
    yield "tide", draw_trace([day], seed=0, like=azure, source=azure.source)
    if (folder / SERVEGEN).is_file():
        drawing = Drawing(seed=0, rate=0.002, from_s=DAY_S, to_s=3 * DAY_S, like=azure)
        yield "servegen", read_trace(folder / SERVEGEN, drawing=drawing)


def echo_tide() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Calls per second in each minute of a day, 2 on average, six times as many at the peak as at
    the ebb (Echo, section 2.2)."""
    minutes = np.arange(1440) / 1440
    return np.asarray(2.0 * (1 - 5 / 7 * np.cos(2 * np.pi * minutes)), np.float64)


def measure(name: str, blocks: Ints, rule: ForecastRule) -> Record:
    """How a rule fared on the highest use of each second."""
    # A value holds until the next one, so each second ends with 0.
    samples = [each for s, top in enumerate([*blocks, 0]) for each in ((s, top), (s + 0.9, 0))]
    forecasts, tops = judge(KvForecast(rule=rule), samples)
    covered = float((tops <= forecasts).mean()) if len(tops) else 0.0
    mean_blocks = float(forecasts.mean()) if len(tops) else 0.0
    constant = equal_constant(tops, covered)
    return {
        "trace": name,
        "rule": str(rule),
        "num_minutes": len(tops),
        "covered": covered,
        "mean_forecast_blocks": mean_blocks,
        "constant_blocks": constant,
        "of_constant": mean_blocks / constant if constant else None,
    }


def judge(forecast: KvForecast, samples: Iterable[tuple[float, int]]) -> tuple[Ints, Ints]:
    """Feed samples `(at_s, blocks)`: the forecasts made at the start of whole minutes, and the
    highest use in each of these minutes.

    Minutes count from the first sample's second; the last, unfinished one is not judged.
    """
    minutes: list[tuple[int | None, int]] = []
    held = 0
    first_s: int | None = None
    for at_s, blocks in samples:
        first_s = int(at_s) if first_s is None else first_s
        forecast.sample(at_s, blocks)
        while len(minutes) <= (int(at_s) - first_s) // 60:
            minutes.append((forecast.forecast_blocks, held))
        made, top = minutes[-1]
        minutes[-1] = made, max(top, blocks)
        held = blocks
    judged = [(made, top) for made, top in minutes[:-1] if made is not None]
    forecasts, tops = np.array(judged, dtype=np.int64).reshape(-1, 2).T
    return forecasts, tops


def equal_constant(tops: Ints, covered: float) -> int:
    """The smallest constant reserve that covers the same share of the minutes, in hindsight."""
    num = round(covered * len(tops))
    return int(np.sort(tops)[num - 1]) if num else 0


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """What the best rule has to reach on every trace."""
    for record in records:
        if record["rule"] == BEST:
            name = record["trace"]
            yield Bar(f"{name}: minutes covered", record["covered"], LEAST_COVERAGE)
            reserve, most = record["of_constant"], MOST_OF_CONSTANT
            yield Bar(f"{name}: reserve over the best constant", reserve, most, is_most=True)


def main() -> int:
    """Measure, print, save; 1 when a bar is missed."""
    options = parser(__doc__, data=DATA).parse_args()
    records = shown(
        measure(name, blocks, rule)
        for name, trace in traces(options.data)
        for blocks in [Occupancy().by_second(trace)]
        for rule in ForecastRule
    )
    return finish(options.json, records, bars(records))


if __name__ == "__main__":
    raise SystemExit(main())
