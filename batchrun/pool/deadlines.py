"""Deadlines of jobs: which are kept, what share of the capacity that takes, and which are missed.

Fair shares are enough while every job would finish by them in time, with a margin. Otherwise each
job claims the least share that keeps its deadline: what its fair share lacks of that goes to it in
turns of its own, and the rest stays fair. The deadlines of a bounded owner are kept only as far as
its own share goes. Work is in computed tokens, rates are computed tokens per
second of all engines together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from batchrun.pool.job_shares import OPERATOR, Owner
from batchrun.quantities import duration

MOST_SHARE = 0.95
"""Deadlines never take more than this of the capacity: every job goes on."""
LEAST_LEFT_S = 1.0
"""Times to a deadline are no shorter than this, so that rates stay finite."""


class JobWork(NamedTuple):
    """What a job has left; `doubt` is how far `tokens` may be off, as a share. One that waits takes
    part in no fair share now. `num`: it stands for as many of its owner and weight."""

    weight: float
    tokens: float
    doubt: float
    owner: Owner = OPERATOR
    is_waiting: bool = False
    num: int = 1


class Kept(NamedTuple):
    """A deadline to keep: seconds until it passes, the job, and what the job has left."""

    left_s: float
    job_id: str
    tokens: float


@dataclass(slots=True)
class _KeptWork:
    """Deadlines to keep at a rate, by time, and the work up to each."""

    rate: float
    kept: list[Kept] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)

    def add(self, entry: Kept) -> None:
        place = bisect_right(self.kept, entry)
        self.kept.insert(place, entry)
        before = self.totals[place - 1] if place else 0.0
        tokens = (each.tokens for each in self.kept[place:])
        self.totals[place:] = [*accumulate(tokens, initial=before)][1:]

    def tokens_before(self, tokens: float, left_s: float) -> float:
        """How much of it goes before a job with `tokens`, due in `left_s`: that with an earlier
        deadline, and what would be late if the job went first."""
        first = bisect_right(self.kept, left_s, key=lambda each: each.left_s)
        for place in range(len(self.kept) - 1, first - 1, -1):
            if self.totals[place] + tokens > self.rate * self.kept[place].left_s:
                return self.totals[place]
        return self.totals[first - 1] if first else 0.0


def fair_finishes_s(works: Mapping[str, JobWork], capacity: float) -> dict[str, float]:
    """When each job would be done if all owners got their fair share, and their jobs of that, and
    what is over where one ends.

    Takes the work at its most, estimates in doubt included.
    """
    owners: dict[Owner, list[tuple[float, float, str]]] = {}
    for job_id, work in works.items():
        level = work.tokens * (1 + work.doubt) / work.weight
        owners.setdefault(work.owner, []).append((level, work.weight, job_id))
    ends: list[tuple[float, float, str]] = []
    for jobs in owners.values():
        weight = max(weight for _, weight, _ in jobs)
        served = [(tokens / weight, 0.0, job_id) for job_id, tokens in _served_until(jobs)]
        ends += [*served[:-1], (served[-1][0], weight, served[-1][2])]
    return {job_id: tokens / capacity for job_id, tokens in _served_until(ends)}


def _served_until(ends: Iterable[tuple[float, float, str]]) -> list[tuple[str, float]]:
    """What all together have got at each end, in their order; `ends` are the level of one, the
    weight that takes part no longer then, and a name."""
    ordered = sorted(ends)
    weight_left = sum(weight for _, weight, _ in ordered)
    found: list[tuple[str, float]] = []
    level = served = 0.0
    for end_level, weight, name in ordered:
        served += (end_level - level) * weight_left
        found.append((name, served))
        level = end_level
        weight_left -= weight
    return found


def owner_shares(works: Mapping[str, JobWork]) -> dict[Owner, float]:
    """The part of the capacity that each owner has by fair share: it weighs as its heaviest job."""
    heaviest: dict[Owner, float] = {}
    for work in works.values():
        heaviest[work.owner] = max(heaviest.get(work.owner, 0.0), work.weight)
    total = sum(heaviest.values())
    return {owner: weight / total for owner, weight in heaviest.items()}


def fair_parts(works: Mapping[str, JobWork]) -> dict[str, float]:
    """The part of the capacity that each job has by fair share while all of these run."""
    weights = defaultdict[Owner, float](float)
    for work in works.values():
        weights[work.owner] += work.num * work.weight
    parts = {owner: part / weights[owner] for owner, part in owner_shares(works).items()}
    return {i: parts[work.owner] * work.num * work.weight for i, work in works.items()}


def claimed_parts(works: Mapping[str, JobWork], claims: Mapping[str, float]) -> dict[str, float]:
    """The part of the capacity that each job has: its claim, or its fair part of what the claims
    leave where that is more. Those of a bounded owner come out of its own part."""
    claims = {job_id: claim for job_id, claim in claims.items() if job_id in works}
    bounded = {works[job_id].owner for job_id in claims if works[job_id].owner.is_bounded}
    free = {i: claim for i, claim in claims.items() if works[i].owner not in bounded}
    parts = _divide(fair_parts(works), free)
    owned: dict[Owner, dict[str, float]] = {owner: {} for owner in bounded}
    for job_id, work in works.items():
        if work.owner in owned:
            owned[work.owner][job_id] = parts[job_id]
    for own in owned.values():
        parts |= _divide(own, {i: claims[i] for i in own if i in claims})
    return parts


def _divide(fair: Mapping[str, float], claims: Mapping[str, float]) -> dict[str, float]:
    """All that the `fair` parts add up to, of which claims get `MOST_SHARE` at most."""
    whole, claimed = sum(fair.values()), sum(claims.values())
    scale = min(1.0, MOST_SHARE * whole / claimed) if claimed else 1.0
    parts, held = dict(fair), dict[str, float]()
    while over := {i: scale * claim for i, claim in claims.items() if scale * claim > parts[i]}:
        held |= over
        left = whole - sum(held.values())
        rest = sum(part for job_id, part in fair.items() if job_id not in held)
        parts = {i: held[i] if i in held else part / rest * left for i, part in fair.items()}
    return parts


def tokens_ahead(works: Mapping[str, JobWork], claims: Mapping[str, float]) -> dict[str, float]:
    """How many tokens all jobs together compute until each of them is done.

    `claims` are shares of the capacity that some have at least; the rest is shared by weight.
    """
    ahead, total = dict[str, float](), 0.0
    left = {job_id: max(work.tokens, 0.0) for job_id, work in works.items()}
    while claims.keys() & left.keys():
        for passed, ended in _first_ends({i: works[i] for i in left}, claims, left):
            total += passed
            ahead[ended] = total
    unclaimed = {
        job_id: works[job_id]._replace(tokens=max(tokens, 0.0), doubt=0.0)
        for job_id, tokens in left.items()
    }
    finishes = fair_finishes_s(unclaimed, capacity=1.0)
    return ahead | {job_id: total + finishes[job_id] for job_id in unclaimed}


def _first_ends(
    works: Mapping[str, JobWork], claims: Mapping[str, float], left: dict[str, float]
) -> Iterator[tuple[float, str]]:
    """The next jobs to end, each after so many tokens of all; they leave `left`. It stops where
    other jobs are alike, or no claim is left."""
    groups = _alike(works, claims)
    for ids in groups.values():
        ids.sort(key=left.__getitem__, reverse=True)
    running = {i: works[i]._replace(num=len(ids)) for i, ids in groups.items()}
    claimed = {i: sum(claims.get(job_id, 0.0) for job_id in ids) for i, ids in groups.items()}
    most = {i: max(claims.get(job_id, 0.0) for job_id in ids) for i, ids in groups.items()}
    claimers, got, ended = claims.keys() & works.keys(), dict.fromkeys(groups, 0.0), ""
    while claimers:
        parts = {i: part / running[i].num for i, part in claimed_parts(running, claimed).items()}
        if ended and any(most[i] >= parts[i] for i, ids in groups.items() if len(ids) > 1):
            break
        passed, first = min(((left[ids[-1]] - got[i]) / parts[i], i) for i, ids in groups.items())
        got = {i: got[i] + part * passed for i, part in parts.items()}
        ended = groups[first].pop()
        claimers.discard(ended)
        claimed[first] = max(claimed[first] - claims.get(ended, 0.0), 0.0)
        running[first] = running[first]._replace(num=len(groups[first]))
        if not groups[first]:
            del groups[first], running[first]
        del left[ended]
        yield passed, ended
    left.update((job_id, left[job_id] - got[i]) for i, ids in groups.items() for job_id in ids)


def _alike(works: Mapping[str, JobWork], claims: Mapping[str, float]) -> dict[str, list[str]]:
    """Jobs of one owner and weight whose claims, if any, are below their fair parts, by the first
    of them; each of the others alone."""
    parts, firsts = claimed_parts(works, claims), dict[tuple[Owner, float], str]()
    groups: dict[str, list[str]] = {}
    for job_id, work in works.items():
        is_alone = claims.get(job_id, 0.0) >= parts[job_id]
        first = job_id if is_alone else firsts.setdefault((work.owner, work.weight), job_id)
        groups.setdefault(first, []).append(job_id)
    return groups


def needed_shares(
    kept: Sequence[Kept], times_s: Sequence[float], capacity: float
) -> dict[str, float]:
    """The least shares of the capacity that do the kept work in these times, the earliest first.

    The densities of Yao, Demers and Shenker (FOCS 1995, section 2): the work up to a deadline over
    the time for it. The greatest so far is the rate that the jobs up to there need together, and
    each job claims what it adds to that of those before it.
    """
    shares: dict[str, float] = {}
    share = 0.0
    totals = accumulate(k.tokens for k in kept)
    for entry, time_s, total in zip(kept, times_s, totals, strict=True):
        up_to_here = min(total / max(time_s, LEAST_LEFT_S) / capacity, MOST_SHARE)
        if up_to_here > share:
            shares[entry.job_id] = up_to_here - share
            share = up_to_here
    return shares


HYSTERESIS = 0.05
"""A job that was in time must be over by this share before it is not, and the other way round."""
PERSISTENCE = 0.05
"""It must be so for this share of the time left: one wave of online load changes no answer."""
CLEARLY = 0.25
"""When it is over by this share, the answer changes at once."""
NEWS_RATIO = 2.0
NEWS_S = 60.0
"""A delay is announced again when it has grown by such a factor, to more than that of a minute."""


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
            f"will miss its deadline by about {duration(max(-self.laxity_s, 1.0))}; needs "
            f"{self.needed_tokens_per_s:,.0f} tokens/s, the forecast is "
            f"{self.forecast_tokens_per_s:,.0f}"
        )


@dataclass(slots=True)
class Deadline:
    """One job's deadline, and what was said of it last; `seq` counts jobs as they came."""

    deadline_at: float
    seq: int = 0
    reserve_s: float | None = None
    is_kept: bool = True
    contrary_since: float | None = None
    outlook: Outlook | None = None
    announced: Outlook | None = None

    def answer(self, fill: float, now_s: float) -> bool:
        """Whether the deadline is kept, when the job's work takes `fill` of the room for it."""
        over = fill - 1 if self.is_kept else 1 - fill
        if over <= HYSTERESIS:
            self.contrary_since = None
            return self.is_kept
        if self.contrary_since is None:
            self.contrary_since = now_s
        lasted_s = now_s - self.contrary_since
        if over > CLEARLY or lasted_s >= PERSISTENCE * (self.deadline_at - now_s):
            self.is_kept = not self.is_kept
            self.contrary_since = None
        return self.is_kept


@dataclass(slots=True)
class Deadlines:
    """The deadlines of the running jobs; instants are on the clock of `now_s`.

    A job that came later never takes the deadline of one that came earlier: it is kept only where
    there is room beside those. A deadline that cannot be kept claims nothing.
    """

    margins: Margins = DEFAULT_MARGINS
    _deadlines: dict[str, Deadline] = field(default_factory=dict, init=False)
    _news: list[Outlook] = field(default_factory=list, init=False)

    def join(self, job_id: str, deadline_at: float, seq: int = 0) -> None:
        """A job must be done at `deadline_at`."""
        deadlines = self._deadlines | {job_id: Deadline(deadline_at, seq)}
        self._deadlines = dict(sorted(deadlines.items(), key=lambda item: item[1].seq))

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

        `works` names all running jobs that share it. `lag_s` passes between handing out a row and
        its result.
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
        rate, owned = MOST_SHARE * capacity, dict[Owner, _KeptWork]()
        whole = _KeptWork(rate)
        sharing = {job_id: work for job_id, work in works.items() if not work.is_waiting}
        shares = owner_shares(sharing)
        for job_id, deadline in [each for each in self._deadlines.items() if each[0] in works]:
            left_s = max(deadline.deadline_at - now_s, LEAST_LEFT_S)
            if deadline.reserve_s is None:
                deadline.reserve_s = self.margins.reserve * left_s
            work = works[job_id]
            least, parts = work.tokens * (1 - work.doubt), [whole]
            if work.owner.is_bounded:
                if work.owner not in owned:
                    if work.owner not in shares:
                        shares[work.owner] = owner_shares(sharing | {job_id: work})[work.owner]
                    owned[work.owner] = _KeptWork(rate * shares[work.owner])
                parts.append(owned[work.owner])
            room = min(each.rate * left_s - each.tokens_before(least, left_s) for each in parts)
            is_kept = deadline.answer(least / max(room, 1.0), now_s)
            before = whole.tokens_before(work.tokens, left_s)
            deadline.outlook = Outlook(
                job_id,
                is_kept=is_kept,
                laxity_s=left_s - (before + work.tokens) / rate,
                needed_tokens_per_s=work.tokens / left_s,
                forecast_tokens_per_s=max(rate - before / left_s, 0.0),
            )
            self._announce(deadline, deadline.outlook)
            if is_kept:
                for each in parts:
                    each.add(Kept(left_s, job_id, work.tokens))
        return whole.kept

    def _announce(self, deadline: Deadline, outlook: Outlook) -> None:
        last = deadline.announced
        if outlook.is_kept == (last is None or last.is_kept):
            last_late_s = NEWS_S if last is None else max(-last.laxity_s, NEWS_S)
            if outlook.is_kept or -outlook.laxity_s < NEWS_RATIO * last_late_s:
                return
        deadline.announced = outlook
        self._news.append(outlook)


PATIENCE = 0.5
"""Share of a quantum for which a job waits until the subtree before it is handed out."""
MOST_DEBT = 0.25
"""A job is ahead of its share by no more than this part of the work that it has left: the less it
has left, the longer would it wait until the others have caught up."""


class Claim(NamedTuple):
    """The share of all tokens that a job needs, and the tokens that it has left."""

    share: float
    left_tokens: float


class UrgentTurns:
    """Keeps claims on shares of all tokens that are handed out, earliest deadline first.

    A job's credit grows by its share of every token handed out, and falls by its own tokens. It
    takes the turn when there is credit, and keeps it until its subtree is handed out or it is a
    quantum ahead of its share. A new job starts with a quantum of credit: it goes at once. Tokens
    that it got by fair share count as well, so a claim below the fair share changes nothing.
    """

    def __init__(self, quantum_tokens: int) -> None:
        self._quantum_tokens = quantum_tokens
        self._claims: dict[str, Claim] = {}
        self._credits: dict[str, float] = {}
        self._turn: str | None = None

    def claim(self, claims: Mapping[str, Claim]) -> None:
        """From now on these shares (0 to 1, together below 1), the earliest deadline first."""
        self._claims = dict(claims)
        for job_id in claims:
            self._credits.setdefault(job_id, self._quantum_tokens)

    def leave(self, job_id: str) -> None:
        """The job claims nothing any more."""
        self._claims.pop(job_id, None)
        self._credits.pop(job_id, None)
        self.end_turn(job_id)

    def choose(self, ready: AbstractSet[str], *, is_between_turns: bool) -> str | None:
        """The ready job with the earliest deadline that is behind its share, or None.

        `is_between_turns`: no fair turn would be interrupted.
        """
        if not self._claims:
            return None
        is_free = is_between_turns and self._turn not in ready
        least_credit = 0.0 if is_free else PATIENCE * self._quantum_tokens
        for job_id, claim in self._claims.items():
            least = self._least_credit(claim) if job_id == self._turn else least_credit
            if self._credits[job_id] > least and job_id in ready:
                self._turn = job_id
                return job_id
        self._turn = None
        return None

    def charge(self, job_id: str, tokens: int, *, is_urgent: bool = True) -> None:
        """A row of any job was handed out, urgent or by fair share.

        Tokens by fair share lower a credit no further than to its least. A row by a claim is owed
        in full, or claims would get more than their shares and leave nothing to the others; but
        for the last rows of a job, which are few.
        """
        for claimer, claim in self._claims.items():
            before = self._credits[claimer]
            credit = before + claim.share * tokens
            if claimer == job_id:
                credit -= tokens
                if not is_urgent or self._ends_soon(claim):
                    credit = max(credit, min(before, self._least_credit(claim)))
            self._credits[claimer] = min(credit, self._quantum_tokens)

    def end_turn(self, job_id: str) -> None:
        """The job's subtree is handed out."""
        if self._turn == job_id:
            self._turn = None

    def check(self, job_ids: AbstractSet[str]) -> None:
        """Raises AssertionError when a claim is out of bounds, or not of one of these jobs."""
        assert sum(claim.share for claim in self._claims.values()) < 1
        assert self._claims.keys() <= self._credits.keys() <= job_ids
        assert all(credit <= self._quantum_tokens for credit in self._credits.values())

    def _ends_soon(self, claim: Claim) -> bool:
        return MOST_DEBT * claim.left_tokens < self._quantum_tokens

    def _least_credit(self, claim: Claim) -> float:
        return -min(self._quantum_tokens, MOST_DEBT * claim.left_tokens)
