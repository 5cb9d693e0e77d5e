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
from benchmarks.records import Bar, cell, finish, markdown, parser
from benchmarks.scenarios import draw_calls, kv_pressure_tide

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

Record = dict[str, object]


def traces(folder: Path) -> Iterator[tuple[str, Trace]]:
    """The arrivals that are looked at, by name."""
    scenario = kv_pressure_tide()
    calls = draw_calls(scenario, seed=0)
    at_s, prompts, outputs = zip(
        *((c.arrival_at_s, c.num_prompt_tokens, c.num_output_tokens) for c in calls), strict=True
    )
    yield "kv-pressure-tide", Trace.of(at_s, prompts, outputs, source=scenario.name)
    if (folder / MOONCAKE).is_file():
        mooncake = read_trace(folder / MOONCAKE)
        yield "mooncake", mooncake
        yield "mooncake / 5", scale_rate(mooncake, 0.2, seed=0)
    if not (folder / AZURE).is_file():
        return
    azure = read_trace(folder / AZURE)
    yield "azure", azure
    yield "azure / 5", scale_rate(azure, 0.2, seed=0)
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
    coverage = judge(KvForecast(rule=rule), samples)
    constant = equal_constant(coverage.tops, coverage.covered)
    return {
        "trace": name,
        "rule": str(rule),
        "num_minutes": coverage.num_minutes,
        "covered": coverage.covered,
        "mean_forecast_blocks": coverage.mean_forecast_blocks,
        "constant_blocks": constant,
        "of_constant": coverage.mean_forecast_blocks / constant if constant else None,
    }


@dataclass(frozen=True, slots=True)
class Coverage:
    """The forecasts made at the start of whole minutes, and the highest use in each minute."""

    forecasts: Ints
    tops: Ints

    @property
    def num_minutes(self) -> int:
        """Minutes with a forecast."""
        return len(self.tops)

    @property
    def covered(self) -> float:
        """Share of minutes whose highest use stayed within the forecast."""
        return float((self.tops <= self.forecasts).mean()) if len(self.tops) else 0.0

    @property
    def mean_forecast_blocks(self) -> float:
        """What that cost."""
        return float(self.forecasts.mean()) if len(self.tops) else 0.0


def judge(forecast: KvForecast, samples: Iterable[tuple[float, int]]) -> Coverage:
    """Feed samples `(at_s, blocks)`, and hold each forecast against the minute after it.

    Minutes count from the first sample's second; the last, unfinished one is not judged.
    """
    forecasts: list[int | None] = []
    tops: list[int] = []
    held = 0
    first_s: int | None = None
    for at_s, blocks in samples:
        first_s = int(at_s) if first_s is None else first_s
        forecast.sample(at_s, blocks)
        while len(tops) <= (int(at_s) - first_s) // 60:
            forecasts.append(forecast.forecast_blocks)
            tops.append(held)
        tops[-1] = max(tops[-1], blocks)
        held = blocks
    pairs = zip(forecasts[:-1], tops[:-1], strict=True)
    judged = [(made, top) for made, top in pairs if made is not None]
    return Coverage(*np.array(judged, dtype=np.int64).reshape(-1, 2).T)


def equal_constant(tops: Ints, covered: float) -> int:
    """The smallest constant reserve that covers the same share of the minutes, in hindsight."""
    num = round(covered * len(tops))
    return int(np.sort(tops)[num - 1]) if num else 0


def table(records: Sequence[Record]) -> str:
    """A row for each trace, a column for each rule: minutes covered, and reserve by constant."""
    rules = list(dict.fromkeys(str(record["rule"]) for record in records))
    rows: dict[str, list[object]] = {}
    for record in records:
        row = rows.setdefault(str(record["trace"]), [str(record["trace"]), record["num_minutes"]])
        row.append(f"{record['covered']:.1%}, {cell(record['of_constant'])}")
    return markdown(["Trace", "Minutes", *rules], rows.values())


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """What the best rule has to reach on every trace."""
    for record in records:
        if record["rule"] == BEST:
            name = record["trace"]
            yield Bar(f"{name}: minutes covered", float(str(record["covered"])), LEAST_COVERAGE)
            yield Bar(
                f"{name}: reserve over the best constant",
                float(str(record["of_constant"])),
                MOST_OF_CONSTANT,
                is_most=True,
            )


def main() -> int:
    """Measure, print, save; 1 when a bar is missed."""
    made = parser(__doc__)
    made.add_argument("--data", type=Path, default=DATA, metavar="FOLDER")
    made.add_argument("--tpot-s", type=float, default=Occupancy().tpot_s)
    options = made.parse_args()
    occupancy = Occupancy(tpot_s=options.tpot_s)
    records = [
        measure(name, blocks, rule)
        for name, trace in traces(options.data)
        for blocks in [occupancy.by_second(trace)]
        for rule in ForecastRule
    ]
    print(table(records))
    return finish(options.json, records, bars(records))


if __name__ == "__main__":
    raise SystemExit(main())
