"""What `benchmarks.ablation` runs in each scenario, and what the figures must reach.

Configurations differ in policy, token budget, order of rows, reserve and eviction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import polars as pl

from benchmarks.records import Bar, Record
from benchmarks.scenarios import Order

ONLINE_BUDGETS = (512, 768, 1024, 2048)
GROUPED_BUDGETS = (256, 512, 1024, 2048)
SHUFFLED_BUDGET = 2048
STOCK = "stock"
SHIPPED_EVICTION = "next-use"
EVICTIONS = ("lru", "echo-rc", SHIPPED_EVICTION)
CONSTANT_RESERVES = (0.0, 0.1, 0.2, 0.3, 0.4)
FORECAST = "forecast"
OTHER_RULES = ("mean-sigma", "quantile")
"""Forecast rules beside the shipped one; the first is the paper's."""

UNKNOWN_LENGTHS = {"unknown-lengths": 0.95, "unknown-lengths-documents": 0.97}
"""Scenarios whose rows name no `max_tokens`, with the least share of what exact limits give."""
CONTEXTS = (32_768, 131_072)
MAX_OVERTAKEN_S = 60.0

LADDER = ("bs", "bs+e", "bs+e+s", "echo")
"""The steps of Echo's figure 6."""


@dataclass(frozen=True, slots=True)
class Config:
    """One row of the table.

    `policy` is `stock` (vLLM's own scheduler classes) or one of ours. `order` is how the rows stand
    in the input; None: no offline work. With `is_planned` the pool orders them before they are
    sent; with `is_flex` they are flex calls, of which no hint tells. `reserve` is a share, the
    forecast, or the name of another forecast rule; `online_cost` None: the bounds alone count. With
    a `context` rows name no limit: their answers end by themselves within so many tokens.
    """

    name: str
    policy: str = "echo"
    order: Order | None = Order.SHUFFLED
    budget: int = 2048
    is_online: bool = True
    is_planned: bool = True
    reserve: float | str = FORECAST
    eviction: str = SHIPPED_EVICTION
    online_cost: float | None = None
    context: int | None = None
    is_flex: bool = False


def configs(scenario_name: str) -> list[Config]:
    """Every configuration of a scenario; the two-hour tide is run for its grid alone."""
    if scenario_name == "kv-pressure-tide":
        return grid()
    if scenario_name in UNKNOWN_LENGTHS:
        return [
            Config("echo"),
            Config(f"stock-in-our-order-{SHUFFLED_BUDGET}", STOCK),
            *_unlimited(CONTEXTS),
        ]
    rows = [*_stock(), *_ours(), *_unlimited(CONTEXTS[:1])]
    return [*rows, *grid()] if scenario_name == "kv-pressure" else rows


def grid() -> list[Config]:
    """`echo` with every reserve and every order of eviction, and with other forecast rules."""
    cells = [
        (reserve, eviction) for reserve in (*CONSTANT_RESERVES, FORECAST) for eviction in EVICTIONS
    ]
    cells += [(rule, SHIPPED_EVICTION) for rule in OTHER_RULES]
    return [
        Config(cell_name(reserve, eviction), reserve=reserve, eviction=eviction)
        for reserve, eviction in cells
    ]


def cell_name(reserve: float | str, eviction: str) -> str:
    """The name of one cell of the grid."""
    return f"echo/reserve={reserve}/{eviction}"


def no_limit(policy: str, context: int) -> str:
    """The name of a configuration whose rows name no limit."""
    return f"{policy} no limit, context {context}"


def _stock() -> list[Config]:
    unplanned = [
        *((f"online-only-{budget}", None, budget) for budget in ONLINE_BUDGETS),
        (f"stock-shuffled-{SHUFFLED_BUDGET}", Order.SHUFFLED, SHUFFLED_BUDGET),
        *((f"stock-grouped-{budget}", Order.GROUPED, budget) for budget in GROUPED_BUDGETS),
    ]
    return [
        *(
            Config(name, STOCK, order, budget, is_planned=False)
            for name, order, budget in unplanned
        ),
        *(Config(f"stock-in-our-order-{b}", STOCK, budget=b) for b in GROUPED_BUDGETS),
    ]


def _ours() -> list[Config]:
    """Echo's ladder: first come, first served up to `bs+e`; the KV manager with `echo` alone.

    Unsorted rows come to the engine as they stand in the input.
    """
    return [
        Config("bs", "bs", is_planned=False),
        Config("bs+e", "bs+e", is_planned=False, eviction="lru"),
        Config("bs+e planned", "bs+e", eviction="lru"),
        Config("bs+e+s", "bs+e+s", eviction="lru"),
        Config("echo"),
        Config("echo unsorted", is_planned=False),
        Config("echo unsorted/lru", is_planned=False, eviction="lru"),
        Config("echo offline-only", is_online=False),
        Config("stock offline-only", STOCK, is_online=False),
        Config("echo online-only", order=None),
    ]


def _unlimited(contexts: Sequence[int]) -> list[Config]:
    """Rows that name no limit, as `echo` and stock vLLM in the same order run them."""
    ours = [Config(no_limit("echo", context), context=context) for context in contexts]
    return [*ours, Config(no_limit(STOCK, contexts[0]), STOCK, context=contexts[0])]


Means = Mapping[str, Mapping[str, float]]
"""By configuration, then by figure: the mean over the seeds that have it."""

ATTAINMENTS = ("slo_ttft", "slo_tpot", "slo_deadline")
SERVED = "offline_tokens_per_s"
STRESS_BLOCKS = 2600
LEAST_KEPT = {"a100-8b": 0.99, "shared-prompts-400": 0.99, "shared-prompts-2000": 0.99}
"""Share of the calls that `echo` keeps each promise to, where calls alone are no strain."""
BELOW_ALONE = {"reasoning": 0.01, "heavy-tail-1": 0.0, "heavy-tail-3": 0.0}
"""How much less it may be than the best stock vLLM without offline work; elsewhere 0.02."""
FIGURE_6 = ("echo-sharegpt", "echo-qa-short", "echo-qa-long", "loogle-azure")
"""Scenarios that Echo's figure 6 has, or whose job is of its kind."""
ECHO_HIT_RATE = 0.786
"""Echo, section 1: the prefix hit rate on LooGLE QA_Short."""
LEAST_DOCUMENTS = 4


def means_of(records: Sequence[Record], by: str = "config") -> dict[str, dict[str, float]]:
    """The means over seeds of every numeric figure, by configuration, or by what else differs."""
    frame = pl.DataFrame(records, infer_schema_length=None, strict=False)
    means = frame.group_by(by, maintain_order=True).agg(pl.selectors.numeric().mean())
    return {
        row.pop(by): {key: mean for key, mean in row.items() if mean is not None}
        for row in means.rows(named=True)
    }


def with_costs(records: Sequence[Record]) -> list[Record]:
    """With how many times as long a first token takes beside rows as it does for stock vLLM
    without them, where that was run on the same calls."""
    alone = {
        (record["seed"], record["blocks"]): record
        for record in records
        if record["config"] == f"online-only-{SHUFFLED_BUDGET}"
    }
    found: list[Record] = []
    for record in records:
        than = alone.get((record["seed"], record["blocks"]))
        costs = {
            f"online_cost_{part}": record[key] / than[key]
            for part in ("p50", "p99")
            if than is not None and record[key := f"ttft_{part}_s"] is not None
        }
        found.append({**record, **costs})
    return found


def judge(scenario_name: str, blocks: int, means: Means) -> list[Bar]:
    """The bars of one scenario and KV size, where the rows they need were run."""
    bars = list(_job_ends(means))
    is_stress = scenario_name not in LEAST_KEPT or blocks <= STRESS_BLOCKS
    for name in ("echo", no_limit("echo", CONTEXTS[0])):
        if name in means:
            bars += _slo(name, scenario_name, means, is_stress=is_stress)
            is_judged = scenario_name == "a100-8b" and not is_stress
            bars += _ratios(name, means, blocks, is_judged=is_judged)
            bars += _hit_rate(name, means[name], is_echos=scenario_name == "echo-hit-rate")
    if scenario_name in UNKNOWN_LENGTHS and "echo" in means:
        bars += _unknown_lengths(means, UNKNOWN_LENGTHS[scenario_name])
    if scenario_name in FIGURE_6 and all(name in means for name in LADDER):
        bars += _ladder(means)
    if all(cell.name in means for cell in grid()):
        bars += _grid(means, blocks)
    return bars


def _slo(name: str, scenario_name: str, means: Means, *, is_stress: bool) -> Iterator[Bar]:
    """Under stress, measured against the best stock vLLM without offline work."""
    echo = means[name]
    alone = [means[each] for b in ONLINE_BUDGETS if (each := f"online-only-{b}") in means]
    for key in ATTAINMENTS:
        bound = None if is_stress else LEAST_KEPT.get(scenario_name)
        if scenario_name.startswith("onset") and key != "slo_ttft":
            bound = 0.99
        if bound is None and alone:
            bound = max(row[key] for row in alone) - BELOW_ALONE.get(scenario_name, 0.02)
        yield Bar(f"{name} {key}", echo[key], bound)
    if not is_stress:
        yield Bar(f"{name} ttft_p99_s", echo["ttft_p99_s"], 0.5, is_most=True)
    if alone:
        yield from _beside_alone(name, scenario_name, echo, alone[-1])


def _beside_alone(
    name: str, scenario_name: str, echo: Mapping[str, float], alone: Mapping[str, float]
) -> Iterator[Bar]:
    """What rows may cost calls in time, against stock vLLM's default budget without rows."""
    if scenario_name.startswith("onset"):
        most_s = 1.5 * alone["ttft_max_s"] + 0.1
        yield Bar(f"{name} ttft_max_s", echo["ttft_max_s"], most_s, is_most=True)
    elif scenario_name == "sparse":
        most_s = 1.7 * alone["ttft_p99_s"]
        yield Bar(f"{name} ttft_p99_s", echo["ttft_p99_s"], most_s, is_most=True)
    elif scenario_name == "reasoning":
        yield Bar(f"{name} longest_gap_s", echo["longest_gap_s"], 0.5, is_most=True)
        most = alone["online_preemptions"]
        yield Bar(f"{name} online_preemptions", echo["online_preemptions"], most, is_most=True)


def _job_ends(means: Means) -> Iterator[Bar]:
    """How much sooner `echo` is through with the jobs than the best of each form of stock vLLM."""
    echo_s = means.get("echo", {}).get("job_s")
    for form in ("bs", "stock-shuffled", "stock-grouped", "stock-in-our-order"):
        ends = {
            name: figures["job_s"]
            for name, figures in means.items()
            if "job_s" in figures and (name == form or name.startswith(f"{form}-"))
        }
        if echo_s is not None and ends:
            best = min(ends, key=ends.__getitem__)
            yield Bar(f"job_s of {best} / echo", ends[best] / echo_s)


def _ratios(name: str, means: Means, blocks: int, *, is_judged: bool) -> Iterator[Bar]:
    echo = means[name][SERVED]
    least_shuffled = 9.0 if is_judged and blocks == 8600 else None
    least_grouped = {8600: 1.05, 4300: 1.6}.get(blocks) if is_judged else None
    least_same_order = 0.93 if is_judged else None
    for other in ("bs", f"stock-shuffled-{SHUFFLED_BUDGET}"):
        if other in means:
            yield Bar(f"{name} / {other}", echo / means[other][SERVED], least_shuffled)
    for form, bound in (("stock-grouped", least_grouped), ("stock-in-our-order", least_same_order)):
        rows = [row for b in GROUPED_BUDGETS if (row := f"{form}-{b}") in means]
        if rows:
            best = max(rows, key=lambda row: means[row][SERVED])
            yield Bar(f"{name} / best {form}: {best}", echo / means[best][SERVED], bound)
    unlimited = no_limit(STOCK, CONTEXTS[0])
    if unlimited in means:
        yield Bar(f"{name} / {unlimited}", echo / means[unlimited][SERVED], least_same_order)
    for limit, bound in (("echo offline-only", 0.9), ("stock offline-only", 0.92)):
        if limit in means:
            left = means[limit][SERVED] * (1 - means[name]["online_step_share"])
            title = f"{name} / ({limit} x (1 - online share))"
            yield Bar(title, echo / left, bound if is_judged else None)


def _unknown_lengths(means: Means, least: float) -> Iterator[Bar]:
    for context in CONTEXTS:
        name = no_limit("echo", context)
        if name in means:
            row = means[name]
            yield Bar(f"{name} / exact limits", row[SERVED] / means["echo"][SERVED], least)
            for key in ATTAINMENTS:
                yield Bar(f"{name}: {key}", row[key], means["echo"][key] - 0.005)
            overtaken_s = row["offline_longest_overtaken_s"]
            yield Bar(
                f"{name}: waits while later rows run", overtaken_s, MAX_OVERTAKEN_S, is_most=True
            )


def _hit_rate(name: str, echo: Mapping[str, float], *, is_echos: bool) -> Iterator[Bar]:
    """Echo's own figure on its shape, and the share of what the job allows."""
    optimum = echo.get("prefix_hit_optimum", 0.0)
    if is_echos:
        yield Bar(f"{name} prefix_hit_rate", echo["prefix_hit_rate"], ECHO_HIT_RATE)
    if optimum:
        bound = 0.95 if echo["documents_that_fit"] >= LEAST_DOCUMENTS else None
        yield Bar(f"{name} prefix_hit_rate / optimum", echo["prefix_hit_rate"] / optimum, bound)


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
