"""How routers rank engines, and what they know of them."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from batchrun.pool.prefix_keys import KeyArray
from batchrun.routing.engine_book import FIELDS, Call, EngineBook, EngineTraits, Prices, with_means
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


def test_what_one_worker_sends_does_not_undo_the_time_that_anothers_calls_have_waited() -> None:
    prefixes, loads = PrefixMap(Arrays.private(1 << 10, 1)), np.zeros((2, 1, len(FIELDS)))
    first, second = books = [EngineBook(prefixes, loads, worker) for worker in range(2)]
    for book in books:
        book.introduce(0, EngineTraits())
    prefill_s = first.sent(call(4_000), 0, 1.0).prefill_s
    added_s = second.sent(call(100), 0, 1.2).prefill_s

    waiting_s = first.loads([0], 1.25)[0].waiting_s
    assert waiting_s == pytest.approx(prefill_s + added_s - 0.25)


def test_workers_learn_the_lengths_of_answers_from_each_others_calls() -> None:
    arrays, loads = Arrays.private(64, 1), np.zeros((2, 1, len(FIELDS)))
    one, other = (EngineBook(PrefixMap(arrays), loads, worker) for worker in range(2))
    one.introduce(0, EngineTraits())
    one.ended(one.sent(call(700), 0, 1.0), 4.0, None, 30)
    assert (other.answer_tokens, other.prompt_tokens) == (30, 700)
    heir = EngineBook(PrefixMap(arrays), loads, 0)
    assert heir.answer_tokens == 30
    other.introduce(0, EngineTraits())
    other.ended(other.sent(call(500), 0, 5.0), 9.0, None, 10)
    assert (one.answer_tokens, heir.prompt_tokens) == (20, 600)


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
    held = [int(prefixes.num_held(document, [0, 1], 7.0)[0]) for document in documents]
    assert held[3:] == [20, 20, 20]
    assert held[:2] == [0, 0]
    shares = prefixes.evicted_shares(np.array([1, 0, 0]), np.array([10.0, 10.0, 0.0]))
    assert shares.tolist() == [0.0, 1.0, 0.0]
    assert prefixes.num_held(documents[5], [1, 0], 7.0).tolist() == [0, 20]
    prefixes.clear(0)
    assert prefixes.num_held(documents[5], [0], 7.0).tolist() == [0]


def test_a_prompt_is_evicted_from_its_end() -> None:
    prefixes = PrefixMap(Arrays.private(1 << 10, 1))
    for at_s in (1.0, 2.0, 3.0):
        held = prefixes.touch(0, keys(int(at_s), 20), at_s, room_pieces=50).num
        assert held == 0
    held_first = int(prefixes.num_held(keys(1, 20), [0], 4.0)[0])
    assert 8 <= held_first <= 10
    assert prefixes.touch(0, keys(1, 20), 4.0, room_pieces=50).num == held_first
    assert prefixes.num_held(keys(3, 20), [0], 5.0).tolist() == [20]


@pytest.mark.parametrize(("num_documents", "least", "most"), [(17, 0.9, 1.0), (200, 0.0, 0.0)])
def test_what_is_pushed_out_has_a_price_where_it_is_wanted_again(
    num_documents: int, least: float, most: float
) -> None:
    """Both engines hold five documents of twenty pieces; each call asks about the next one, which
    was in the other engine the last time. Calls that never begin count for nothing."""
    router = make_router("cost", book_of(2, EngineTraits(kv_tokens=100 * PIECE_TOKENS)))
    for number in range(200):
        asked = call(20 * PIECE_TOKENS, number % num_documents, 20)
        router.rank(asked, [0, 1], number + 1.0)
        sent = router.sent(asked, number % 2, number + 1.0)
        router.ended(sent, number + 1.5, None, 10)
        never = call(20 * PIECE_TOKENS, 1_000 + number, 20)
        router.rank(never, [0, 1], number + 1.6)
        router.ended(router.sent(never, number % 2, number + 1.6), number + 1.7)
    assert least <= router.book.prefixes.returned_share <= most
    router.rank(call(40 * PIECE_TOKENS, 999, 40), [0, 1], 300.0)
    assert router.terms is not None
    evicted_s = router.terms.evicted_s
    assert all(evicted_s > 0) if most else not any(evicted_s)


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
    assert prefixes.num_pieces(0, 101.0) <= 64
    assert prefixes.num_held(keys(99, 4), [0], 101.0).tolist() == [4]
    assert prefixes.num_held(keys(0, 4), [0], 101.0).tolist() == [0]


class Cache:
    """One engine's map as replies teach it: the engine keeps what was used in the last so many
    seconds, longer where it was hit twice."""

    def __init__(self, kept_s: float, hit_kept_s: float) -> None:
        self.book = book_of(1, EngineTraits(kv_tokens=1_000 * PIECE_TOKENS))
        self.kept_s = (kept_s, kept_s, hit_kept_s)
        self.used: dict[int, tuple[float, int]] = {}

    def ask(self, seed: int, now_s: float) -> tuple[int, int]:
        """Tokens foretold of a prompt of 20 pieces, and those that its engine had."""
        at_s, num_hits = self.used.get(seed, (-math.inf, 0))
        is_kept = now_s - at_s <= self.kept_s[min(num_hits, 2)]
        self.used[seed] = (now_s, num_hits + 1 if is_kept else 0)
        sent = self.book.sent(call(20 * PIECE_TOKENS + 9, seed, 20), 0, now_s)
        cached = 20 * PIECE_TOKENS if is_kept else 0
        self.book.ended(sent, now_s, cached, 5)
        return sent.cached_tokens, cached


def test_replies_tell_how_far_back_a_cache_reaches() -> None:
    cache, rng = Cache(10.0, 10.0), random.Random(0)
    pairs = [cache.ask(rng.randrange(60), number / 4) for number in range(2_000)]
    wrong = [foretold != pytest.approx(cached, abs=9) for foretold, cached in pairs]
    others = [cached < 5_000 for _, cached in pairs[1_000:]]

    assert sum(wrong[1_000:]) < 60
    assert 300 < sum(others) < 700
    now_s = 501.0
    held = cache.book.prefixes.num_pieces(0, now_s)
    assert held < 60 * 20 * 0.6
    cache.book.left(0)
    assert cache.book.prefixes.num_pieces(0, now_s) == 0


def test_a_cache_reaches_further_back_for_what_calls_come_back_to() -> None:
    cache, rng = Cache(4.0, 40.0), random.Random(1)
    pairs = []
    for number in range(4_000):
        often, seldom = rng.randrange(8), 8 + rng.randrange(120)
        # Each of the first is asked for three times at once, and not again for a long while.
        if number % 60 < 24:
            often = number % 60 // 3
            pairs.append((often, *cache.ask(often, number / 4)))
        else:
            pairs.append((seldom, *cache.ask(seldom, number / 4)))
    wrong: dict[bool, list[bool]] = {True: [], False: []}
    for seed, foretold, cached in pairs[2_000:]:
        wrong[seed < 8].append(foretold != pytest.approx(cached, abs=9))

    assert np.mean(wrong[True]) < 0.1
    assert np.mean(wrong[False]) < 0.1


def test_what_grew_out_of_reach_is_found_again() -> None:
    cache = Cache(5.0, 5.0)
    for number in range(200):
        cache.ask(number % 40, number / 4)
    assert cache.ask(0, 52.0) == (0, 0)
    cache.kept_s = (30.0, 30.0, 30.0)
    foretold = [cache.ask(number % 40, 60 + number / 4) for number in range(2_000)]

    assert all(told for told, _ in foretold[-40:])


def test_texts_with_more_bytes_a_token_than_others_are_not_taken_for_evictions() -> None:
    """A prompt's first half has two thirds of its tokens: what is cached looks shorter than it is,
    while all is there."""
    book = book_of(1, EngineTraits(kv_tokens=10_000 * PIECE_TOKENS))
    for number in range(60):
        sent = book.sent(call(30 * PIECE_TOKENS, number % 10, 30), 0, 10.0 + number)
        cached = 20 * PIECE_TOKENS if number >= 10 else 0
        book.ended(sent, 10.5 + number, cached, 5)

    assert book.prefixes.num_pieces(0, 75.0) == 300


def test_a_reach_that_came_out_short_grows_with_what_is_hit() -> None:
    book = book_of(1, EngineTraits(kv_tokens=10_000 * PIECE_TOKENS))

    def ask(seed: int, now_s: float, num_cached: int) -> None:
        sent = book.sent(call(20 * PIECE_TOKENS, seed, 20), 0, now_s)
        book.ended(sent, now_s, num_cached * PIECE_TOKENS, 5)

    for seed in range(9):
        ask(seed, 1.0 + seed, 0)
    # The engine's cache was emptied for once.
    ask(0, 10.0, 0)
    assert book.prefixes.num_pieces(0, 40.0) == 0
    ask(1, 40.0, 20)
    assert book.prefixes.num_held(keys(0, 20), [0], 26.0).tolist() == [20]


def test_what_one_engine_lacks_is_proven_at_another() -> None:
    book = book_of(2, EngineTraits(kv_tokens=60 * PIECE_TOKENS))
    hot = call(20 * PIECE_TOKENS, 0, 20)
    for at_s in range(1, 5):
        book.ended(book.sent(hot, 0, at_s), at_s + 0.1, 20 * PIECE_TOKENS if at_s > 1 else 0, 5)
    once = call(20 * PIECE_TOKENS, 1, 20)
    for at_s in (5, 8):
        book.ended(book.sent(once, 0, at_s), at_s + 0.1, 0, 5)
    assert book.cached_tokens(once, [0], 20.0)[0] == 0
    book.ended(book.sent(hot, 1, 9), 9.1, 0, 5)

    assert book.cached_tokens(hot, [0], 20.0)[0] == 20 * PIECE_TOKENS - 1


def test_a_call_that_was_never_begun_leaves_nothing_behind() -> None:
    book = book_of(1)
    known, new = call(20 * PIECE_TOKENS, 0, 20), call(20 * PIECE_TOKENS, 1, 20)
    book.ended(book.sent(known, 0, 1.0), 1.5, 0, 5)
    book.ended(book.sent(new, 0, 5.0), 5.1)
    assert book.cached_tokens(new, [0], 6.0)[0] == 0
    again, other = book.sent(known, 0, 7.0), book.sent(known, 0, 7.5)
    book.ended(again, 7.6)
    assert book.cached_tokens(known, [0], 8.0)[0] > 19 * PIECE_TOKENS
    book.ended(other, 8.0)
    assert book.cached_tokens(known, [0], 8.0)[0] > 19 * PIECE_TOKENS

    retried = book.sent(new, 0, 9.0)
    book.ended(retried, 9.5, 0, 5)
    assert book.cached_tokens(known, [0], 100.0)[0] > 19 * PIECE_TOKENS


def test_calls_that_fill_the_cache_while_they_wait_are_held_once_they_are_answered() -> None:
    book = book_of(1, EngineTraits(kv_tokens=537 * PIECE_TOKENS))
    first = book.sent(call(100), 0, 1.0)
    book.ended(first, 31.0, 0, 5)
    prompts = [call(40 * PIECE_TOKENS, seed, 40) for seed in range(60)]
    waiting = [book.sent(each, 0, 40 + number / 10) for number, each in enumerate(prompts)]
    for number, sent in enumerate(waiting):
        book.ended(sent, 50.0 + number / 10, 0, 5)

    held = [book.cached_tokens(each, [0], 56.0)[0] > 0 for each in prompts]
    assert all(held[-10:])


def test_a_prompt_that_is_being_answered_is_held() -> None:
    book = book_of(1, EngineTraits(kv_tokens=40 * PIECE_TOKENS))
    long = call(20 * PIECE_TOKENS, 0, 20)
    for number in range(4):
        book.ended(book.sent(call(100), 0, number), number + 10.0, 0, 5)
    book.sent(long, 0, 20.0)
    for number in range(1, 4):
        book.ended(book.sent(call(9 * PIECE_TOKENS, number, 9), 0, 20 + number), 20 + number, 0, 5)

    assert book.cached_tokens(long, [0], 24.0)[0] > 19 * PIECE_TOKENS


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
