"""How routers rank engines, and what they know of them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from batchrun.pool.prefix_keys import KeyArray
from batchrun.routing.engine_book import Call, EngineBook, EngineTraits, Prices, with_means
from batchrun.routing.prefix_map import Arrays, PrefixMap
from batchrun.routing.routers import ROUTERS, make_router

NO_KEYS: KeyArray = np.empty(0, np.uint64)
PIECE_TOKENS = 256


def keys(seed: int, num: int) -> KeyArray:
    return np.random.default_rng(seed).integers(1, 1 << 63, num, dtype=np.uint64)


def call(prompt_tokens: int = 100, seed: int = 0, num_pieces: int = 0) -> Call:
    return Call(prompt_tokens, keys(seed, num_pieces), PIECE_TOKENS)


def book_of(num: int, traits: EngineTraits | None = None) -> EngineBook:
    return EngineBook.of([traits or EngineTraits()] * num)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("sent", [call(), call(5_000, 1, 19)])
def test_every_router_ranks_the_engines_it_is_asked_for_and_no_other(name: str, sent: Call) -> None:
    router = make_router(name, book_of(4))
    for at_s in range(1, 9):
        ranked = router.rank(sent, [3, 1, 2], float(at_s))
        assert sorted(ranked) == [1, 2, 3]
        way = router.sent(sent, ranked[0], float(at_s))
        router.first_token(way, at_s + 0.5)
        router.ended(way, at_s + 1.0, 0, 10)
    router.book.left(1)
    assert sorted(router.rank(sent, [2, 3], 20.0)) == [2, 3]


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"must be one of cost, least, .* not 'leest'"):
        make_router("leest", book_of(1))


def test_a_load_is_what_was_sent_and_has_not_moved_or_ended() -> None:
    book = book_of(1)
    first, second = book.sent(call(1_000), 0, 1.0), book.sent(call(500), 0, 1.0)
    load = book.loads([0], 1.0)[0]
    assert (load.calls, load.waiting_calls, load.waiting_tokens) == (2, 2, 1_500)
    prices = Prices()
    both_s = prices.prefill_s(1_000, 0) + prices.prefill_s(500, 0)
    assert load.waiting_s == pytest.approx(both_s)
    assert book.loads([0], 1.02)[0].waiting_s == pytest.approx(both_s - 0.02)
    book.first_token(first, 1.1)
    book.ended(second, 1.2)
    load = book.loads([0], 1.2)[0]
    assert (load.calls, load.waiting_calls, load.prompt_tokens) == (1, 0, 1_000)
    book.ended(first, 1.3, 0, 7)
    assert book.loads([0], 1.3)[0].calls == 0


def test_a_hot_prefix_gets_a_second_home_once_its_queue_costs_more() -> None:
    router = make_router("cost", book_of(2))
    hot = call(20_000, 5, 78)
    router.ended(router.sent(hot, 1, 1.0), 2.0, 0, 20)
    assert router.rank(hot, [0, 1], 3.0)[0] == 1
    for _ in range(4):
        router.sent(call(30_000, random.randrange(1 << 30), 117), 1, 3.0)
    assert router.rank(hot, [0, 1], 3.0)[0] == 0


def test_nothing_shared_goes_where_least_is_to_be_done() -> None:
    router = make_router("cost", book_of(3))
    for engine, num in enumerate((3, 1, 2)):
        for _ in range(num):
            router.sent(call(800), engine, 1.0)
    assert router.rank(call(400), [0, 1, 2], 1.0) == [1, 2, 0]


def test_an_engine_at_its_slots_is_passed_over() -> None:
    router = make_router("cost", book_of(2, EngineTraits(max_running=4)))
    for _ in range(4):
        router.first_token(router.sent(call(10), 0, 1.0), 1.0)
    for _ in range(3):
        router.sent(call(900), 1, 1.0)
    assert router.rank(call(10), [0, 1], 1.0)[0] == 1


def test_a_cache_holds_what_was_used_last_and_nothing_else() -> None:
    prefixes = PrefixMap(Arrays.private(1 << 10, 2))
    documents = [keys(i, 20) for i in range(6)]
    for at_s, document in enumerate(documents, start=1):
        prefixes.touch(0, document, float(at_s), room_pieces=60)
    held = [int(prefixes.num_held(document, [0, 1])[0]) for document in documents]
    assert held[3:] == [20, 20, 20]
    assert held[:2] == [0, 0]
    assert prefixes.evicted_share(0, 10) == 1.0
    assert prefixes.evicted_share(1, 10) == 0.0
    assert prefixes.num_held(documents[5], [1, 0]).tolist() == [0, 20]
    prefixes.clear(0)
    assert prefixes.num_held(documents[5], [0]).tolist() == [0]


def test_a_prompt_is_evicted_from_its_end() -> None:
    prefixes = PrefixMap(Arrays.private(1 << 10, 1))
    for at_s in (1.0, 2.0, 3.0):
        held = prefixes.touch(0, keys(int(at_s), 20), at_s, room_pieces=50)
        assert held == 0
    held_first = int(prefixes.num_held(keys(1, 20), [0])[0])
    assert 8 <= held_first <= 10
    assert prefixes.touch(0, keys(1, 20), 4.0, room_pieces=50) == held_first
    assert prefixes.num_held(keys(3, 20), [0]).tolist() == [20]


def test_how_often_pieces_had_been_used_is_learnt_when_they_go() -> None:
    once, again = PrefixMap(Arrays.private(1 << 10, 1)), PrefixMap(Arrays.private(1 << 10, 1))
    for i in range(200):
        once.touch(0, keys(i, 10), float(i + 1), room_pieces=50)
        again.touch(0, keys(i // 2, 10), float(i + 1), room_pieces=50)
    assert 0.9 < once.mean_uses <= 1.0
    assert 1.5 < again.mean_uses <= 2.0


def test_a_map_that_is_full_forgets_what_was_used_longest_ago() -> None:
    prefixes = PrefixMap(Arrays.private(64, 1))
    for i in range(100):
        prefixes.touch(0, keys(i, 4), float(i + 1), room_pieces=1e9)
    assert prefixes.num_pieces(0) <= 64
    assert prefixes.num_held(keys(99, 4), [0]).tolist() == [4]
    assert prefixes.num_held(keys(0, 4), [0]).tolist() == [0]


def test_replies_with_fewer_cached_tokens_than_foretold_shrink_what_is_believed() -> None:
    def copies_of(cached_tokens: int) -> int:
        book = book_of(1, EngineTraits(kv_tokens=64 * PIECE_TOKENS))
        for i in range(40):
            sent = book.sent(call(20 * PIECE_TOKENS, i % 3, 20), 0, float(i + 1))
            book.ended(sent, i + 1.5, cached_tokens if sent.cached_tokens else 0, 5)
        return book.prefixes.num_pieces(0)

    assert copies_of(20 * PIECE_TOKENS) == 60
    assert copies_of(0) < 60


def test_an_engine_that_was_away_has_no_turns_to_make_up_for() -> None:
    book = book_of(3)
    router = make_router("rr", book)
    for _ in range(30):
        router.sent(call(), router.rank(call(), [0, 1], 0.0)[0], 0.0)
    counts = [0, 0, 0]
    for _ in range(30):
        first = router.rank(call(), [0, 1, 2], 0.0)[0]
        router.sent(call(), first, 0.0)
        counts[first] += 1

    assert max(counts) - min(counts) <= 1


def test_an_engine_without_a_profile_has_the_prices_of_the_others() -> None:
    fast, slow = Prices(base_s=0.005), Prices(base_s=0.015)

    assert with_means([None, None]) == [None, None]
    filled = with_means([fast, None, slow])
    assert [each and each.base_s for each in filled] == [0.005, pytest.approx(0.01), 0.015]
