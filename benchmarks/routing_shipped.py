"""The shipped simulator for `benchmarks.routing`: the same calls, alone or beside a job.

The real scheduler under the policy `echo` on the virtual A100, every setting as it ships but one
that is said. The job asks questions about documents (`benchmarks.placement`), and has more of them
than can be answered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from batchrun.pool.prefix_keys import ChainBuilder
from batchrun.routing.router import Router
from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.online import PIECE_BYTES, PREFIX, TOKEN_BYTES, Calls
from batchrun.simulator.records import GROUP_SUFFIX
from batchrun.simulator.simulation import Simulation, SimulationPlan, own_heap
from batchrun.simulator.traces.trace import PrefixBlocks
from batchrun.simulator.virtual.engine import RequestRecord, VirtualEngine
from benchmarks.light_engines import UNIT_TOKENS, LightCall, Report
from benchmarks.placement import Case, job_of

LOOK_S = 2.0
"""Between two looks whether a run is lost."""
DOCUMENTS_PER_ENGINE = 64
PLAN = EnginePlan()
PIECE_BLOCKS = PIECE_BYTES // TOKEN_BYTES // PLAN.shape.block_tokens


class Beside(NamedTuple):
    """The seed of the job, None for none, and a setting of the scheduler as `NAME=VALUE`."""

    job_seed: int | None = None
    setting: str = ""


ALONE = Beside()


def run_shipped(
    calls: Sequence[LightCall],
    router: Router,
    instants_s: Sequence[float],
    *,
    beside: Beside = ALONE,
    is_lost: Callable[[float], bool] | None = None,
    report: Report | None = None,
) -> list[int]:
    """Run until the last of the instants, or until it `is_lost` at the one it is told; returns the
    tokens of the job's rows that had ended at each. What became of a call is noted in it. What
    engines evict is told to `report`."""
    num_engines = len(router.book.traits)
    case = Case(DOCUMENTS_PER_ENGINE * num_engines)
    jobs = [] if beside.job_seed is None else [job_of(case, beside.job_seed)]
    settings = dict([beside.setting.split("=", 1)] if beside.setting else [])
    engine = replace(PLAN, settings=settings)
    plan = SimulationPlan(math.inf, _as_given(calls), jobs, num_engines, engine)
    served: list[int] = []
    with own_heap():
        simulation = Simulation(plan)
        simulation.router.router = router
        _note_in(calls, simulation)
        if report is not None:
            _have_told(simulation, report)
        for at_s in instants_s if is_lost is None else _looks(instants_s):
            simulation.engines.run_until(at_s)
            if at_s in instants_s:
                served.append(sum(job.served_tokens for job in simulation.feed.jobs))
            if is_lost is not None and is_lost(at_s):
                break
        assert all(job.finished_at_s is None for job in simulation.feed.jobs), "too few rows"
    return served


def _looks(instants_s: Sequence[float]) -> list[float]:
    return sorted({*instants_s, *np.arange(LOOK_S, instants_s[-1], LOOK_S).tolist()})


def _as_given(calls: Sequence[LightCall]) -> Calls:
    """What the simulator wants: equal keys of units are equal text."""
    offsets = np.cumsum([0, *(len(call.units) for call in calls)])
    units = np.concatenate([call.units for call in calls]).view(np.int64)
    return Calls(
        np.array([call.arrival_at_s for call in calls]),
        np.array([call.prompt_tokens for call in calls]),
        np.array([call.output_tokens for call in calls]),
        PrefixBlocks(units, offsets, UNIT_TOKENS),
    )


def _note_in(calls: Sequence[LightCall], simulation: Simulation) -> None:
    """Have the engines note in each call when it began and ended, and its hits."""

    def started(record: RequestRecord) -> None:
        if record.is_online:
            call = calls[int(record.request_id.removeprefix(PREFIX))]
            call.first_token_at_s = record.token_times_s[0]
            call.cached_tokens = record.num_hit_tokens

    def ended(record: RequestRecord) -> None:
        if record.is_online:
            calls[int(record.request_id.removeprefix(PREFIX))].end_at_s = record.token_times_s[-1]

    for engine in simulation.engines.engines:
        engine.start_listeners.append(started)
        engine.end_listeners.append(ended)


def _have_told(simulation: Simulation, report: Report) -> None:
    engines = simulation.engines
    evicted = [Evicted(*numbered, report) for numbered in enumerate(engines.engines)]
    engines.after_step = lambda number: evicted[number].tell()


class Evicted:
    """Pieces of calls' prompts that an engine has evicted, in the place of vLLM's collector of such
    figures; without those that other blocks hold, or that a call which waits will bring back."""

    def __init__(self, number: int, engine: VirtualEngine, report: Report) -> None:
        self._number, self._engine, self._report = number, engine, report
        self._pool = cast("Any", engine.scheduler.kv_cache_manager.block_pool)
        self._pool.metrics_collector = self
        engine.start_listeners.append(self._started)
        self._keys: dict[str, list[int]] = {}
        self._piece_of: dict[bytes, int] = {}
        self._gone: set[bytes] = set()

    def on_block_evicted(self, block: Any) -> None:
        """vLLM takes the block for something else."""
        if block.block_hash in self._piece_of:
            self._gone.add(block.block_hash)

    def on_block_allocated(self, block: Any) -> None:
        """See vLLM."""

    def on_block_accessed(self, block: Any) -> None:
        """See vLLM."""

    def tell(self) -> None:
        """Report what is gone since the last time."""
        if not self._gone:
            return
        find = self._pool.cached_block_hash_to_block.get_one_block
        gone = {self._piece_of[block] for block in self._gone if find(block) is None}
        for record in self._engine.records.values():
            if record.is_online and not record.token_times_s:
                gone.difference_update(self._keys_of(record))
        self._report(self._number, np.fromiter(gone, np.uint64, len(gone)))
        self._gone.clear()

    def _started(self, record: RequestRecord) -> None:
        if record.is_online and record.request is not None:
            keys = self._keys_of(record)
            del self._keys[record.request_id]
            blocks = record.request.block_hashes[: len(keys) * PIECE_BLOCKS]
            for place, block in enumerate(blocks):
                self._piece_of[block + GROUP_SUFFIX] = keys[place // PIECE_BLOCKS]

    def _keys_of(self, record: RequestRecord) -> list[int]:
        """The keys of the prompt's pieces, as the gateway has them."""
        if record.request_id not in self._keys and record.request is not None:
            chain = ChainBuilder(0, lambda size: range(PIECE_BYTES, size + 1, PIECE_BYTES))
            chain.add([np.asarray(record.request.prompt_token_ids, np.uint32).tobytes()])
            self._keys[record.request_id] = chain.build().keys.tolist()
        return self._keys[record.request_id]
