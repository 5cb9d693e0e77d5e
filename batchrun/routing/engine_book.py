"""What all routers know of the engines: what each costs, what was sent there, what it holds.

Who sends a call tells the book of its way: sent, first token, end. Several gateway workers share
one book: each writes a row of loads that is its own, and reads the sum of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from statistics import fmean
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchrun.pool.prefix_keys import IntArray, KeyArray
from batchrun.routing.prefix_map import Arrays, Floats, Held, PrefixMap

FIELDS = ("calls", "prompt_tokens", "waiting_calls", "waiting_tokens", "waiting_s", "moved_at_s")
_CALLS, _PROMPT, _WAITING, _WAITING_TOKENS, _WAITING_S, _MOVED_AT = range(len(FIELDS))
ANSWERS = 1000
"""Calls over which the mean answer, the mean prompt and the mean stay are learnt."""
_NUM_ENDED, _ANSWER, _LENGTH, _STAY = range(4)
_MEANS = slice(_ANSWER, _STAY + 1)
"""In `PrefixMap.answers`: how many calls were answered, and these means."""
FIRST_ANSWER_TOKENS = 128.0
MIN_GAP_S = 1e-3
BEYOND_PIECES = 0.5
"""What is shared ends somewhere in a piece: in the mean so much of it is held, too."""


Tokens = npt.NDArray[np.int64] | npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prices:
    """What an engine's steps cost in seconds, from its profile; where no engine has one, these for
    all, since only their ratios tell."""

    base_s: float = 0.0145
    token_s: float = 7.3e-5
    pair_s: float = 2.4e-9
    call_s: float = 0.0
    context_token_s: float = 9.4e-8

    def prefill_s(self, num_tokens: int, num_cached: int) -> float:
        """Seconds that a prompt's uncached part adds to the steps it is computed in."""
        missed = num_tokens - num_cached
        return missed * (self.token_s + self.pair_s * (num_cached + 0.5 * missed))

    def added_s(
        self, prompt_tokens: Tokens, cached_tokens: Tokens, output_tokens: Tokens
    ) -> Floats:
        """Seconds that each of these calls adds to steps: its prompt's uncached part, and what its
        tokens add to those of a batch that runs anyway."""
        missed = prompt_tokens - cached_tokens
        prefill_s = missed * (self.token_s + self.pair_s * (cached_tokens + 0.5 * missed))
        contexts = prompt_tokens + 0.5 * output_tokens
        decode_s = output_tokens * (self.call_s + contexts * self.context_token_s)
        return np.asarray(prefill_s + decode_s, np.float64)

    def decode_s(self, num_calls: float, context_tokens: float) -> float:
        """Seconds of a step in which so many calls decode."""
        return self.base_s + num_calls * self.call_s + context_tokens * self.context_token_s


def with_means(known: Sequence[Prices | None]) -> list[Prices | None]:
    """Those that are not known are the means of the others, if there are any."""
    found = [each for each in known if each is not None]
    if not found:
        return list(known)
    means = {key.name: fmean(getattr(each, key.name) for each in found) for key in fields(Prices)}
    return [Prices(**means) if each is None else each for each in known]


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What does not change while an engine runs."""

    kv_tokens: int = 137_600
    max_running: int = 256
    budget_tokens: int = 2048
    prices: Prices = field(default_factory=Prices)


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to do, as far as who sends knows. Calls that wait have no first token."""

    calls: int
    prompt_tokens: int
    waiting_calls: int
    waiting_tokens: int
    waiting_s: float
    """Prefill seconds of the calls that wait, less the time since one of them moved."""


class Loads(NamedTuple):
    """The loads of several engines, a number of each; see `Load`."""

    calls: Floats
    prompt_tokens: Floats
    waiting_calls: Floats
    waiting_tokens: Floats
    waiting_s: Floats


class PriceTable(NamedTuple):
    """The prices of several engines, a number of each; see `Prices`."""

    base_s: Floats
    token_s: Floats
    pair_s: Floats
    call_s: Floats
    context_token_s: Floats
    max_running: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call: its prompt's tokens, as far as they can be told, and the keys of its pieces.

    A piece is `piece_tokens` tokens long.
    """

    prompt_tokens: int
    keys: KeyArray
    piece_tokens: float

    def tokens_of(self, num_pieces: int) -> int:
        """Tokens that need not be computed where its first pieces are held; never all of them."""
        num = num_pieces + BEYOND_PIECES if num_pieces else 0
        return min(max(self.prompt_tokens - 1, 0), int(num * self.piece_tokens))


@dataclass(slots=True, eq=False)
class Sent:
    """A call on its way: where it is, what was expected of it there, and whether others wait for
    it."""

    call: Call
    engine: int
    at_s: float
    cached_tokens: int
    prefill_s: float
    held: Held
    in_line: bool = True
    is_waiting: bool = True


class EngineBook:
    """The engines by number, from 0. Instants are positive, on one clock of all who share it.

    `loads` is an array of workers x engines x `FIELDS`, of which row `worker` is this process's.
    """

    def __init__(
        self, prefixes: PrefixMap, loads: npt.NDArray[np.float64], worker: int = 0
    ) -> None:
        self.prefixes = prefixes
        if not prefixes.answers[_NUM_ENDED]:
            stay_s = FIRST_ANSWER_TOKENS * Prices().base_s
            prefixes.answers[_MEANS] = (FIRST_ANSWER_TOKENS, FIRST_ANSWER_TOKENS, stay_s)
        self._loads = loads
        self._own = loads[worker]
        self._own[:] = 0.0
        self._traits: dict[int, EngineTraits] = {}
        self._prices = np.zeros((len(PriceTable._fields), loads.shape[1]))

    @classmethod
    def of(cls, traits: Sequence[EngineTraits], num_pieces: int = 1 << 15) -> EngineBook:
        """Engines that nobody else sends calls to."""
        num = len(traits)
        book = cls(PrefixMap(Arrays.private(num_pieces, num)), np.zeros((1, num, len(FIELDS))))
        for number, each in enumerate(traits):
            book.introduce(number, each)
        return book

    @property
    def answer_tokens(self) -> float:
        """Of a mean answer, by what all that share have seen."""
        return float(self.prefixes.answers[_ANSWER])

    @property
    def prompt_tokens(self) -> float:
        """Of a mean prompt."""
        return float(self.prefixes.answers[_LENGTH])

    @property
    def _stay_s(self) -> float:
        return float(self.prefixes.answers[_STAY])

    @property
    def traits(self) -> Mapping[int, EngineTraits]:
        """Of each engine that was introduced."""
        return self._traits

    def introduce(self, engine: int, traits: EngineTraits) -> None:
        """What does not change of an engine, or has changed since it was introduced."""
        self._traits[engine] = traits
        self._prices[:, engine] = (*astuple(traits.prices), traits.max_running)

    def loads_of(self, engines: IntArray, now_s: float) -> Loads:
        """What these engines have to do."""
        chosen = self._loads.take(engines, axis=1)
        calls, prompt, waiting, tokens, seconds, _ = np.add.reduce(chosen).T
        idle_s = np.maximum(0.0, now_s - np.maximum.reduce(chosen[:, :, _MOVED_AT]))
        waiting_s = np.maximum(0.0, seconds - idle_s) * (waiting > 0)
        return Loads(calls, prompt, waiting, tokens, waiting_s)

    def loads(self, engines: Sequence[int], now_s: float) -> dict[int, Load]:
        """What each of these engines has to do."""
        rows = np.array(self.loads_of(np.asarray(engines), now_s)).T.tolist()
        return {
            engine: Load(int(calls), int(prompt), int(waiting), int(tokens), waiting_s)
            for engine, (calls, prompt, waiting, tokens, waiting_s) in zip(
                engines, rows, strict=True
            )
        }

    def prices_of(self, engines: IntArray) -> PriceTable:
        """What the steps of these engines cost."""
        return PriceTable(*self._prices.take(engines, axis=1))

    def tokens_held(self, call: Call, engines: IntArray, now_s: float) -> IntArray:
        """Tokens of the prompt that each of these engines holds, see `Call.tokens_of`."""
        if not len(call.keys):
            return np.zeros(len(engines), np.int64)
        held = self.prefixes.num_held(call.keys, engines, now_s)
        tokens = (held + BEYOND_PIECES * (held > 0)) * call.piece_tokens
        return np.minimum(tokens, max(call.prompt_tokens - 1, 0)).astype(np.int64)

    def cached_tokens(self, call: Call, engines: Sequence[int], now_s: float) -> dict[int, int]:
        """Tokens of the prompt that each of these engines holds, see `Call.tokens_of`."""
        tokens = self.tokens_held(call, np.asarray(engines), now_s).tolist()
        return dict(zip(engines, tokens, strict=True))

    def num_sharing(self, call: Call, engines: IntArray, now_s: float) -> float:
        """About how many calls that begin like this one, as far as that is known, come to these
        engines while one runs: by when the last one came."""
        if not len(call.keys):
            return 0.0
        stay_s = self._stay_s
        since_s = now_s - self.prefixes.used_until_s(call.keys, engines) + stay_s
        return stay_s / max(since_s, MIN_GAP_S)

    def sent(self, call: Call, engine: int, now_s: float, *, in_line: bool = True) -> Sent:
        """The call goes to the engine. Keep what is returned, for `first_token` and `ended`. One
        that is not `in_line` gives way to all others, and is none of those that wait."""
        traits, own = self._traits[engine], self._own[engine]
        room_pieces = traits.kv_tokens / call.piece_tokens
        held = self.prefixes.touch(
            engine, call.keys, now_s, room_pieces=room_pieces, stays_s=self._stay_s
        )
        cached = call.tokens_of(held.num)
        prefill_s = traits.prices.prefill_s(call.prompt_tokens, cached)
        if self._loads[:, engine, _WAITING].sum() <= 0:
            own[_MOVED_AT] = now_s
        own[:_WAITING] += (1, call.prompt_tokens)
        if in_line:
            own[_WAITING:_MOVED_AT] += (1, call.prompt_tokens - cached, prefill_s)
        return Sent(call, engine, now_s, cached, prefill_s, held, in_line)

    def first_token(self, sent: Sent, now_s: float) -> None:
        """Its prompt is computed."""
        if not sent.is_waiting:
            return
        sent.is_waiting = False
        if not sent.in_line:
            return
        own = self._own[sent.engine]
        own[_WAITING] -= 1
        own[_WAITING_TOKENS] -= sent.call.prompt_tokens - sent.cached_tokens
        own[_WAITING_S] -= sent.prefill_s
        own[_MOVED_AT] = now_s

    def ended(
        self,
        sent: Sent,
        now_s: float,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """The call has left the engine. None: nothing is known, or it was not answered."""
        is_begun = not sent.is_waiting
        self.first_token(sent, now_s)
        own, call = self._own[sent.engine], sent.call
        own[_CALLS] -= 1
        own[_PROMPT] -= call.prompt_tokens
        if output_tokens is None:
            if not is_begun:
                self.prefixes.withdraw(sent.engine, call.keys, sent.held)
            return
        num_cached = None if cached_tokens is None else cached_tokens / call.piece_tokens
        self.prefixes.answered(sent.engine, call.keys, sent.held, now_s, num_cached)
        answers = self.prefixes.answers
        answers[_NUM_ENDED] += 1
        weight = max(1 / float(answers[_NUM_ENDED]), 1 / ANSWERS)
        told = (output_tokens, call.prompt_tokens, now_s - sent.at_s)
        answers[_MEANS] += weight * (np.array(told) - answers[_MEANS])

    def left(self, engine: int) -> None:
        """The engine has died or was removed: what it held is gone. It may come back, empty."""
        self.prefixes.clear(engine)
