"""What goes wrong with rows: suspects of an engine's death, retries, refusals, a bad setting.

A death costs the loading of a model, so the guilty row is to be found in few of them. Of n suspects
only about sqrt(n) run at once, among rows that are none; when the engine dies again, these alone
stay suspects: 4 deaths for 256 rows, where halving would take 8. A few are run one by one, with no
other row on their engine.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from batchrun.jobs.results.output_file import response_text
from batchrun.strict import LARGE_JSON_BYTES, parse_json
from batchrun.types import Outcome, OutcomeKind, RowError
from batchrun.wire import RowKey

if TYPE_CHECKING:
    from batchrun.daemon.in_flight import Demand, EngineSlot

SOLO = 1
"""The limit of a suspect that runs with no other row on its engine."""
MAX_SOLO_ROWS = 8
"""So few suspects run one by one."""
MAX_SOLO_DEATHS = 2
"""A row that was alone so often when its engine died ends. The first may be someone's `kill`."""
MAX_PRESENCES = 3
"""A row that was there so often is a suspect though no step held it: it may kill its parser."""
TRIAL_S = 45.0
"""A suspect that killed nothing in so long is let go: a hang is noticed sooner."""
TRIAL_ROWS = 2
"""Or for so many times as long as rows take."""
TRIAL_GROWTH = 4
MAX_PATIENCE = 16
"""One that is a suspect again afterwards has so many times as long: it may be slow to kill."""


@dataclass(slots=True)
class Trials:
    """The suspects among the rows of a job.

    `limits`: the most suspects that may be on an engine together with this one, itself included.
    """

    limits: dict[int, int] = field(default_factory=dict)
    _presences: dict[int, int] = field(default_factory=dict)
    _solo_deaths: dict[int, int] = field(default_factory=dict)
    _patience: dict[int, int] = field(default_factory=dict)

    def was_there(self, row: int) -> bool:
        """An engine died with the row in flight. True when that is no chance any more."""
        self._presences[row] = self._presences.get(row, 0) + 1
        return self._presences[row] >= MAX_PRESENCES

    def accuse(self, row: int, limit: int, *, was_alone: bool) -> None:
        """The row is a suspect now, or still; `was_alone`: it had been sent to run solo."""
        if was_alone:
            self._solo_deaths[row] = self._solo_deaths.get(row, 0) + 1
        self.limits[row] = limit

    def is_guilty(self, row: int) -> bool:
        """Whether the row kills engines beyond doubt."""
        return self._solo_deaths.get(row, 0) >= MAX_SOLO_DEATHS

    def let_go(self, row: int, ran_s: float, trial_s: float) -> bool:
        """Whether a suspect that has run for `ran_s` is none any more, so that it holds up no other
        row; `trial_s` is how long that takes at first."""
        patience = self._patience.get(row, 1)
        if ran_s < trial_s * patience:
            return False
        self._patience[row] = min(patience * TRIAL_GROWTH, MAX_PATIENCE)
        self.limits.pop(row, None)
        return True

    def clear(self, row: int) -> None:
        """The row has ended."""
        for known in (self.limits, self._presences, self._solo_deaths, self._patience):
            known.pop(row, None)


def accuse_rows(
    in_flight: Mapping[RowKey, Trials],
    last_steps: Collection[RowKey],
    alone: Collection[RowKey] = (),
) -> frozenset[RowKey]:
    """An engine died: make suspects of the rows in flight that its last steps held, or of all when
    they held none. Where these were suspects before, those alone stay it. Returns all accused.

    `in_flight` has the trials of each row's job; those `alone` were sent to run solo.
    """
    haunting = {key for key, trials in in_flight.items() if trials.was_there(key[1])}
    held = {key for key in in_flight if key in last_steps} or set(in_flight)
    tried = {key for key in held if key[1] in in_flight[key].limits}
    accused = frozenset((tried or held) | haunting)
    limit = SOLO if len(accused) <= MAX_SOLO_ROWS else math.isqrt(len(accused))
    for key in accused:
        in_flight[key].accuse(key[1], limit, was_alone=key in alone)
    return accused


JSON_FORMATS = ("json_object", "json_schema")
_SHOWN_CHARS = 80


async def checked_answer(endpoint: str, body: Mapping[str, object], outcome: Outcome) -> Outcome:
    """The outcome of a request; a row error where its answer was to be JSON and is not. A long
    answer is read in a thread."""
    wanted = body.get("response_format")
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if outcome.body is None or kind not in JSON_FORMATS:
        return outcome
    if len(outcome.body) > LARGE_JSON_BYTES:
        return await asyncio.to_thread(_checked_json, endpoint, outcome, outcome.body)
    return _checked_json(endpoint, outcome, outcome.body)


def _checked_json(endpoint: str, outcome: Outcome, reply: bytes) -> Outcome:
    text = response_text(endpoint, reply) or ""
    try:
        parse_json(text.encode())
    except ValueError as failure:
        is_long = len(text) > LARGE_JSON_BYTES
        why = f"cannot be read as JSON ({failure})" if is_long else "is not JSON"
        if outcome.finish_reason == "length":
            num_tokens = outcome.usage.num_output_tokens
            why = f"was cut off after {num_tokens:,} tokens, before its JSON ended"
        error = RowError("invalid_json", f"the answer {why}: {text[:_SHOWN_CHARS]!r}", 200)
        return replace(outcome, kind=OutcomeKind.ROW_ERROR, body=None, error=error)
    return outcome


COMPANY_WAIT_S = 300.0
"""Suspects wait so long for a second engine; then they run on the only one."""


@dataclass(slots=True)
class TrialEngine:
    """Chooses the engine that is set apart, and gives it back to all when no suspect is left."""

    slots: Sequence[EngineSlot]
    slot: EngineSlot | None = None
    _alone_since_s: float | None = None
    _away_since_s: float | None = None

    def set_apart(self, now_s: float, *, has_suspects: bool) -> bool:
        """Choose, keep or give back the engine. Returns whether suspects wait for it; else they go
        where all rows go. One that runs there keeps it apart."""
        apart = [slot.in_flight.values() for slot in self.slots if slot.is_set_apart]
        runs = any(each.row in each.trials.limits for rows in apart for each in rows)
        if not (has_suspects or runs):
            self._alone_since_s = None
        living = [slot for slot in self.slots if not slot.is_lost] if has_suspects or runs else []
        if len(living) < 2 or self._is_alone(now_s):
            self._give_back()
            return False
        if self.slot is not None and (self.slot.is_lost or self._is_away(self.slot, now_s)):
            self._give_back()
        usable = [slot for slot in living if slot.is_usable]
        if self.slot is None and len(usable) >= 2:
            self.slot = min(usable, key=lambda slot: slot.load.tokens_in_flight)
            self.slot.is_set_apart = True
        return has_suspects

    @property
    def number(self) -> int | None:
        """The number of the engine that is set apart."""
        return None if self.slot is None else self.slots.index(self.slot)

    def find_room(self, demand: Demand, now_s: float) -> int | None:
        """The engine that is set apart, if a suspect may go there now."""
        slot = self.slot
        if slot is None or not slot.is_usable or not slot.is_left_alone(now_s):
            return None
        return self.number if slot.has_room_for(demand, now_s) else None

    def _is_alone(self, now_s: float) -> bool:
        """Whether no second engine has answered for long."""
        others = [slot for slot in self.slots if slot is not self.slot and slot.is_usable]
        if len(others) >= (2 if self.slot is None else 1):
            self._alone_since_s = None
        elif self._alone_since_s is None:
            self._alone_since_s = now_s
        return self._alone_since_s is not None and now_s - self._alone_since_s > COMPANY_WAIT_S

    def _is_away(self, slot: EngineSlot, now_s: float) -> bool:
        """Whether the engine that is set apart has not answered for long: its machine may never
        come back."""
        if slot.is_usable:
            self._away_since_s = None
        elif self._away_since_s is None:
            self._away_since_s = now_s
        return self._away_since_s is not None and now_s - self._away_since_s > COMPANY_WAIT_S

    def _give_back(self) -> None:
        self._away_since_s = None
        if self.slot is not None:
            self.slot.is_set_apart, self.slot.apart_since_s = False, None
            self.slot = None


FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 60.0


def retry_delay_s(attempt: int, retry_after_s: float | None, rng: random.Random) -> float:
    """Exponential with full jitter on the upper half; never less than the engine asked for.

    `attempt` is the attempt that just failed, starting at 1.
    """
    ceiling_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (attempt - 1))
    delay_s = rng.uniform(ceiling_s / 2, ceiling_s)
    return max(delay_s, min(retry_after_s or 0.0, LONGEST_DELAY_S))


MAX_REFUSALS = 20
"""A row that is refused so often while other rows are taken has to do with it after all."""
MAX_REFUSALS_IN_ALL = 100
"""Or so often at all: with the longest waits between, an hour and a half."""


PROBE_S = 5.0


@dataclass(slots=True)
class Backpressure:
    """How many rows one engine takes, by its own account: halved when it refuses one, and one more
    for each limit's worth that it takes (additive increase, multiplicative decrease).

    Instants are monotonic. Without a refusal there is no limit. Rows in flight may never end, so
    that one more goes every `PROBE_S` after a rest, whatever is in flight.
    """

    limit_rows: float = math.inf
    rests_until_s: float = -math.inf
    num_taken: int = 0
    _num_in_a_row: int = 0
    _probe_at_s: float = -math.inf

    def allows(self, num_rows: int, now_s: float) -> bool:
        """Whether another row may go beside `num_rows` in flight."""
        if now_s < self.rests_until_s:
            return False
        return num_rows < self.limit_rows or now_s >= self._probe_at_s

    def sent(self, num_rows: int, now_s: float) -> None:
        """A row goes beside `num_rows` in flight."""
        if num_rows >= self.limit_rows:
            self._probe_at_s = now_s + PROBE_S

    def refused(
        self, num_rows: int, retry_after_s: float | None, now_s: float, rng: random.Random
    ) -> None:
        """The engine refused one of `num_rows` rows. Those sent before a rest count as one."""
        if now_s >= self.rests_until_s:
            self._num_in_a_row += 1
            self.limit_rows = max(min(self.limit_rows, num_rows) / 2, 1.0)
        delay_s = retry_delay_s(max(self._num_in_a_row, 1), retry_after_s, rng)
        self.rests_until_s = max(self.rests_until_s, now_s + delay_s)
        self._probe_at_s = self.rests_until_s + PROBE_S

    def taken(self, max_rows: int) -> None:
        """The engine answered a row; a limit above `max_rows` is none."""
        self.num_taken += 1
        self._num_in_a_row = 0
        self.limit_rows += 1 / self.limit_rows
        if self.limit_rows > max_rows:
            self.limit_rows = math.inf


@dataclass(slots=True)
class Refusals:
    """How often each row of a job was refused, and how often of these while others were taken."""

    _seen: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def are_enough(self, row: int, num_taken: int) -> bool:
        """A row was refused once more, by an engine that has taken `num_taken` rows so far.

        True when that is no chance any more.
        """
        num_in_all, num_alone, before = self._seen.get(row, (0, 0, -1))
        num_in_all, num_alone = num_in_all + 1, num_alone + (num_taken != before)
        self._seen[row] = num_in_all, num_alone, num_taken
        return num_alone > MAX_REFUSALS or num_in_all > MAX_REFUSALS_IN_ALL

    def forget(self, row: int) -> None:
        """The row has ended."""
        self._seen.pop(row, None)


IDENTICAL_ERRORS_LIMIT = 20
UNAUTHORIZED = 401
NUM_ALIKE = 3
"""So many rows that fail alike, before any succeeds, speak for all others."""
MAX_DOUBTS = 3
MAX_RESTS = 16
"""Seven minutes in all, or more."""
DOUBT_WAIT_S = 1.0
"""A row whose fault may be its job's goes again after so long, so often."""


class Verdict(StrEnum):
    """What an error means that every row of a job might get, such as a 404."""

    ROW = "row"
    JOB = "job"
    REST = "rest"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class Doubts:
    """Tells a row's own fault from its job's: the job's is that rows fail alike and none succeeds.

    `num_ok` counts the rows that succeeded. A batch of OpenAI's API waits for the operator only
    where an engine does not know him: its caller cannot resume it. Else it rests, and asks again,
    `MAX_RESTS` times: the fault may be the caller's after all.
    """

    num_ok: int = 0
    is_batch: bool = False
    _num_rests: int = 0
    _seen: dict[int, tuple[int, int]] = field(default_factory=dict)
    _alike: dict[tuple[int | None, str], set[int]] = field(default_factory=dict)
    _awaited: set[int] | None = None
    _num_ok_at: dict[int, int] = field(default_factory=dict)

    def succeeded(self, engine: int = 0) -> None:
        """A row has an answer: what failed before it was not the job's fault."""
        self.num_ok += 1
        self._num_ok_at[engine] = self.num_ok
        self._num_rests = 0
        self._alike.clear()
        self._awaited = None

    def judge(
        self, row: int, error: RowError, in_flight: Collection[int], engine: int = 0
    ) -> Verdict:
        """A row failed; `in_flight` are the rows of the job that are. It is its own fault where the
        engine has answered others since it failed last: another engine may be at fault."""
        num_times, num_ok_then = self._seen.get(row, (0, self.num_ok))
        if num_ok_then < self._num_ok_at.get(engine, 0):
            return self._ended(row)
        self._seen[row] = num_times + 1, self.num_ok
        if self._are_alike(row, error) and not self._may_succeed(in_flight):
            if not self.is_batch or error.status_code == UNAUTHORIZED:
                return Verdict.JOB
            if self._num_rests < MAX_RESTS:
                return Verdict.REST
        return self._ended(row) if num_times >= MAX_DOUBTS else Verdict.UNKNOWN

    def rest_s(self, rng: random.Random) -> float:
        """For how long the batch rests now: longer each time, until a row succeeds."""
        self._num_rests += 1
        return retry_delay_s(self._num_rests, None, rng)

    def _are_alike(self, row: int, error: RowError) -> bool:
        """Whether rows enough have failed so, this one among them."""
        alike = self._alike.setdefault((error.status_code, error.message), set())
        alike.add(row)
        return len(alike) >= (IDENTICAL_ERRORS_LIMIT if self.num_ok else NUM_ALIKE)

    def _may_succeed(self, in_flight: Collection[int]) -> bool:
        """Whether a row is in flight still that was when there were enough, and has not failed."""
        awaited = set(in_flight) if self._awaited is None else self._awaited.intersection(in_flight)
        self._awaited = awaited - self._seen.keys()
        return bool(self._awaited)

    def _ended(self, row: int) -> Verdict:
        self._seen.pop(row, None)
        return Verdict.ROW


class CircuitBreaker:
    """Watches the final outcomes of one job and says when the job should pause: one bad setting
    never burns a million rows.

    `max_failed_rows` is the most failed rows that the job bears (None: any number);
    `num_failed_rows` is how many have failed since its last `resume`; `max_identical` is how many
    may fail alike in a row.
    """

    def __init__(
        self,
        max_failed_rows: int | None,
        num_failed_rows: int = 0,
        *,
        max_identical: float = IDENTICAL_ERRORS_LIMIT,
    ) -> None:
        self._max_identical = max_identical
        self._max_failed_rows = max_failed_rows
        self._num_failed_rows = num_failed_rows
        self._last_error: tuple[str, str] | None = None
        self._num_identical = 0

    def see(self, outcome: Outcome) -> str | None:
        """Count a final outcome; returns the one-line reason to pause the job, or None."""
        if outcome.kind is OutcomeKind.OK or outcome.error is None:
            self._last_error, self._num_identical = None, 0
            return None
        self._num_failed_rows += 1
        error = (outcome.error.code, outcome.error.message)
        self._num_identical = self._num_identical + 1 if error == self._last_error else 1
        self._last_error = error
        if self._num_identical >= self._max_identical:
            return f"{self._max_identical} rows in a row failed alike: {outcome.error.message}"
        limit = self._max_failed_rows
        if limit is not None and self._num_failed_rows > limit:
            return (
                f"{self._num_failed_rows} rows failed, more than max_failed allows "
                f"({limit}); last: {outcome.error.message}"
            )
        return None
