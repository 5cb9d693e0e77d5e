"""The calls of `benchmarks.cpu_online_queue`: what they ask, what they are promised, and how the
promises were kept."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median

from batchrun.config import SloConfig
from batchrun.errors import EngineError
from batchrun.simulator.replay import (
    CallArrival,
    OnlineResult,
    ReplayTarget,
    TokenRange,
    make_prompt,
    percentile,
    replay,
)
from benchmarks.records import Record
from benchmarks.replay import TraceShape, generate_trace, summarize
from benchmarks.text_jobs import MODEL


@dataclass(frozen=True, slots=True)
class CallClass:
    """One kind of call: its share of all, its lengths (prompts in words), and how much longer than
    the shortest the TPOT bound is. Where a server is told priorities, the smaller goes first."""

    name: str
    share: float
    prompt_words: TokenRange
    answer: TokenRange
    tpot_factor: float
    priority: int


ANSWER = TokenRange(mu=2.5, sigma=0.4, min_tokens=4, max_tokens=32)
CLASSES = (
    CallClass("interactive", 0.75, TokenRange(5.0, 0.5, 40, 500), ANSWER, 1.0, 0),
    CallClass("documents", 0.25, TokenRange(7.6, 0.5, 800, 6_000), ANSWER, 2.0, 1),
)
TTFT_TIMES_ALONE = 10.0
"""The TTFT bound of a class over the median TTFT of its calls alone."""
TPOT_MARGIN = 1.25
"""The shortest TPOT bound over the longest steps of stock vLLM: where it is full, it keeps it."""
ALONE_EVERY_S = {"interactive": 0.4, "documents": 1.2}
NUM_ALONE, NUM_SATURATING = 8, 160
CALL_LIMIT_S = 120.0
"""A call that has not ended by then starves."""

Calls = Mapping[str, Sequence[CallArrival]]
Results = Mapping[str, Sequence[OnlineResult]]
Bounds = Mapping[str, SloConfig]


@dataclass(frozen=True, slots=True)
class Bursts:
    """`number` times `burst_s` of calls at `factor` times the capacity, and `quiet_s` at
    `quiet_factor` times."""

    number: int = 2
    burst_s: float = 8.0
    quiet_s: float = 5.0
    factor: float = 1.3
    quiet_factor: float = 0.2

    @property
    def span_s(self) -> float:
        """The length of a window."""
        return self.number * (self.burst_s + self.quiet_s)

    def draw(self, capacity_per_s: float, seed: int) -> Calls:
        """The calls of a window, by class; Poisson arrivals."""
        return {
            each.name: generate_trace(
                TraceShape(
                    duration_s=self.span_s,
                    rate_per_s=each.share * capacity_per_s * self.quiet_factor,
                    burst_factor=self.factor / self.quiet_factor,
                    burst_period_s=self.burst_s + self.quiet_s,
                    burst_length_s=self.burst_s,
                    prompt=each.prompt_words,
                    output=each.answer,
                ),
                seed=len(CLASSES) * seed + number,
            )
            for number, each in enumerate(CLASSES)
        }


def alone_calls() -> Calls:
    """Calls that come one at a time: all of a class, then all of the next."""
    begin_s, calls = 0.0, {}
    for each in CLASSES:
        drawn = _drawn(each, NUM_ALONE, f"alone {each.name}")
        every_s = ALONE_EVERY_S[each.name]
        calls[each.name] = [
            CallArrival(begin_s + number * every_s, call.prompt, call.max_tokens)
            for number, call in enumerate(drawn)
        ]
        begin_s += NUM_ALONE * every_s
    return calls


def saturating_calls(number: int = NUM_SATURATING) -> Calls:
    """So many calls of all classes, all at once."""
    return {
        each.name: _drawn(each, round(number * each.share), f"full {each.name}") for each in CLASSES
    }


def _drawn(each: CallClass, number: int, seed: str) -> list[CallArrival]:
    rng = Random(seed)
    return [
        CallArrival(0.0, make_prompt(each.prompt_words.draw(rng), rng=rng), each.answer.draw(rng))
        for _ in range(number)
    ]


@dataclass(frozen=True, slots=True)
class Address:
    """Where calls go, and what is told of their class: nothing, vLLM's priority, or its name."""

    base_url: str
    tells_priority: bool = False
    tells_class: bool = False
    body: Mapping[str, object] = field(
        default_factory=lambda: {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    )

    async def send(self, calls: Calls, salt: str) -> Results:
        """All calls, each at its time; those of another `salt` find nothing of theirs cached."""
        targets = {
            each.name: ReplayTarget(
                self.base_url,
                MODEL,
                timeout_s=CALL_LIMIT_S,
                extra_body={
                    **self.body,
                    "cache_salt": salt,
                    **({"priority": each.priority} if self.tells_priority else {}),
                },
                headers={"x-batchrun-class": each.name} if self.tells_class else {},
            )
            for each in CLASSES
        }
        answers = await asyncio.gather(*(replay(calls[name], targets[name]) for name in targets))
        return dict(zip(targets, answers, strict=True))


def capacity_per_s(saturated: Results) -> float:
    """Calls that ended in a second while there were always more. Raises EngineError when one
    failed."""
    results = [result for each in saturated.values() for result in each]
    failed = [result.error for result in results if result.error is not None]
    if failed:
        raise EngineError(f"{len(failed)} calls failed before the windows; the first: {failed[0]}")
    return len(results) / max(result.e2e_s for result in results)


def bounds_of(alone: Results, saturated: Results) -> Bounds:
    """What each class is promised, by what this machine does.

    A first token in `TTFT_TIMES_ALONE` times what it takes alone; the mean time of the others in
    `TPOT_MARGIN` times the gaps between tokens when vLLM's steps are full, 99 of 100 of them, and
    for some classes more.
    """
    gaps_s = [gap_s for results in saturated.values() for r in results for gap_s in r.itl_s]
    longest_s = percentile(gaps_s, 0.99)
    assert longest_s is not None
    return {
        each.name: SloConfig(
            ttft_s=TTFT_TIMES_ALONE
            * median(math.inf if r.ttft_s is None else r.ttft_s for r in alone[each.name]),
            tpot_s=TPOT_MARGIN * each.tpot_factor * longest_s,
        )
        for each in CLASSES
    }


SHOWN = ("slo_attainment", "slo_ttft", "slo_tpot", "ttft_p50_s", "ttft_p99_s", "tpot_p99_s")


def judge(results: Results, bounds: Bounds, span_s: float) -> Record:
    """How a window went: calls whose TTFT and TPOT were in bounds per second, the longest wait for
    a first token, in seconds and in bounds of its class, and by class."""
    by_class = {
        name: summarize(each, slo_ttft_s=bounds[name].ttft_s, slo_tpot_s=bounds[name].tpot_s)
        for name, each in results.items()
    }
    kept = sum(round((s["slo_attainment"] or 0.0) * s["arrived"]) for s in by_class.values())
    arrived = sum(s["arrived"] for s in by_class.values())
    waits = {name: s["online_longest_wait_s"] or 0.0 for name, s in by_class.items()}
    return {
        "window_s": span_s,
        "arrived": arrived,
        "failed": sum(s["failed"] for s in by_class.values()),
        "goodput_per_s": kept / span_s,
        "slo_met": kept / arrived,
        "longest_wait_s": max(waits.values()),
        "longest_wait_bounds": max(waits[name] / bounds[name].ttft_s for name in waits),
        **{f"{name}_longest_wait_s": wait_s for name, wait_s in waits.items()},
        **{f"{name}_{key}": s[key] for name, s in by_class.items() for key in SHOWN},
    }


def num_different(ours: Results, theirs: Results) -> int:
    """Calls whose answers differ in a token between two runs of the same calls."""
    return sum(
        one.token_ids != other.token_ids or not one.token_ids
        for name in ours
        for one, other in zip(ours[name], theirs[name], strict=True)
    )
