"""Which engine the routers rank first."""

from __future__ import annotations

import pytest

from batchrun.routing.router import Call, Load
from batchrun.routing.routers import DEFAULT_ROUTER, ROUTERS, make_router

ONLINE = Call(prompt_tokens=100)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("call", [ONLINE, Call(100, is_offline=True, group=7)])
def test_every_router_ranks_all_engines_there_are_and_no_other(name: str, call: Call) -> None:
    router = make_router(name)
    loads = {4: Load(3, 30), 2: Load(1, 900), 9: Load()}
    for _ in range(5):
        ranked = router.rank(call, loads, 1.0)
        assert sorted(ranked) == [2, 4, 9]
        router.sent(call, ranked[0], 1.0)
        router.ended(call, ranked[0], 2.0)
    router.left(4)
    del loads[4]
    assert sorted(router.rank(call, loads, 3.0)) == [2, 9]
    assert router.rank(call, {}, 4.0) == []


def test_a_call_goes_where_the_fewest_are_in_flight_then_where_the_fewest_were() -> None:
    loads = {
        0: Load(2, num_sent=2),
        1: Load(1, num_sent=9),
        2: Load(1, num_sent=8),
        3: Load(1, 0, 8),
    }
    assert make_router("least").rank(ONLINE, loads, 0.0) == [2, 3, 1, 0]


def test_a_groups_rows_go_to_its_engine_however_full_it_is_then_by_tokens() -> None:
    loads = {5: Load(1, 500), 6: Load(9, 900), 7: Load(7, 100)}
    router = make_router(DEFAULT_ROUTER)
    ranked = [router.rank(Call(10, is_offline=True, group=i), loads, 0.0) for i in range(4)]
    assert ranked == [[5, 7, 6], [6, 7, 5], [7, 5, 6], [5, 7, 6]]


def test_an_engine_that_is_away_takes_no_group_from_the_others() -> None:
    loads, router = {engine: Load() for engine in range(4)}, make_router(DEFAULT_ROUTER)

    def owners(loads: dict[int, Load]) -> list[int]:
        calls = [Call(10, is_offline=True, group=i) for i in range(12)]
        return [router.rank(call, loads, 0.0)[0] for call in calls]

    before = owners(loads)
    without = owners({engine: load for engine, load in loads.items() if engine != 2})

    kept = [engine == now for engine, now in zip(before, without, strict=True) if engine != 2]
    assert all(kept)
    assert {without[i] for i in range(12) if before[i] == 2} == {0, 1, 3}
    assert owners(loads) == before


def test_a_name_that_no_router_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="'fastest'; there are least"):
        make_router("fastest")
