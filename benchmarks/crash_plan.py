"""What is killed how often, and what comes of the kills of one deployment."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.crash_account import Kill, Reach

TARGETS = {
    "daemon": 8,
    "daemon in a commit": 22,
    "daemon in a rename": 12,
    "writer": 10,
    "engine": 17,
    "gateway": 8,
    "gateway worker": 4,
    "submit": 3,
    "results": 8,
    "all": 8,
}
"""What is killed, in so many of a hundred kills."""


@dataclass(frozen=True, slots=True)
class KillRun:
    """What came of a deployment's kills; no problem: every promise was kept."""

    kills: tuple[Kill, ...]
    reaches: tuple[Reach, ...]
    problems: tuple[str, ...]
    num_rows: int
    num_executions: int
    num_jobs: int
    num_looks: int
    passes: dict[str, int]


def plan_targets(rng: random.Random, num_kills: int) -> list[str]:
    """What each kill hits: the shares of `TARGETS`, in a random order."""
    names = [name for name, weight in TARGETS.items() for _ in range(weight)]
    step = len(names) / num_kills
    offset = rng.random() * step
    plan = [names[int(offset + index * step) % len(names)] for index in range(num_kills)]
    rng.shuffle(plan)
    return plan
