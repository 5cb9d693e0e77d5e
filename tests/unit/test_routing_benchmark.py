"""`benchmarks.routing`: gateways of workers, maps that are told, and calls in the simulator."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from batchrun.routing.engine_book import EngineBook, EngineTraits
from batchrun.routing.routers import make_router
from benchmarks import routing_shipped
from benchmarks.light_engines import LightCall, LightEngine, run
from benchmarks.routed_calls import WORKLOADS
from benchmarks.routing import ONE, Front, Trial, _books, _light_engines, _report, _router
from benchmarks.routing_shipped import Beside, Evicted, run_shipped

CALLS_S, END_S = 12.0, 20.0
ENGINES = range(4)


def trial(workload: str, front: Front = ONE, router: str = "cost") -> Trial:
    return Trial(workload, front, router, 0, WORKLOADS[workload].rate_per_s, len(ENGINES))


def calls_of(workload: str, rate_per_s: float) -> list[LightCall]:
    return WORKLOADS[workload].draw(np.random.default_rng(0), rate_per_s, CALLS_S)


@pytest.mark.parametrize(("front", "fewest"), [(Front(1, 4), 10), (Front(2, 1), 0)])
def test_workers_know_each_others_calls_and_gateways_do_not(front: Front, fewest: int) -> None:
    chosen = trial("azure", front, "least")
    books = _books(chosen)
    router = _router(chosen, books)
    call = calls_of("azure", 10.0)[0]
    for number in range(40):
        at_s = 1.0 + number
        router.sent(call.seen, router.rank(call.seen, ENGINES, at_s)[0], at_s)

    seen = [book.loads(ENGINES, 50.0) for book in books]
    num_calls = sum(load.calls for load in seen[0].values())
    assert min(load.calls for load in seen[0].values()) >= fewest
    assert (num_calls == sum(load.calls for load in seen[-1].values()) == 40) == (fewest > 0)


def test_a_map_that_is_told_of_evictions_holds_what_the_engines_hold() -> None:
    chosen = trial("loogle", Front(knows_evictions=True))
    books = _books(chosen)
    engines = _light_engines(len(ENGINES), _report(books))
    calls = WORKLOADS["loogle"].draw(np.random.default_rng(1), 8.0, CALLS_S)
    run(calls, _router(chosen, books), engines, 60.0)

    for engine in engines:
        assert not engine.waiting
        held_units = engine.held_units
        for call in calls:
            held = [key in held_units for key in call.seen.keys.tolist()]
            num_held = books[0].prefixes.num_held(call.seen.keys, [engine.number], 60.0)[0]
            assert num_held == (held.index(False) if False in held else len(held))
    assert sum(len(engine.held_units) for engine in engines) < sum(len(c.units) for c in calls)


def test_light_engines_do_not_go_by_where_calls_lie_in_memory() -> None:
    drawn = calls_of("loogle", 8.0)
    lying_backwards = [replace(call) for call in reversed(drawn)][::-1]
    seen = []
    for calls in (drawn, lying_backwards):
        engine = LightEngine(0)
        for call in calls:
            call.output_tokens = 16
        engine.waiting.extend(calls)
        while engine.has_work:
            engine.step()
        seen.append([calls.index(call) for call in engine.ended])

    assert seen[0] == seen[1]


def test_the_simulator_has_the_same_calls_and_rows_of_a_job_beside_them() -> None:
    drawn = calls_of("toolbench", 10.0), calls_of("toolbench", 10.0)
    routers = [_router(trial("toolbench"), _books(trial("toolbench"))) for _ in drawn]
    run(drawn[0], routers[0], [LightEngine(number) for number in ENGINES], END_S)
    served = run_shipped(drawn[1], routers[1], (CALLS_S, END_S), beside=Beside(0))

    assert 0 < served[0] < served[1]
    for light, shipped in zip(*drawn, strict=True):
        assert shipped.arrival_at_s < shipped.first_token_at_s <= shipped.end_at_s < END_S
        assert light.end_at_s < END_S
    hits = [sum(call.cached_tokens for call in calls) for calls in drawn]
    assert hits[1] == pytest.approx(hits[0], rel=0.2)


def test_a_map_that_the_simulator_tells_holds_what_its_engines_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Evicted] = []

    class Kept(Evicted):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(routing_shipped, "Evicted", Kept)
    chosen = replace(trial("loogle", Front(knows_evictions=True)), num_engines=2, is_shipped=True)
    books = _books(chosen)
    calls = calls_of("loogle", 2.0)
    run_shipped(calls, _router(chosen, books), (40.0,), beside=Beside(0), report=_report(books))

    assert all(call.end_at_s < 40.0 for call in calls)
    num_gone = 0
    for number, evicted in enumerate(made):
        blocks = defaultdict(list)
        for block, key in evicted._piece_of.items():
            blocks[key].append(evicted._pool.cached_block_hash_to_block.get_one_block(block))
        for key, found in blocks.items():
            is_held = bool(
                books[0].prefixes.num_held(np.array([key], np.uint64), [number], 40.0)[0]
            )
            assert is_held == (None not in found)
            num_gone += not is_held
    assert num_gone


@pytest.mark.parametrize("num_engines", [2, 4, 8])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_many_calls_share_is_on_as_many_engines_as_it_takes(
    num_engines: int, share: float
) -> None:
    calls = WORKLOADS["hot"].draw(np.random.default_rng(0), 10.0 * num_engines, 30.0)
    hot = [call for call in calls if share < 1 or call.prompt_tokens > 4_000]

    def mean_s(router: str) -> float:
        engines = [LightEngine(number) for number in range(num_engines)]
        book = EngineBook.of([EngineTraits()] * num_engines)
        sent = [replace(call) for call in hot]
        run(sent, make_router(router, book, 0), engines, 90.0)
        return fmean(min(call.end_at_s, 90.0) - call.arrival_at_s for call in sent)

    assert mean_s("cost") < 1.15 * mean_s("least")


def test_what_many_calls_share_is_copied_before_the_first_of_them_has_ended() -> None:
    calls = WORKLOADS["hot"].draw(np.random.default_rng(0), 12.0, 15.0)
    hot = [replace(call, output_tokens=1_500) for call in calls if call.prompt_tokens > 4_000]
    engines = [LightEngine(number) for number in ENGINES]
    run(hot, make_router("cost", EngineBook.of([EngineTraits()] * len(ENGINES)), 0), engines, 90.0)
    assert fmean(call.first_token_at_s - call.arrival_at_s for call in hot) < 0.5
