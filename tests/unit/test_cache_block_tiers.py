"""Online prefixes have a floor, and content of finished calls stands above unneeded content."""

from __future__ import annotations

import pytest
from cache_builders import SmallCache, chain_of, row_hint

from batchrun.cache.eviction import ECHO_RC, NEXT_USE, EvictionOrder
from batchrun.cache.free_queue import OnlinePrefixes


def test_a_prefix_that_online_requests_share_has_a_floor_for_a_while() -> None:
    online = OnlinePrefixes(floor_s=10.0)
    online.hit(chain_of("sysA"), 0.0)
    assert not online.floored
    online.hit(chain_of("sysB"), 5.0)
    assert set(online.floored) == {b"s", b"sy", b"sys"}
    assert online.expire(14.9) == []
    assert online.expire(15.0) == [b"sys", b"sy", b"s"]


def test_two_hits_that_are_far_apart_give_no_floor() -> None:
    online = OnlinePrefixes(floor_s=10.0)
    online.hit(chain_of("ab"), 0.0)
    online.hit(chain_of("ab"), 10.0)
    assert not online.floored


def test_the_floor_holds_the_latest_hit_blocks_only_and_stays_closed() -> None:
    online = OnlinePrefixes(floor_s=10.0, max_blocks=3)
    for now_s, text in enumerate(["abcde", "abcde", "xy", "xy"]):
        lost = online.hit(chain_of(text), float(now_s))
    assert lost == [b"abc", b"ab"]
    assert set(online.floored) == {b"a", b"x", b"xy"}


def test_the_system_prompt_outlives_a_document_with_rows_to_come() -> None:
    cache = SmallCache(ECHO_RC, 6)
    for request in ("one", "two", "three"):
        hits = cache.admit(request, chain_of("sy" + request[0]))
        cache.online.hit(chain_of("sy")[:hits], 0.0)
        cache.free(request, is_online=True)
    cache.reuse.announce("row", row_hint(0, 0), chain_of("abc"), 0.0)
    cache.admit("row", chain_of("abc"))
    cache.free("row", is_online=False)
    cache.admit("big", chain_of("WXYZ"))
    assert {b"s", b"sy"} <= set(cache.cached)
    assert b"abc" not in cache.cached


def test_unneeded_content_of_rows_goes_before_that_of_finished_calls() -> None:
    cache = SmallCache(NEXT_USE, 4)
    for request, text in (("online", "ab"), ("offline", "xy")):
        cache.admit(request, chain_of(text))
        cache.free(request, is_online=request == "online")
    cache.admit("big", chain_of("KL"))
    assert set(cache.cached) == {b"a", b"ab", b"K", b"KL"}


def test_online_content_stays_marked_when_an_offline_row_hits_its_prefix() -> None:
    cache = SmallCache(NEXT_USE, 4)
    cache.admit("online", chain_of("ab"))
    cache.free("online", is_online=True)
    cache.admit("offline", chain_of("ax"))
    cache.free("offline", is_online=False)
    cache.admit("big", chain_of("KLM"))
    assert set(cache.cached) == {b"a", b"K", b"KL", b"KLM"}


def test_a_prefix_that_a_row_holds_longer_than_a_call_stays_as_long_as_what_is_behind_it() -> None:
    cache = SmallCache(NEXT_USE, 8)
    cache.admit("row", chain_of("aax"))
    cache.admit("call", chain_of("aaq"))
    cache.free("call", is_online=True)
    cache.free("row", is_online=False)

    cache.admit("other", chain_of("bcdefg"))

    assert {b"a", b"aa"} <= set(cache.cached)


def test_the_document_that_is_needed_last_is_evicted_first() -> None:
    cache = SmallCache(NEXT_USE, 6)
    for row, text in ((40, "ab"), (7, "xy"), (20, "pq")):
        cache.reuse.announce(f"{row}", row_hint(row, row), chain_of(text), 0.0)
        cache.admit(text, chain_of(text))
        cache.free(text, is_online=False)
    cache.reuse.advance(5)
    cache.admit("big", chain_of("KL"))
    assert {b"x", b"xy", b"p", b"pq"} <= set(cache.cached)


def test_wanted_free_blocks_are_counted_by_tier() -> None:
    cache = SmallCache(NEXT_USE, 6)
    cache.reuse.announce("1", row_hint(1, 1), chain_of("abc"), 0.0)
    for text in ("ab", "xy"):
        cache.admit(text, chain_of(text))
        cache.free(text, is_online=False)
    assert cache.tiers.num_wanted_free(cache.queue.free_by_tier(), 1) == 2


@pytest.mark.parametrize(("order", "wanted"), [(NEXT_USE, [0, 2, 2, 5]), (ECHO_RC, [0, 0, 0, 0])])
def test_only_blocks_of_rows_before_it_keep_new_work_out(
    order: EvictionOrder, wanted: list[int]
) -> None:
    cache = SmallCache(order, 6)
    for row, text in ((20, "ab"), (900, "xyz")):
        cache.reuse.announce(f"{row}", row_hint(row, row), chain_of(text), 0.0)
        cache.admit(text, chain_of(text))
        cache.free(text, is_online=False)
    free_by_tier = cache.queue.free_by_tier()

    assert [cache.tiers.num_wanted_free(free_by_tier, r) for r in (5, 20, 600, 900)] == wanted
