"""What is kept of requests and steps while a phase runs, and the figures made of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from batchrun.simulator.replay import OnlineResult
from benchmarks.replay import Figures, Promise, online_figures


@dataclass(slots=True)
class RequestLife:
    """One request. Instants are seconds since the phase began; None: has not happened.

    `num_hit_tokens` are the prompt tokens found cached at the first admission.
    """

    is_online: bool
    arrival_at_s: float
    num_prompt_tokens: int
    admitted_at_s: float | None = None
    num_hit_tokens: int = 0
    finished_at_s: float | None = None
    is_done: bool = False
    token_times_s: list[float] = field(default_factory=list)

    def admit(self, now_s: float, num_hit_tokens: int) -> None:
        """Note an admission; only the first one counts."""
        if self.admitted_at_s is None:
            self.admitted_at_s, self.num_hit_tokens = now_s, num_hit_tokens


@dataclass(slots=True)
class StepTotals:
    """One entry per step that computed something: when it was scheduled, tokens, planning time."""

    at_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_offline_tokens: list[int] = field(default_factory=list)
    planning_s: list[float] = field(default_factory=list)

    def add(self, at_s: float, num_tokens: int, num_offline_tokens: int, planning_s: float) -> None:
        """Count a step."""
        self.at_s.append(at_s)
        self.num_tokens.append(num_tokens)
        self.num_offline_tokens.append(num_offline_tokens)
        self.planning_s.append(planning_s)

    def since(self, begin_s: float) -> StepTotals:
        """The steps scheduled from `begin_s` on."""
        first = next((i for i, at_s in enumerate(self.at_s) if at_s >= begin_s), len(self.at_s))
        return StepTotals(
            self.at_s[first:],
            self.num_tokens[first:],
            self.num_offline_tokens[first:],
            self.planning_s[first:],
        )


@dataclass(frozen=True, slots=True)
class Span:
    """The measured part of a phase, in seconds since it began."""

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """How long it is."""
        return self.end_s - self.begin_s


def figures(
    requests: Iterable[RequestLife], totals: StepTotals, span: Span, promise: Promise
) -> Figures:
    """All figures of a phase. Every call that arrived in the span and whose TTFT bound has passed
    counts; one without its first token then is a miss."""
    lives = list(requests)
    online = [life for life in lives if life.is_online and life.arrival_at_s >= span.begin_s]
    judged = [life for life in online if life.arrival_at_s <= span.end_s - promise.ttft_s]
    offline = [life for life in lives if not life.is_online]
    steps = totals.since(span.begin_s)
    return {
        **online_figures([_online_result(life, span.end_s) for life in judged], promise),
        **_offline_figures(offline, span),
        "computed_tokens_per_s": sum(steps.num_tokens) / span.length_s,
        "offline_computed_tokens_per_s": sum(steps.num_offline_tokens) / span.length_s,
        "steps": len(steps.at_s),
        "plan_ms": 1e3 * median(steps.planning_s) if steps.planning_s else None,
    }


def _online_result(life: RequestLife, end_s: float) -> OnlineResult:
    times_s = [at_s - life.arrival_at_s for at_s in life.token_times_s]
    return OnlineResult(
        arrived_at_s=life.arrival_at_s,
        ttft_s=times_s[0] if times_s else None,
        e2e_s=times_s[-1] if times_s else end_s - life.arrival_at_s,
        itl_s=tuple(b - a for a, b in pairwise(times_s)),
        num_output_tokens=len(times_s),
        error=None if times_s else "no token before the phase ended",
    )


def _offline_figures(lives: Sequence[RequestLife], span: Span) -> Figures:
    done = [
        life
        for life in lives
        if life.is_done
        and life.finished_at_s is not None
        and span.begin_s <= life.finished_at_s < span.end_s
    ]
    served = sum(life.num_prompt_tokens + len(life.token_times_s) for life in done)
    admitted = [
        life
        for life in lives
        if life.admitted_at_s is not None and span.begin_s <= life.admitted_at_s < span.end_s
    ]
    prompt = sum(life.num_prompt_tokens for life in admitted)
    hits = sum(life.num_hit_tokens for life in admitted)
    waits_s = [_first_wait_s(life, span.end_s) for life in lives]
    return {
        "offline_tokens_per_s": served / span.length_s,
        "offline_rows_per_s": len(done) / span.length_s,
        "offline_rows": len(done),
        "prefix_hit_rate": hits / prompt if prompt else None,
        "offline_longest_wait_s": max(waits_s, default=None),
    }


def _first_wait_s(life: RequestLife, end_s: float) -> float:
    admitted_at_s = end_s if life.admitted_at_s is None else life.admitted_at_s
    return admitted_at_s - life.arrival_at_s
