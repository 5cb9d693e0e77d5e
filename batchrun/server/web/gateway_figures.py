"""What the gateway has counted, as the page shows it: the last minutes of its calls.

The gateway counts from its start on; here a look every two seconds is kept, and the newest is
compared with one of five minutes ago.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import msgspec

from batchrun.home import GATEWAY_HEADER, ROUTING_PATH, TALLY_PATH
from batchrun.server.gateway.tally import (
    EJECTED,
    ENDED,
    ENGINE,
    FELT,
    REPLACED,
    STUCK,
    TPOT,
    TPOT_BOUNDS_S,
    TTFT,
    TTFT_BOUNDS_S,
)
from batchrun.wire import FeltCalls

log = logging.getLogger(__name__)

WINDOW_S = 300.0
TIMEOUT_S = 1.5
RATE_S = 10.0
"""Over how long a rate is taken."""

Key = tuple[str, tuple[str, ...]]
Look = Mapping[Key, Sequence[float]]
JsonObject = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineCalls:
    """Calls of the last minutes that went to an engine, with what their replies told."""

    engine: str
    num_calls: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Felt:
    """How long calls of a class took as their callers felt it: counts by upper bound, and sums.

    `buckets` has one count more than there are bounds.
    """

    slo_class: str
    num_calls: int
    mean_s: float
    buckets: Sequence[float]

    def quantile_s(self, share: float, bounds: Sequence[float]) -> float | None:
        """The bound that this share of calls stayed within; None: above the last."""
        wanted, seen = share * self.num_calls, 0.0
        for bound, count in zip(bounds, self.buckets, strict=False):
            seen += count
            if seen >= wanted:
                return bound
        return None


@dataclass(slots=True)
class GatewayFigures:
    """Looks at the gateway at `url` when told to. `secret` is what it lets the daemon in with."""

    url: str
    secret: str = field(repr=False)
    _looks: deque[tuple[float, Look]] = field(default_factory=deque)
    _ejected_s: Mapping[str, float] = field(default_factory=dict)

    async def look(self, session: aiohttp.ClientSession, now_s: float) -> None:
        """Take a look at `now_s` (monotonic); a gateway that does not answer is looked at later."""
        await self._ask(session, TALLY_PATH, lambda told: self.take(told, now_s))

    async def explain(self, most: int) -> JsonObject | None:
        """Why the last calls went where they went, the newest `most` of them one by one; see
        `batchrun.routing.decisions.document_of`. None: the gateway does not answer."""
        return await self._ask_routing(f"most={most}")

    async def ended_calls(self, since_s: float) -> JsonObject | None:
        """The calls that ended after this instant of the gateway's clock, with the keys of their
        prompts. None: the gateway does not answer."""
        return await self._ask_routing(f"since={since_s:f}")

    async def _ask_routing(self, query: str) -> JsonObject | None:
        async with aiohttp.ClientSession() as session:
            return await self._ask(
                session, f"{ROUTING_PATH}?{query}", msgspec.json.Decoder(JsonObject).decode
            )

    async def _ask(
        self, session: aiohttp.ClientSession, path: str, read: Callable[[bytes], T]
    ) -> T | None:
        """What `read` makes of the answer; None: the gateway does not answer."""
        try:
            async with session.get(
                self.url + path,
                headers={GATEWAY_HEADER: self.secret},
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            ) as reply:
                if reply.status == 200:
                    return read(await reply.read())
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            log.debug("the gateway told nothing: %s", error)
        return None

    def take(self, text: bytes, now_s: float) -> None:
        """Keep what the gateway told. Counts that went back are those of another gateway."""
        told = msgspec.json.decode(text, type=list[tuple[str, tuple[str, ...], list[float]]])
        look = {(kind, labels): values for kind, labels, values in told if kind != EJECTED}
        self._ejected_s = {names[0]: left[0] for kind, names, left in told if kind == EJECTED}
        if self._looks and _sum(look) < _sum(self._looks[-1][1]):
            self._looks.clear()
        for why, said in ((STUCK, "were stuck"), (ENDED, "ended")):
            before = _num_replaced(self._looks[-1][1] if self._looks else look, why)
            if (num := _num_replaced(look, why) - before) > 0:
                line = "workers of the gateway that %s and were replaced: %d; gateway.log has more"
                log.error(line, said, num)
        self._looks.append((now_s, look))
        while self._looks[0][0] < now_s - WINDOW_S:
            self._looks.popleft()

    def ejected_s(self, engine: str) -> float:
        """For how long the gateway sends the engine no calls, as it told last."""
        return self._ejected_s.get(engine, 0.0)

    def num_replaced(self, why: str) -> int:
        """Workers that the gateway had to replace since its start, as it told last."""
        return _num_replaced(self._looks[-1][1], why) if self._looks else 0

    def silent_s(self, now_s: float) -> float:
        """For how long the gateway has told nothing; 0 until it has told anything."""
        return max(0.0, now_s - self._looks[-1][0]) if self._looks else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that online calls had computed, over the last seconds; None: nobody knows."""
        if len(self._looks) < 2:
            return None
        newest_s, newest = self._looks[-1]
        before_s, before = next(
            (each for each in self._looks if each[0] >= newest_s - RATE_S), self._looks[0]
        )
        if newest_s <= before_s:
            return None
        return (_computed(newest) - _computed(before)) / (newest_s - before_s)

    def engines(self) -> list[EngineCalls]:
        """By engine, what the last minutes brought."""
        return [calls for _, calls in sorted(_calls_in(self._news()).items())]

    def totals(self) -> dict[str, EngineCalls] | None:
        """By engine, what its calls brought since the gateway's start, as it told last; None:
        never."""
        return _calls_in(self._looks[-1][1]) if self._looks else None

    def felt(self, kind: str) -> list[Felt]:
        """TTFT or TPOT of the last minutes by class; classes without calls are left out."""
        found: list[Felt] = []
        for (each, labels), values in sorted(self._news().items()):
            *buckets, total_s = values
            num_calls = sum(buckets)
            if each == kind and num_calls:
                found.append(Felt(labels[0], round(num_calls), total_s / num_calls, buckets))
        return found

    def felt_calls(self) -> dict[str, FeltCalls] | None:
        """By engine, how calls came to their callers, as the gateway told last; None: never."""
        return _felt_in(self._looks[-1][1]) if self._looks else None

    def promises(self, engine: str) -> JsonObject | None:
        """How calls of the last minutes came to their callers; None without calls."""
        told = _felt_in(self._news()).get(engine)
        return msgspec.to_builtins(told) if told is not None and told.num_first else None

    def view(self) -> list[dict[str, Any]]:
        """`felt` of both latencies as JSON objects; half of the calls stayed within `p50_s`, 99 of
        100 within `p99_s`."""
        return [
            {
                "latency": name,
                "slo_class": each.slo_class,
                "num_calls": each.num_calls,
                "mean_s": each.mean_s,
                "p50_s": each.quantile_s(0.5, bounds),
                "p99_s": each.quantile_s(0.99, bounds),
            }
            for name, kind, bounds in (("TTFT", TTFT, TTFT_BOUNDS_S), ("TPOT", TPOT, TPOT_BOUNDS_S))
            for each in self.felt(kind)
        ]

    def _news(self) -> dict[Key, list[float]]:
        """What was counted since the oldest look."""
        if not self._looks:
            return {}
        (_, oldest), (_, newest) = self._looks[0], self._looks[-1]
        return {
            key: [
                now - before
                for now, before in zip(values, oldest.get(key, [0.0] * len(values)), strict=True)
            ]
            for key, values in newest.items()
        }


def _calls_in(look: Look) -> dict[str, EngineCalls]:
    return {
        labels[0]: EngineCalls(labels[0], *(round(value) for value in values[:4]))
        for (kind, labels), values in look.items()
        if kind == ENGINE
    }


def _felt_in(look: Look) -> dict[str, FeltCalls]:
    return {
        labels[0]: FeltCalls(*(max(0, round(value)) for value in values[:4]))
        for (kind, labels), values in look.items()
        if kind == FELT
    }


def _computed(look: Look) -> float:
    engines = (values for (kind, _), values in look.items() if kind == ENGINE)
    return sum(prompt - cached + output for _, prompt, cached, output, *_ in engines)


def _num_replaced(look: Look, why: str) -> int:
    return round(look.get((REPLACED, (why,)), [0.0])[0])


def _sum(look: Look) -> float:
    return sum(map(sum, look.values()))
