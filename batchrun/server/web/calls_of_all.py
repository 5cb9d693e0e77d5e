"""What calls bring to the engines: as the gateways of all daemons count it, and by the minute.

A daemon that stands by lays into the database what its own gateway has counted. The leader reads
that, and adds up how far all of them have come since it began to look. The minutes that it knows
lie in the store too, so that whoever leads next goes on with the days before.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import astuple

import aiohttp
import msgspec
from msgspec import Struct
from msgspec.structs import astuple as counts_of

from batchrun.errors import StoreError
from batchrun.estimator.tide import DAY, MINUTE_S
from batchrun.routing.decisions import EndedCall
from batchrun.server.web.gateway_figures import EngineCalls, GatewayFigures
from batchrun.store import jobs
from batchrun.store.database import Store
from batchrun.wire import FeltCalls

log = logging.getLogger(__name__)

REPORT_S = 5.0
"""How often a daemon that stands by tells of its gateway."""
RENEW_S = 30.0
"""So often it tells also what has not changed."""
GAP_S = 150.0
"""What a gateway counted between two reports that lie so far apart is not known by the minute, and
not counted."""
REPORT_PREFIX = "calls:"
"""With it begins the key of the setting that holds a daemon's report."""
FORGET_S = 3_600.0
"""A report that has not changed for so long is removed: its daemon is gone."""
MISSED_S = 900.0
"""A gateway that has told nothing for less than this may serve calls still."""
MOST_LENGTHS = 1_000
Counts = tuple[int, ...]
SAVE_MINUTES = 5
"""How often minutes are kept."""


class CallReport(Struct, frozen=True):
    """What one gateway has counted since its start, by engine, and the (prompt, answer) tokens of
    the last calls that it saw answered."""

    at_s: float
    """When, by its machine's clock."""
    calls: dict[str, EngineCalls]
    felt: dict[str, FeltCalls]
    lengths: list[tuple[int, int]]

    def tells_more_than(self, before: CallReport) -> bool:
        """Whether it has to be told after the other."""
        return self.at_s >= before.at_s + RENEW_S or self.calls != before.calls


class OwnCalls:
    """The calls of a daemon's own gateway."""

    def __init__(self, figures: GatewayFigures) -> None:
        self._figures = figures
        self._lengths: deque[tuple[int, int]] = deque(maxlen=MOST_LENGTHS)
        self._since_s = 0.0

    async def report(self, now_s: float) -> CallReport | None:
        """As the gateway told last; None: not in the minute before `now_s` (monotonic)."""
        totals = self._figures.totals()
        if totals is None or self._figures.silent_s(now_s) >= MINUTE_S:
            return None
        told = await self._figures.ended_calls(self._since_s)
        if told is not None:
            self._since_s = told["now_s"]
            for call in msgspec.convert(told["calls"], list[EndedCall]):
                if call.output_tokens:
                    self._lengths.append((call.prompt_tokens, call.output_tokens))
        felt = self._figures.felt_calls() or {}
        return CallReport(time.time(), totals, felt, [*self._lengths])


async def keep_reporting(store: Store, daemon: str, figures: GatewayFigures) -> None:
    """Tell the leader what this daemon's gateway counts, until cancelled. While the database does
    not answer nothing is told."""
    own, last = OwnCalls(figures), CallReport(0.0, {}, {}, [])
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                now_s = time.monotonic()
                await figures.look(session, now_s)
                report = await own.report(now_s)
                if report is not None and report.tells_more_than(last):
                    value = msgspec.to_builtins(report)
                    await asyncio.to_thread(jobs.write_setting, store, _key(daemon), value)
                    last = report
            except StoreError as error:
                log.debug("the leader is not told of calls: %s", error)
            except Exception:
                log.exception("the leader is not told of calls here")
            await asyncio.sleep(REPORT_S)


class CallsOfAll:
    """The leader's: counts since it began to look, and the lengths of the last calls."""

    def __init__(self, store: Store, daemon: str, figures: GatewayFigures) -> None:
        """`daemon`: its name, whose earlier reports are not read."""
        self._store, self._own_key = store, _key(daemon)
        self._own = OwnCalls(figures)
        self._looking = asyncio.Lock()
        self._first_look_s = math.inf
        self._reports: dict[str, CallReport] = {}
        self._changed_s: dict[str, float] = {}
        self.are_all_heard = True
        """Whether each gateway that told calls in the last quarter of an hour did so in the minute
        before the last look: one whose daemon has died may serve on. What lay there at the first
        look counts as told then."""
        self.totals: dict[str, EngineCalls] = {}
        """By engine, what calls have brought."""
        self.felt: dict[str, FeltCalls] = {}
        """By engine, how they came to their callers."""

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(prompt, answer) tokens of the last calls of each gateway."""
        return [length for report in self._heard() for length in report.lengths]

    def cached_share(self, engines: Iterable[str]) -> float:
        """Of the prompt tokens that gateways have seen these engines compute or find cached."""
        names = set(engines)
        its = [
            each for report in self._heard() for name, each in report.calls.items() if name in names
        ]
        prompt = sum(each.num_prompt_tokens for each in its)
        return min(sum(each.num_cached_tokens for each in its) / prompt, 1.0) if prompt else 0.0

    async def look(self, now_s: float) -> bool:
        """Count on, at `now_s` (monotonic); False, and nothing is counted, where the database does
        not answer, or no gateway has told anything for a minute. The one here has a minute to
        begin."""
        async with self._looking:
            self._first_look_s = min(self._first_look_s, now_s)
            own = await self._own.report(now_s)
            if own is None and now_s < self._first_look_s + MINUTE_S:
                return False
            try:
                reports = await asyncio.to_thread(self._read)
            except StoreError:
                return False
            if own is not None:
                reports[self._own_key] = own
            for key, report in reports.items():
                self._count(key, report, now_s)
            await self._forget(now_s)
            ages_s = [now_s - at_s for at_s in self._changed_s.values()]
            self.are_all_heard = not any(MINUTE_S <= age_s < MISSED_S for age_s in ages_s)
            return any(age_s < MINUTE_S for age_s in ages_s)

    def _heard(self) -> Iterable[CallReport]:
        """Of gateways whose daemons are there."""
        return [self._reports[key] for key in self._changed_s]

    def _read(self) -> dict[str, CallReport]:
        found = {}
        for name, value in jobs.list_settings(self._store, REPORT_PREFIX).items():
            if (key := REPORT_PREFIX + name) != self._own_key:
                with suppress(msgspec.ValidationError):
                    found[key] = msgspec.convert(value, CallReport)
        return found

    def _count(self, key: str, now: CallReport, now_s: float) -> None:
        before = self._reports.get(key)
        if now != before:
            self._changed_s[key] = now_s
        self._reports[key] = now
        if before is None or now.at_s > before.at_s + GAP_S:
            return
        none = EngineCalls("", 0, 0, 0, 0)
        for engine, calls in now.calls.items():
            known, counts, earlier = (
                astuple(each)[1:]
                for each in (self.totals.get(engine, none), calls, before.calls.get(engine, none))
            )
            self.totals[engine] = EngineCalls(engine, *_gone_on(known, counts, earlier))
        nobody = FeltCalls()
        for engine, felt in now.felt.items():
            each = self.felt.get(engine, nobody), felt, before.felt.get(engine, nobody)
            self.felt[engine] = FeltCalls(*_gone_on(*map(counts_of, each)))

    async def _forget(self, now_s: float) -> None:
        """Remove reports of daemons that are gone. What they had counted stays known."""
        old = [key for key, at_s in self._changed_s.items() if now_s > at_s + FORGET_S]
        for key in old:
            del self._changed_s[key]
        if old:
            with suppress(StoreError):
                await asyncio.to_thread(jobs.replace_settings, self._store, old, {})


def _gone_on(known: Counts, now: Counts, before: Counts) -> Counts:
    """What is known, and what came since; counts that went back are those of another gateway."""
    if any(a < b for a, b in zip(now, before, strict=True)):
        before = (0,) * len(now)
    return tuple(k + a - b for k, a, b in zip(known, now, before, strict=True))


def _key(daemon: str) -> str:
    return REPORT_PREFIX + _digest(daemon)


class KnownMinutes(Struct, frozen=True):
    """Work a second of the minutes up to one, in UTC epoch minutes, the oldest first."""

    last_minute: int
    loads: list[float]


def read_minutes(store: Store, whose: str, now_minute: int) -> tuple[list[float], int]:
    """The minutes that were kept, and how many have passed since; none after a day without. Another
    machine's clock may be ahead. Blocking. Raises StoreError."""
    kept = jobs.read_setting(store, _minutes_key(whose), None)
    with suppress(msgspec.ValidationError):
        known = msgspec.convert(kept, KnownMinutes)
        missed = now_minute - 1 - known.last_minute
        if abs(missed) < DAY:
            return known.loads, max(missed, 0)
    return [], 0


def keep_minutes(store: Store, whose: str, loads: Iterable[float], now_minute: int) -> None:
    """Keep the minutes before this one. Blocking."""
    known = KnownMinutes(now_minute - 1, [round(load, 4) for load in loads])
    with suppress(StoreError):
        jobs.write_setting(store, _minutes_key(whose), msgspec.to_builtins(known))


def this_minute() -> int:
    """In UTC epoch minutes."""
    return int(time.time() / MINUTE_S)


def _minutes_key(whose: str) -> str:
    return "minutes:" + _digest(whose)


def _digest(name: str) -> str:
    """Names are longer than keys of settings may be."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]
