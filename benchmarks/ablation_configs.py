"""What `benchmarks.ablation` runs in each scenario: policies, budgets, orders, reserves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

LADDER = ("bs", "bs+e", "bs+e+s", "echo")
"""The steps of Echo's figure 6."""
TRIAL_SCENARIOS = ("a100-8b", "a100-8b-stress", "kv-pressure")
"""Those in which the design printed figures of its trial."""


@dataclass(frozen=True, slots=True)
class Config:
    """One row of the table.

    `policy` is `stock` (vLLM's own scheduler classes) or one of ours. `order` is how the rows
    stand in the input; None: no offline work. With `is_planned` the pool orders them before they
    are sent. `is_trial` is the form behind the design's printed figures: one step in flight, no
    planning time, rows in the order of their numbers as text. `reserve` is a share, the forecast,
    or the name of another forecast rule.
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
    forms = (STOCK, "trial") if scenario_name in TRIAL_SCENARIOS else (STOCK,)
    rows = [*_stock(forms), *_ours()]
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


def _stock(forms: Sequence[str]) -> list[Config]:
    rows = [
        Config(f"online-only-{budget}", STOCK, None, budget, is_planned=False)
        for budget in ONLINE_BUDGETS
    ]
    loads = [(Order.SHUFFLED, SHUFFLED_BUDGET), *((Order.GROUPED, b) for b in GROUPED_BUDGETS)]
    for form in forms:
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
    rows += [
        Config(f"{STOCK}-in-our-order-{budget}", STOCK, budget=budget) for budget in GROUPED_BUDGETS
    ]
    return rows


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
        Config("echo online-only", order=None),
    ]
