"""By how much a gateway takes a new call to be late, from the calls that it sent before."""

from __future__ import annotations

from itertools import accumulate
from random import Random

import numpy as np
import pytest

from batchrun.hints import SloBounds
from batchrun.pool.prefix_keys import KeyArray
from batchrun.routing.engine_book import Call, EngineBook, EngineTraits, Sent
from batchrun.routing.lateness import LEAST_PACES, LateCalls

NO_KEYS: KeyArray = np.empty(0, np.uint64)
CHAT = SloBounds(ttft_s=2.0, tpot_s=0.1)
SECONDS_A_TOKEN, STEP_S = 0.001, 0.5


def call(tokens: int) -> Call:
    return Call(tokens, NO_KEYS, 256)


class Line:
    """One engine that computes prompts one after the other, and who sends calls to it."""

    def __init__(self, num_engines: int = 1) -> None:
        self.book = EngineBook.of([EngineTraits()] * num_engines)
        self.late = LateCalls(self.book)
        self.now_s = 1.0

    def send(self, tokens: int, slo: SloBounds = CHAT, engine: int = 0) -> Sent:
        sent = self.book.sent(call(tokens), engine, self.now_s)
        self.late.sent(sent, slo)
        return sent

    def begin(self, sent: Sent) -> None:
        self.now_s += sent.call.prompt_tokens * SECONDS_A_TOKEN
        self.book.first_token(sent, self.now_s)
        self.late.began(sent, self.now_s)

    def begin_together(self, *sent: Sent) -> None:
        """In one step, which takes a while whatever is in it."""
        tokens = sum(each.call.prompt_tokens for each in sent)
        self.now_s += STEP_S + tokens * SECONDS_A_TOKEN
        for each in sent:
            self.book.first_token(each, self.now_s)
            self.late.began(each, self.now_s)

    def learn(self, num: int = LEAST_PACES + 1, engine: int = 0) -> None:
        """The first of them finds nobody, and tells nothing."""
        for sent in [self.send(100, engine=engine) for _ in range(num)]:
            self.begin(sent)

    def excess_s(self, tokens: int, slo: SloBounds = CHAT) -> float:
        return self.late.excess_s(call(tokens), slo, [0], self.now_s)[0]


def test_a_call_is_late_by_what_the_line_takes_beyond_its_bound() -> None:
    line = Line()
    line.learn()
    for _ in range(19):
        line.send(100)

    assert line.excess_s(100) == pytest.approx(0.0, abs=1e-9)
    line.send(100)
    assert line.excess_s(100) == pytest.approx(0.1)
    line.now_s += 1.0
    assert line.excess_s(100) == pytest.approx(0.1), "as long as no prompt ends"


def test_nothing_is_known_until_calls_have_found_others() -> None:
    line = Line()
    line.learn(LEAST_PACES)
    for _ in range(50):
        line.begin(line.send(100))
    for _ in range(99):
        line.send(100)
    assert line.excess_s(100) == 0


def test_what_a_call_waits_anyway_is_put_down_to_no_tokens() -> None:
    line = Line()
    for _ in range(LEAST_PACES):
        line.begin_together(line.send(30), line.send(30))
    line.send(900)
    assert line.excess_s(30) == 0


def test_a_step_that_a_call_finds_under_way_is_put_down_to_no_tokens() -> None:
    line, draw = Line(), Random(1)
    waiting: list[Sent] = []
    free_s = 0.0
    for came_s in accumulate((draw.expovariate(1.0) for _ in range(200)), initial=1.0):
        while waiting:
            line.now_s = max(free_s, waiting[0].at_s)
            step = [each for each in waiting if each.at_s <= line.now_s]
            if line.now_s + STEP_S + len(step) * 30 * SECONDS_A_TOKEN > came_s:
                break
            line.begin_together(*step)
            waiting, free_s = waiting[len(step) :], line.now_s
        line.now_s = came_s
        waiting.append(line.send(30))
    line.send(900)
    assert line.excess_s(30) == 0


def test_what_a_call_waits_anyway_comes_to_what_its_line_takes() -> None:
    line = Line()
    for _ in range(LEAST_PACES):
        under_way, behind = line.send(100), line.send(1_000)
        line.begin_together(under_way)
        line.begin_together(behind)
    for _ in range(20):
        line.send(100)
    assert line.excess_s(100) == pytest.approx(STEP_S + 0.1)


def test_only_what_goes_before_a_call_counts() -> None:
    line = Line()
    line.learn()
    slow = SloBounds(ttft_s=9.0, tpot_s=0.1)
    for _ in range(50):
        line.send(100, slow)
    assert line.excess_s(100) == 0, "those are due later"
    assert line.excess_s(100, SloBounds(ttft_s=2.0, tpot_s=0.1, jct_s=20.0)) == 0
    assert line.excess_s(4_500, slow) == pytest.approx(0.5)

    valued = SloBounds(ttft_s=9.0, tpot_s=0.1, value=3.0)
    for _ in range(30):
        line.send(100, valued)
    assert line.excess_s(100) == pytest.approx(1.1), "worth more, they go first"
    assert line.excess_s(100, SloBounds(ttft_s=2.0, tpot_s=0.1, value=5.0)) == 0


def test_what_is_late_already_goes_last_and_what_left_is_gone() -> None:
    line = Line()
    line.learn()
    sent = [line.send(100) for _ in range(30)]
    assert line.excess_s(100) == pytest.approx(1.1)
    line.now_s += CHAT.ttft_s + 0.1
    assert line.excess_s(100) == 0
    line.now_s -= CHAT.ttft_s + 0.1
    for each in sent:
        line.book.ended(each, line.now_s)
        line.late.left(each)
    assert line.excess_s(100) == 0


def test_a_prompt_that_takes_too_long_by_itself_is_no_reason_to_come_back_later() -> None:
    line = Line()
    line.learn()
    for _ in range(30):
        line.send(100)
    assert line.excess_s(2_001) == 0
    assert line.excess_s(1_999) > 0


def test_each_engine_has_a_line_of_its_own() -> None:
    line = Line(2)
    line.learn()
    for _ in range(30):
        line.send(100)
    late_s = line.late.excess_s(call(100), CHAT, [0, 1], line.now_s)
    assert late_s[0] > 0
    assert late_s[1] == 0
