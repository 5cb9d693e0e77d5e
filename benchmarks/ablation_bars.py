"""What the figures of `benchmarks.ablation` must reach, and whether they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from benchmarks.ablation_configs import (
    CONSTANT_RESERVES,
    EVICTIONS,
    FORECAST,
    GROUPED_BUDGETS,
    LADDER,
    ONLINE_BUDGETS,
    SHIPPED_EVICTION,
    SHUFFLED_BUDGET,
    cell_name,
    grid,
)
from benchmarks.records import Bar

Means = Mapping[str, Mapping[str, float]]
"""By configuration, then by figure: the mean over the seeds that have it."""

ATTAINMENTS = ("slo_ttft", "slo_tpot", "slo_deadline")
SERVED = "offline_tokens_per_s"
STRESS_BLOCKS = 2600
FIGURE_6 = ("echo-sharegpt", "echo-qa-short", "echo-qa-long", "loogle-azure")
"""Scenarios that Echo's figure 6 has, or whose job is of its kind."""
ECHO_HIT_RATE = 0.786
"""Echo, section 1: the prefix hit rate on LooGLE QA_Short."""
LEAST_DOCUMENTS = 4
DESIGN_TOKENS_PER_S = {
    (8600, "trial-shuffled-2048"): 8_460,
    (8600, "trial-grouped-256"): 61_400,
    (8600, "trial-grouped-512"): 72_800,
    (8600, "trial-grouped-1024"): 75_800,
    (8600, "trial-grouped-2048"): 69_700,
    (4300, "trial-shuffled-2048"): 7_490,
    (4300, "trial-grouped-256"): 46_800,
    (4300, "trial-grouped-512"): 48_600,
    (4300, "trial-grouped-1024"): 43_300,
    (4300, "trial-grouped-2048"): 38_700,
}
"""Design 6.4: stock vLLM in the scenario a100-8b, means of seeds 0 to 2."""


def means_of(records: Sequence[Mapping[str, object]]) -> dict[str, dict[str, float]]:
    """The means over seeds of every numeric figure, by configuration."""
    values: dict[str, dict[str, list[float]]] = {}
    for record in records:
        figures = values.setdefault(str(record["config"]), {})
        for key, value in record.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                figures.setdefault(key, []).append(value)
    return {
        name: {key: fmean(series) for key, series in figures.items()}
        for name, figures in values.items()
    }


def judge(scenario_name: str, law: str, blocks: int, means: Means) -> list[Bar]:
    """The bars of one scenario and KV size, where the rows they need were run."""
    bars: list[Bar] = []
    if scenario_name == "a100-8b":
        bars += _printed(means, blocks)
    if "echo" in means:
        is_stress = scenario_name != "a100-8b" or blocks <= STRESS_BLOCKS
        bars += _stress_promises(means) if is_stress else _promises(means["echo"], law)
        bars += _ratios(means, blocks, is_judged=not is_stress)
        bars += _hit_rate(means["echo"], is_echos=scenario_name == "echo-hit-rate")
    if scenario_name in FIGURE_6 and all(name in means for name in LADDER):
        bars += _ladder(means)
    if all(cell.name in means for cell in grid()):
        bars += _grid(means, blocks)
    return bars


def _printed(means: Means, blocks: int) -> Iterator[Bar]:
    """The rows of the design's trial beside its own figures."""
    for (of_blocks, name), printed in DESIGN_TOKENS_PER_S.items():
        if of_blocks == blocks and name in means:
            yield Bar(f"{name} / the design's", means[name][SERVED] / printed)


def _promises(echo: Mapping[str, float], law: str) -> Iterator[Bar]:
    for key in ATTAINMENTS:
        yield Bar(f"echo {key}", echo[key], 0.99)
    yield Bar("echo ttft_p99_s", echo["ttft_p99_s"], 0.7 if law == "noisy" else 0.5, is_most=True)


def _stress_promises(means: Means) -> Iterator[Bar]:
    """No further than two points below the best row of stock vLLM without offline work."""
    alone = [means[name] for b in ONLINE_BUDGETS if (name := f"online-only-{b}") in means]
    for key in ATTAINMENTS:
        bound = max(row[key] for row in alone) - 0.02 if alone else None
        yield Bar(f"echo {key}", means["echo"][key], bound)


def _ratios(means: Means, blocks: int, *, is_judged: bool) -> Iterator[Bar]:
    echo = means["echo"][SERVED]
    least_shuffled = 9.0 if is_judged and blocks == 8600 else None
    least_grouped = {8600: 1.05, 4300: 1.6}.get(blocks) if is_judged else None
    for name in ("bs", f"stock-shuffled-{SHUFFLED_BUDGET}", f"trial-shuffled-{SHUFFLED_BUDGET}"):
        if name in means:
            yield Bar(f"echo / {name}", echo / means[name][SERVED], least_shuffled)
    bounds = {
        "stock-grouped": least_grouped,
        "trial-grouped": least_grouped,
        "stock-in-our-order": None,
    }
    for form, bound in bounds.items():
        rows = [name for b in GROUPED_BUDGETS if (name := f"{form}-{b}") in means]
        if rows:
            best = max(rows, key=lambda name: means[name][SERVED])
            yield Bar(f"echo / best {form}: {best}", echo / means[best][SERVED], bound)
    alone = means.get("echo offline-only")
    if alone is not None:
        left = alone[SERVED] * (1 - means["echo"]["online_step_share"])
        yield Bar(
            "echo / (offline-only x (1 - online share))", echo / left, 0.9 if is_judged else None
        )


def _hit_rate(echo: Mapping[str, float], *, is_echos: bool) -> Iterator[Bar]:
    """Echo's own figure on its shape, and the share of what the job allows."""
    optimum = echo.get("prefix_hit_optimum", 0.0)
    if is_echos:
        yield Bar("echo prefix_hit_rate", echo["prefix_hit_rate"], ECHO_HIT_RATE)
    if optimum:
        bound = 0.95 if echo["documents_that_fit"] >= LEAST_DOCUMENTS else None
        yield Bar("echo prefix_hit_rate / optimum", echo["prefix_hit_rate"] / optimum, bound)


def _ladder(means: Means) -> Iterator[Bar]:
    """The order of Echo's figure 6: the estimator costs a little, the other two parts gain."""
    for number, (before, after) in enumerate(pairwise(LADDER)):
        ratio = means[after][SERVED] / means[before][SERVED]
        yield Bar(f"{after} / {before}", ratio, 1.0, is_most=number == 0)


def _grid(means: Means, blocks: int) -> Iterator[Bar]:
    def served(reserve: float | str, eviction: str) -> float:
        return means[cell_name(reserve, eviction)][SERVED]

    forecast = served(FORECAST, SHIPPED_EVICTION)
    best = max(served(reserve, SHIPPED_EVICTION) for reserve in CONSTANT_RESERVES)
    yield Bar("forecast / best constant reserve", forecast / best, 0.97)
    none = served(CONSTANT_RESERVES[0], SHIPPED_EVICTION)
    yield Bar("forecast / no reserve", forecast / none, 1.4 if blocks == 3200 else None)
    for other in EVICTIONS[:-1]:
        gains = [
            served(reserve, SHIPPED_EVICTION) / served(reserve, other)
            for reserve in (*CONSTANT_RESERVES, FORECAST)
        ]
        is_lru = other == EVICTIONS[0]
        yield Bar(f"{SHIPPED_EVICTION} / {other}, least", min(gains), 0.98 if is_lru else None)
        yield Bar(f"{SHIPPED_EVICTION} / {other}, most", max(gains), 1.1 if is_lru else None)
