"""What is kept of decisions, and that a quicker router decides alike."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from plain_routing import PlainBook, PlainCost

from batchrun.pool.prefix_keys import KeyArray
from batchrun.routing.decisions import (
    KEYS_AT_RISK,
    NUM_KEPT,
    NUM_KEYS,
    RECORD_BYTES,
    RING_BYTES,
    Decision,
    DecisionRing,
    Weighed,
    document_of,
    ended_calls,
    figures_of,
    imbalance_of,
    read_decisions,
)
from batchrun.routing.engine_book import Call, EngineBook, EngineTraits, Prices, Sent
from batchrun.routing.router import Router
from batchrun.routing.routers import make_router

PIECE_TOKENS = 250.5
NO_KEYS: KeyArray = np.empty(0, np.uint64)


def decision(at_s: float, engine: int = 7, cached: float = 512.0) -> Decision:
    chosen = Weighed(engine, cached, 3.0, 0.5, 0.25, 0.5, 0.125, 1.0, 0.0)
    runner_up = Weighed(9, 0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 1.0, 0.0)
    return Decision(at_s, 0, 2, 1_000.0, 256.0, chosen, runner_up)


def ring_in(memory: npt.NDArray[np.uint8], worker: int = 0) -> DecisionRing:
    return DecisionRing(memoryview(memory[worker]), np.zeros(NUM_KEYS, np.uint64))


def test_the_newest_decisions_of_all_workers_are_read_the_newest_first() -> None:
    memory = np.zeros((2, RING_BYTES), np.uint8)
    rings = [ring_in(memory, worker) for worker in range(2)]
    for number in range(NUM_KEPT + 50):
        rings[number % 2].note(decision(float(number + 1)), NO_KEYS)
    records = read_decisions(memory)
    assert len(records) == NUM_KEPT
    assert records["at_s"].tolist() == [float(n) for n in range(NUM_KEPT + 50, 50, -1)]
    assert records["chosen"]["queue_s"].tolist() == [0.5] * NUM_KEPT


def test_a_ring_goes_round_and_the_next_worker_of_its_number_goes_on() -> None:
    memory = np.zeros((1, RING_BYTES), np.uint8)
    first = ring_in(memory)
    numbers = [first.note(decision(float(n)), NO_KEYS) for n in range(1, NUM_KEPT + 11)]
    again = ring_in(memory)
    assert again.note(decision(5_000.0), NO_KEYS) == numbers[-1] + 1
    records = read_decisions(memory)
    assert records["at_s"].max() == 5_000.0
    assert records["at_s"].min() == 12.0


def test_calls_of_a_worker_that_died_run_no_more_once_its_heir_is_there() -> None:
    memory, kept = np.zeros((1, RING_BYTES), np.uint8), np.zeros((1, NUM_KEYS), np.uint64)
    ring_in(memory).note(decision(1.0), NO_KEYS)
    assert ended_calls(memory, kept, 0.0, 9.0).num_running == 1
    heir = ring_in(memory)
    lost = ended_calls(memory, kept, 0.0, 9.0)
    assert (lost.num_running, [each.output_tokens for each in lost.calls]) == (0, [0])
    number = heir.note(decision(2.0), NO_KEYS)
    heir.ended(number, 10.0, 0.0, 3.0, 4.0)
    assert [each.number for each in ended_calls(memory, kept, 1.0, 9.0).calls] == [number]


def test_what_a_reply_tells_reaches_its_decision_and_no_later_one() -> None:
    memory = np.zeros((1, RING_BYTES), np.uint8)
    ring = ring_in(memory)
    old = ring.note(decision(1.0), NO_KEYS)
    ring.ended(old, 1_010, 500, 7, 1.5)
    assert read_decisions(memory)[["told_prompt_tokens", "told_cached_tokens"]].item() == (
        1_010,
        500,
    )
    for number in range(NUM_KEPT):
        ring.note(decision(2.0 + number), NO_KEYS)
    ring.ended(old, 1, 1, 1, 9e9)
    assert np.isnan(read_decisions(memory)["told_cached_tokens"]).all()


def test_a_decision_that_is_being_written_is_left_out() -> None:
    memory = np.zeros((1, RING_BYTES), np.uint8)
    ring = ring_in(memory)
    for number in range(3):
        ring.note(decision(1.0 + number), NO_KEYS)
    torn = 2 * RECORD_BYTES
    memory[0, torn + RECORD_BYTES - 8] += 1
    assert read_decisions(memory)["at_s"].tolist() == [3.0, 1.0]


def test_hits_agreement_and_imbalance_are_of_each_engine() -> None:
    memory = np.zeros((1, RING_BYTES), np.uint8)
    ring = ring_in(memory)
    for cached in (512, 600, 0):
        ring.ended(ring.note(decision(1.0, 7), NO_KEYS), 1_000, cached, 5, 2.0)
    ring.note(decision(2.0, 9), NO_KEYS)
    names = {7: "a", 9: "b", 5: "c"}
    a, b, c = figures = figures_of(read_decisions(memory), names, {7: 10, 9: 20, 5: 0})
    assert (a.num_calls, a.num_pieces) == (3, 10)
    assert a.hit_rate == pytest.approx(1_112 / 3_000)
    assert a.agreement == pytest.approx(2 / 3)
    assert (b.num_calls, b.hit_rate, b.agreement) == (1, None, None)
    assert c.num_calls == 0
    assert imbalance_of(figures) == pytest.approx(3 / (4 / 3))
    assert (
        imbalance_of(
            figures_of(read_decisions(np.zeros_like(memory)), names, dict.fromkeys(names, 0))
        )
        is None
    )


def test_a_price_is_the_sum_of_its_terms() -> None:
    memory = np.zeros((1, RING_BYTES), np.uint8)
    ring_in(memory).note(decision(1.0), NO_KEYS)
    records = read_decisions(memory)
    document: dict[str, Any] = document_of("cost", [], records, {7: "a"}, 3.0)
    (shown,) = document["decisions"]
    assert shown["age_s"] == 2.0
    chosen, runner_up = shown["chosen"], shown["runner_up"]
    assert chosen["engine"] == "a"
    assert chosen["price_s"] == pytest.approx(0.5 + 0.25 + 0.5 + 0.125 + 1.0)
    assert chosen["delays_s"] == 0.5
    assert runner_up["engine"] is None
    assert shown["told_cached_tokens"] is None


def test_calls_that_ended_are_told_with_their_keys_as_long_as_these_are_kept() -> None:
    memory, kept = np.zeros((2, RING_BYTES), np.uint8), np.zeros((2, NUM_KEYS), np.uint64)
    rings = [DecisionRing(memoryview(memory[worker]), kept[worker]) for worker in range(2)]
    rng = random.Random(0)
    prompts = [_keys(rng, 128) for _ in range(600)]
    for number, keys in enumerate(prompts):
        ring = rings[number % 2]
        ring.ended(ring.note(decision(1.0 + number), keys), 1_010, 0, 7, 10.0 + number)
    running = rings[1].note(decision(650.0), NO_KEYS)
    num_of_ring = (NUM_KEYS - KEYS_AT_RISK) // 128

    told = ended_calls(memory, kept, 0.0, 700.0)
    newest = ended_calls(memory, kept, 10.0 + 597, 700.0)

    assert (told.num_decided, told.num_running, told.oldest_running_s) == (601, 1, 50.0)
    assert len(told.calls) == 2 * num_of_ring
    assert sorted(each.keys for each in newest.calls) == sorted(
        keys.tolist() for keys in prompts[598:]
    )
    assert {(each.prompt_tokens, each.output_tokens) for each in told.calls} == {(1_010, 7)}
    again = DecisionRing(memoryview(memory[1]), kept[1])
    again.ended(running, math.nan, math.nan, 3, 699.0)
    again.ended(again.note(decision(698.0), prompts[0]), math.nan, math.nan, 3, 699.0)
    last = ended_calls(memory, kept, 650.0, 700.0).calls
    assert [(each.prompt_tokens, each.keys) for each in last] == [
        (1_000, []), (1_000, prompts[0].tolist())
    ]  # fmt: skip


class Pair:
    """The shipped router and the plain one, told of the same calls."""

    def __init__(self, num_engines: int, num_pieces: int, rng: random.Random) -> None:
        traits = [
            EngineTraits(
                kv_tokens=rng.choice([20_000, 60_000]),
                max_running=rng.choice([8, 256]),
                prices=Prices(token_s=rng.choice([7.3e-5, 2e-4]), call_s=rng.choice([0.0, 1e-4])),
            )
            for _ in range(num_engines)
        ]
        plain = PlainBook(traits, num_pieces)
        self.routers: list[Router] = [
            make_router("cost", EngineBook.of(traits, num_pieces)),
            PlainCost(plain, random.Random(0)),
        ]
        self.calls: list[list[Sent]] = []

    def rank(self, call: Call, engines: list[int], now_s: float) -> list[int]:
        ranked, plainly = (router.rank(call, engines, now_s) for router in self.routers)
        assert ranked == plainly
        return ranked

    def send(self, call: Call, engine: int, now_s: float) -> None:
        ways = [router.sent(call, engine, now_s) for router in self.routers]
        assert ways[0].cached_tokens == ways[1].cached_tokens
        assert ways[0].prefill_s == ways[1].prefill_s
        self.calls.append(ways)

    def end(self, place: int, now_s: float, told: int | None) -> None:
        for router, way in zip(self.routers, self.calls.pop(place), strict=True):
            router.ended(way, now_s, told, None if told is None else 40)


@pytest.mark.parametrize(("seed", "num_engines"), [(0, 1), (1, 2), (2, 8), (3, 8), (4, 40)])
def test_the_shipped_router_ranks_as_its_plain_steps_do(seed: int, num_engines: int) -> None:
    """The map is small, so that pieces are evicted and many want one place."""
    rng = random.Random(seed)
    pair = Pair(num_engines, 1 << 9, rng)
    documents = [_keys(rng, rng.randrange(1, 60)) for _ in range(25)]
    now_s = 1.0
    for _ in range(1_500):
        now_s += rng.expovariate(30.0)
        if pair.calls and rng.random() < 0.45:
            told = rng.choice([None, 0, 4_000])
            pair.end(rng.randrange(len(pair.calls)), now_s + rng.random(), told)
            continue
        keys = np.concatenate([rng.choice(documents), _keys(rng, rng.randrange(0, 4))])
        tokens = math.ceil(len(keys) * PIECE_TOKENS) + rng.randrange(1, 200)
        call = Call(tokens, keys[: rng.choice([0, 3, len(keys)])], PIECE_TOKENS)
        engines = sorted(rng.sample(range(num_engines), rng.randrange(1, num_engines + 1)))
        ranked = pair.rank(call, engines, now_s)
        pair.send(call, rng.choice([ranked[0], ranked[-1]]), now_s)


def _keys(rng: random.Random, num: int) -> KeyArray:
    return np.array([rng.getrandbits(63) | 1 for _ in range(num)], np.uint64)
