"""An API server takes calls one after another, each by the length of its prompt, and rows beside
them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from batchrun.simulator.cluster import FrontEnd, FrontEndTimes
from batchrun.simulator.virtual.engine import Arrival

TIMES = FrontEndTimes(request_s=0.01, token_s=0.001)


class Given:
    """A source of arrivals that are known beforehand."""

    def __init__(self, *arrivals: tuple[float, int], is_online: bool = True) -> None:
        self._left = [
            Arrival(f"{at_s}", is_online, at_s, [7] * tokens, 1) for at_s, tokens in arrivals
        ]
        self.finished: list[str] = []

    @property
    def next_due_s(self) -> float:
        return self._left[0].arrival_at_s if self._left else math.inf

    def take_due(self, now_s: float) -> list[Arrival]:
        due = [arrival for arrival in self._left if arrival.arrival_at_s <= now_s]
        del self._left[: len(due)]
        return due

    def on_finished(self, request_id: str) -> None:
        self.finished.append(request_id)


def test_a_request_is_due_when_its_prompt_is_tokenized() -> None:
    front = FrontEnd([Given((1.0, 90))], TIMES)

    assert front.next_due_s == 1.0
    assert front.take_due(1.0) == []
    assert front.next_due_s == pytest.approx(1.1)
    (arrival,) = front.take_due(1.11)
    assert arrival.arrival_at_s == 1.0
    assert front.next_due_s == math.inf


@pytest.mark.parametrize("is_online", [True, False])
def test_a_short_request_waits_for_the_long_one_before_it(*, is_online: bool) -> None:
    long, short = (Given(each, is_online=is_online) for each in ((1.0, 990), (1.5, 10)))
    front = FrontEnd([short, long], TIMES)

    assert front.take_due(1.9) == []
    assert [a.arrival_at_s for a in front.take_due(2.001)] == [1.0]
    assert front.next_due_s == pytest.approx(2.02)
    assert [a.arrival_at_s for a in front.take_due(2.03)] == [1.5]


def test_a_call_waits_for_no_row() -> None:
    rows, calls = Given((1.0, 990), (1.0, 990), is_online=False), Given((1.5, 10))
    front = FrontEnd([calls, rows], TIMES)
    front.take_due(1.5)

    assert front.next_due_s == pytest.approx(1.52)
    assert [a.arrival_at_s for a in front.take_due(1.53)] == [1.5]
    assert front.next_due_s == pytest.approx(2.0)
    assert len(front.take_due(2.001)) == len(front.take_due(3.001)) == 1


def test_a_request_to_an_idle_server_waits_for_nobody() -> None:
    front = FrontEnd([Given((1.0, 10), (5.0, 10))], TIMES)
    front.take_due(1.0)
    front.take_due(1.02)

    front.take_due(5.0)
    assert front.next_due_s == pytest.approx(5.02)


def test_latency_passes_for_each_request_and_holds_nobody_up() -> None:
    front = FrontEnd([Given((1.0, 90), (1.0, 90))], replace(TIMES, latency_s=0.5))
    front.take_due(1.0)

    assert front.next_due_s == pytest.approx(1.6)
    assert len(front.take_due(1.601)) == 1
    assert front.next_due_s == pytest.approx(1.7)


def test_ends_are_told_to_every_source() -> None:
    sources = Given(), Given()
    FrontEnd(sources, TIMES).on_finished("row-1")

    assert [source.finished for source in sources] == [["row-1"], ["row-1"]]
