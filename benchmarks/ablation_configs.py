"""What `benchmarks.ablation` runs: scenarios, step laws, configurations, and one measurement."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from batchrun.vllm_plugin.virtual import (
    DAEMON_WINDOW,
    A100Law,
    EngineShape,
    JobFeeder,
    NoisyLaw,
    OnlineSource,
    Order,
    PoolingLaw,
    Run,
    Scenario,
    StepLaw,
    Timing,
    TrafficSource,
    WarmUp,
    a100_8b,
    draw_calls,
    draw_job,
    kv_pressure,
    kv_pressure_tide,
    observe,
    planned_order,
    run,
    stock_scheduler,
)
from benchmarks.stock_baseline import GROUPED_BUDGETS, ONLINE_BUDGETS, SHUFFLED_BUDGET, Record

SCENARIOS: dict[str, tuple[Callable[[], Scenario], tuple[int, ...]]] = {
    "a100-8b": (a100_8b, (8600, 4300)),
    "a100-8b-stress": (lambda: a100_8b(burst_factor=6.0), (8600, 4300, 2600)),
    "kv-pressure": (kv_pressure, (4300, 3200)),
    "kv-pressure-tide": (kv_pressure_tide, (4300, 3200)),
}
"""By name: what happens, and the KV sizes in blocks that it is run with."""

LAWS: dict[str, Callable[[int], StepLaw]] = {
    "a100": lambda seed: A100Law(),
    "pooling": lambda seed: PoolingLaw(),
    "noisy": lambda seed: NoisyLaw(A100Law(), random.Random(seed)),
}

STOCK = "stock"
SHIPPED_EVICTION = "next-use"
EVICTIONS = ("lru", "echo-rc", SHIPPED_EVICTION)
CONSTANT_RESERVES = (0.0, 0.1, 0.2, 0.3, 0.4)
FORECAST = "forecast"

WARM_UP_S = 1200.0
SEED_OFFSET = 1_000
"""The noise of the warm-up is not that of the run."""


@dataclass(frozen=True, slots=True)
class Config:
    """One row of the table.

    `policy` is `stock` (vLLM's own scheduler classes) or one of ours. `order` is how the rows
    stand in the input; None: no offline work. With `is_planned` the pool orders them before they
    are sent, through the daemon's window: stock vLLM does with it what it does with all rows there
    at once, to the last figure. `is_trial` is the form behind the design's printed figures: one
    step in flight, no planning time, all rows at once under ids that sort as text.
    """

    name: str
    policy: str = "echo"
    order: Order | None = Order.SHUFFLED
    budget: int = 2048
    is_online: bool = True
    is_planned: bool = True
    is_trial: bool = False
    reserve: float | str = FORECAST
    eviction: str = SHIPPED_EVICTION


def configs(scenario_name: str) -> list[Config]:
    """Every configuration of a scenario; the two-hour tide is run for its grid alone."""
    if scenario_name == "kv-pressure-tide":
        return grid()
    rows = [*_stock(), *_ours()]
    return [*rows, *grid()] if scenario_name == "kv-pressure" else rows


def grid() -> list[Config]:
    """`echo` with every reserve and every order of eviction."""
    return [
        Config(cell_name(reserve, eviction), reserve=reserve, eviction=eviction)
        for reserve in (*CONSTANT_RESERVES, FORECAST)
        for eviction in EVICTIONS
    ]


def cell_name(reserve: float | str, eviction: str) -> str:
    """The name of one cell of the grid."""
    return f"echo/reserve={reserve}/{eviction}"


def _stock() -> list[Config]:
    rows = [
        Config(f"online-only-{budget}", STOCK, None, budget, is_planned=False)
        for budget in ONLINE_BUDGETS
    ]
    loads = [(Order.SHUFFLED, SHUFFLED_BUDGET), *((Order.GROUPED, b) for b in GROUPED_BUDGETS)]
    for form in (STOCK, "trial"):
        rows += [
            Config(
                f"{form}-{order}-{budget}",
                STOCK,
                order,
                budget,
                is_planned=False,
                is_trial=form == "trial",
            )
            for order, budget in loads
        ]
    return rows


def _ours() -> list[Config]:
    """Echo's ladder: first come, first served up to `bs+e`; the KV manager with `echo` alone."""
    return [
        Config("bs", "bs", is_planned=False),
        Config("bs+e", "bs+e", is_planned=False, eviction="lru"),
        Config("bs+e planned", "bs+e", eviction="lru"),
        Config("bs+e+s", "bs+e+s", eviction="lru"),
        Config("echo"),
        Config("echo offline-only", is_online=False),
        Config("echo online-only", order=None),
    ]


def measure(
    scenario: Scenario,
    law_name: str,
    config: Config,
    seed: int,
    blocks: int,
    warm_up_s: float = WARM_UP_S,
) -> Record:
    """One run, as a flat record with the keys of design 11. Policies that learn watched
    `warm_up_s` seconds of online traffic before."""
    is_stock = config.policy == STOCK
    is_one_ahead = not config.is_trial
    settings = {"policy": config.policy, "reserve": config.reserve, "eviction": config.eviction}
    shape = EngineShape(
        num_blocks=blocks,
        token_budget=config.budget,
        additional_config={} if is_stock else {"batchrun": settings},
    )
    warm_up = None
    if config.policy not in {STOCK, "bs"}:
        warm_up = _observed(scenario, law_name, seed, blocks, warm_up_s)
        if not config.is_online:
            warm_up = warm_up.without_online_use()
    figures = run(
        Run(
            stock_scheduler(1 + is_one_ahead) if is_stock else ColocatedScheduler,
            scenario,
            shape,
            _sources(scenario, config, seed),
            law=LAWS[law_name](seed),
            timing=Timing() if is_one_ahead else Timing(steps_in_flight=1, planning_s=0.0),
            warm_up=warm_up,
        )
    )
    return {
        "config": config.name,
        "law": law_name,
        "policy": config.policy,
        "order": config.order,
        "planned": config.is_planned,
        "seed": seed,
        "online": config.is_online,
        "reserve": None if is_stock else config.reserve,
        "eviction": None if is_stock else config.eviction,
        **figures,
    }


def _sources(scenario: Scenario, config: Config, seed: int) -> list[TrafficSource]:
    sources: list[TrafficSource] = []
    if config.is_online:
        sources.append(OnlineSource(draw_calls(scenario, seed), seed))
    if config.order is not None:
        job = draw_job(scenario.job, seed, config.order)
        window = None if config.is_trial else DAEMON_WINDOW
        digits = 0 if config.is_trial else 7
        ordered = planned_order(job) if config.is_planned else job
        sources.append(JobFeeder(ordered, window=window, id_digits=digits))
    return sources


@lru_cache(maxsize=1)
def _observed(
    scenario: Scenario, law_name: str, seed: int, blocks: int, warm_up_s: float
) -> WarmUp:
    law = LAWS[law_name](seed + SEED_OFFSET)
    return observe(scenario, seed, EngineShape(num_blocks=blocks), law, online_s=warm_up_s)
