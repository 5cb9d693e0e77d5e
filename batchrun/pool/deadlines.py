"""Deadlines of jobs: which are kept, what share of the capacity that takes, and which are missed.

Fair shares are enough while every job would finish by them in time, with a margin. Otherwise each
job claims the least share that keeps its deadline, and the rest stays fair.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field

from batchrun.pool.finish_times import (
    LEAST_LEFT_S,
    MOST_SHARE,
    JobWork,
    Kept,
    fair_finishes_s,
    needed_shares,
    tokens_before,
)

HYSTERESIS = 0.05
"""A job that was in time must be over by this share before it is not, and the other way round."""
PERSISTENCE = 0.05
"""It must be so for this share of the time left: one wave of online load changes no answer."""
CLEARLY = 0.25
"""When it is over by this share, the answer changes at once."""
NEWS_RATIO = 2.0
NEWS_S = 60.0
"""A delay is told again when it has grown by such a factor, to more than that of a minute."""


@dataclass(frozen=True, slots=True)
class Margins:
    """How early a job is to finish, because the forecast errs.

    `reserve` is a share of its whole time, so that a burst of online load in its last minutes does
    no harm. The others are shares of the time left before that: `fair` is what fair shares must
    leave over, or the deadline is claimed; `rate` is what a claimed rate leaves over.
    """

    reserve: float = 0.05
    fair: float = 0.2
    rate: float = 0.05


DEFAULT_MARGINS = Margins()


@dataclass(frozen=True, slots=True)
class Outlook:
    """What becomes of a deadline. `laxity_s` is the time to spare; below 0: it will be missed.

    `forecast_tokens_per_s` is what the job could have at most, beside the deadlines that are kept.
    """

    job_id: str
    is_kept: bool
    laxity_s: float
    needed_tokens_per_s: float
    forecast_tokens_per_s: float

    def __str__(self) -> str:
        if self.is_kept:
            return "will meet its deadline"
        return (
            f"will miss its deadline by about {_about(-self.laxity_s)}; needs "
            f"{self.needed_tokens_per_s:,.0f} tokens/s, the forecast is "
            f"{self.forecast_tokens_per_s:,.0f}"
        )


@dataclass(slots=True)
class Deadline:
    """One job's deadline, and what was said of it last."""

    due_at: float
    reserve_s: float | None = None
    is_kept: bool = True
    contrary_since: float | None = None
    outlook: Outlook | None = None
    told: Outlook | None = None

    def answer(self, fill: float, now_s: float) -> bool:
        """Whether the deadline is kept, when the job's work takes `fill` of the room for it."""
        over = fill - 1 if self.is_kept else 1 - fill
        if over <= HYSTERESIS:
            self.contrary_since = None
            return self.is_kept
        if self.contrary_since is None:
            self.contrary_since = now_s
        lasted_s = now_s - self.contrary_since
        if over > CLEARLY or lasted_s >= PERSISTENCE * (self.due_at - now_s):
            self.is_kept = not self.is_kept
            self.contrary_since = None
        return self.is_kept


@dataclass(slots=True)
class Deadlines:
    """The deadlines of the running jobs; instants are on the clock of `now_s`.

    A job that joins later never takes the deadline of one that joined earlier: it is kept only
    where there is room beside those. A deadline that cannot be kept claims nothing.
    """

    margins: Margins = DEFAULT_MARGINS
    _deadlines: dict[str, Deadline] = field(default_factory=dict, init=False)
    _news: list[Outlook] = field(default_factory=list, init=False)

    def join(self, job_id: str, due_at: float) -> None:
        """A job must be done at `due_at`."""
        self._deadlines[job_id] = Deadline(due_at)

    def leave(self, job_id: str) -> None:
        """The job has ended or is paused."""
        self._deadlines.pop(job_id, None)
        self._news = [outlook for outlook in self._news if outlook.job_id != job_id]

    def outlook(self, job_id: str) -> Outlook | None:
        """What the last review said of a job; None without deadline or forecast."""
        deadline = self._deadlines.get(job_id)
        return deadline.outlook if deadline else None

    def take_news(self) -> list[Outlook]:
        """Outlooks that changed since the last call: to be missed, kept after all, much later."""
        news, self._news = self._news, []
        return news

    def review(
        self, now_s: float, capacity: float, lag_s: float, works: Mapping[str, JobWork]
    ) -> dict[str, float]:
        """The shares of the capacity that deadlines claim, the earliest first; often none.

        `works` names all running jobs. `lag_s` passes between handing out a row and its result.
        """
        if not self._deadlines:
            return {}
        kept = self._keep(now_s, capacity, works)
        times_s = [k.left_s - (self._deadlines[k.job_id].reserve_s or 0.0) for k in kept]
        finishes_s = fair_finishes_s(works, capacity)
        if all(
            finishes_s[k.job_id] <= time_s * (1 - self.margins.fair) - lag_s
            for k, time_s in zip(kept, times_s, strict=True)
        ):
            return {}
        times_s = [time_s * (1 - self.margins.rate) - lag_s for time_s in times_s]
        return needed_shares(kept, times_s, capacity)

    def _keep(self, now_s: float, capacity: float, works: Mapping[str, JobWork]) -> list[Kept]:
        """The deadlines that fit beside each other, by time; what is said of the rest."""
        kept: list[Kept] = []
        for job_id, deadline in self._deadlines.items():
            left_s = max(deadline.due_at - now_s, LEAST_LEFT_S)
            if deadline.reserve_s is None:
                deadline.reserve_s = self.margins.reserve * left_s
            work = works[job_id]
            rate = MOST_SHARE * capacity
            least = work.tokens * (1 - work.doubt)
            room = rate * left_s - tokens_before(kept, least, left_s, rate)
            is_kept = deadline.answer(least / max(room, 1.0), now_s)
            before = tokens_before(kept, work.tokens, left_s, rate)
            deadline.outlook = Outlook(
                job_id,
                is_kept=is_kept,
                laxity_s=left_s - (before + work.tokens) / rate,
                needed_tokens_per_s=work.tokens / left_s,
                forecast_tokens_per_s=max(rate - before / left_s, 0.0),
            )
            self._tell(deadline, deadline.outlook)
            if is_kept:
                insort(kept, Kept(left_s, job_id, work.tokens))
        return kept

    def _tell(self, deadline: Deadline, outlook: Outlook) -> None:
        told = deadline.told
        if outlook.is_kept == (told is None or told.is_kept):
            told_late_s = NEWS_S if told is None else max(-told.laxity_s, NEWS_S)
            if outlook.is_kept or -outlook.laxity_s < NEWS_RATIO * told_late_s:
                return
        deadline.told = outlook
        self._news.append(outlook)


def _about(duration_s: float) -> str:
    if duration_s < 90:
        return f"{max(duration_s, 1):.0f} s"
    if duration_s < 5400:
        return f"{duration_s / 60:.0f} min"
    return f"{duration_s / 3600:.1f} h"
