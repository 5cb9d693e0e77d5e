"""Routers by name. A new one is a file beside this one, its test, and a line in `ROUTERS`."""

from __future__ import annotations

import random

from batchrun.errors import known_name
from batchrun.routing.cost import Cost
from batchrun.routing.e2 import E2, E2Plain
from batchrun.routing.engine_book import EngineBook
from batchrun.routing.rankings import (
    CacheAware,
    Hash,
    Least,
    LlmD,
    LlmDSticky,
    LMetric,
    Random,
    RoundRobin,
    Sal,
    SalPrinted,
    TwoChoices,
)
from batchrun.routing.router import Router

DEFAULT_ROUTER = "cost"
ROUTERS: dict[str, type[Router]] = {
    "cost": Cost,
    "least": Least,
    "rr": RoundRobin,
    "random": Random,
    "p2c": TwoChoices,
    "hash": Hash,
    "cache-aware": CacheAware,
    "lmetric": LMetric,
    "llm-d": LlmD,
    "llm-d-sticky": LlmDSticky,
    "e2": E2,
    "e2-plain": E2Plain,
    "sal": Sal,
    "sal-printed": SalPrinted,
}


def make_router(name: str, book: EngineBook, seed: int = 0) -> Router:
    """A new router of this name. Raises ValueError for a name that is not in `ROUTERS`."""
    return ROUTERS[known_name(name, ROUTERS)](book, random.Random(seed))
