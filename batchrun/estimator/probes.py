"""The micro-benchmarks of a calibration: which completions to send, from an engine's own limits.

Nothing here sends them. A round holds every kind of step once or more: prefills of all sizes,
fresh and behind a cached prefix; decodes of all batch sizes and contexts; both mixed. Rounds are
alike but for the tokens, so that the same loads come back minutes apart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from batchrun.errors import EngineError
from batchrun.estimator.profile import EngineFacts

PROBING_SETTINGS: Mapping[str, object] = {
    "policy": "echo",
    "slo": {"ttft_s": 3600.0, "tpot_s": 3600.0},
}
"""The scheduler's settings while it is probed: no promise cuts a prefill short."""

LEAST_TOKENS = 256
"""An engine that cannot hold a request of so many tokens twice is too small to learn from."""

_OUTPUT_TOKENS = 8
_QUESTION_TOKENS = 16
_SIZES = tuple(16 << bit for bit in range(12))
_CONTEXTS = (512, 2048, 8192)
_CACHED_SIZES = (16, 64, 256, 1024)
_BATCHES = (1, 4, 16, 64, 256)
_MIXED_CALLERS = (4, 12)
_MIXED_SIZES = (32, 128, 512)
_MIXED_CALLS = 3
_EARLY_SIZES = (16, 16, 32)
_LONG_WITH = 6
_CROWD, _CROWD_TOKENS, _CROWD_OUTPUT_TOKENS = 64, 1024, 128
_MOST_CONTEXT_TOKENS = 32_768
"""Of all callers of a probe."""


@dataclass(frozen=True, slots=True)
class ProbeCall:
    """One completion: the prefix (shared by all calls with its length), then fresh tokens."""

    fresh_tokens: int
    output_tokens: int = 1
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Probe:
    """Callers side by side; each sends its calls one after another, and the probe ends with all."""

    stage: str
    callers: tuple[tuple[ProbeCall, ...], ...]

    @property
    def num_tokens(self) -> int:
        """All that an engine computes for it that has no prefix cached."""
        own = [call.fresh_tokens + call.output_tokens for calls in self.callers for call in calls]
        return sum(own) + sum(max(c.prefix_tokens for c in calls) for calls in self.callers)


class PromptMaker:
    """Token ids for calls. Prefixes are the same within a round, fresh tokens never come again."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        # The first and the last ids of a vocabulary are where special tokens stand.
        self._ids = range(vocabulary // 8, vocabulary // 2)
        self._rng = random.Random(seed)
        self._prefixes: dict[int, list[int]] = {}

    def next_round(self) -> None:
        """Forget the prefixes: those of the next round are other ones."""
        self._prefixes.clear()

    def prompt(self, call: ProbeCall) -> list[int]:
        """The prompt of one call."""
        length = call.prefix_tokens
        if length not in self._prefixes:
            self._prefixes[length] = self._rng.choices(self._ids, k=length)
        return self._prefixes[length] + self._rng.choices(self._ids, k=call.fresh_tokens)


def make_round(facts: EngineFacts) -> list[Probe]:
    """One round for such an engine, the shortest probes first: on a slow engine time cuts off the
    longest, not a kind. Raises EngineError when its KV cache is too small."""
    longest_tokens = min(facts.longest_tokens, facts.kv_tokens // 2)
    if longest_tokens < LEAST_TOKENS:
        raise EngineError(
            f"the engine holds requests of at most {longest_tokens} tokens twice; to calibrate it "
            f"needs {LEAST_TOKENS}: give it more KV cache or a larger --max-model-len"
        )
    probes = [
        *_fresh_prefills(facts, longest_tokens),
        *_cached_prefills(longest_tokens),
        *_decodes(facts, longest_tokens),
        *_early_mix(facts),
        *_mixes(facts, longest_tokens),
        *_long_with_decodes(facts, longest_tokens),
        *_crowd(facts, longest_tokens),
    ]
    return sorted(probes, key=lambda probe: probe.num_tokens)


def _fresh_prefills(facts: EngineFacts, longest_tokens: int) -> Iterator[Probe]:
    most = min(facts.token_budget, longest_tokens - 1)
    for size in [*(size for size in _SIZES if size < most), most]:
        yield Probe("prefills", ((ProbeCall(size),),))


def _cached_prefills(longest_tokens: int) -> Iterator[Probe]:
    for context in _contexts(longest_tokens):
        first = ProbeCall(_QUESTION_TOKENS, prefix_tokens=context)
        again = [
            ProbeCall(size, prefix_tokens=context)
            for size in _CACHED_SIZES
            if context + size < longest_tokens
        ]
        yield Probe("prefills behind cached prefixes", ((first, *again),))


def _decodes(facts: EngineFacts, longest_tokens: int) -> Iterator[Probe]:
    for context in (0, *_contexts(longest_tokens)):
        for batch in _BATCHES:
            if batch <= facts.max_running and _fits(facts, context, _QUESTION_TOKENS, batch):
                yield Probe(
                    "decodes",
                    tuple(
                        (ProbeCall(_QUESTION_TOKENS, _OUTPUT_TOKENS, _own(context, i)),)
                        for i in range(batch)
                    ),
                )


def _early_mix(facts: EngineFacts) -> Iterator[Probe]:
    """Both kinds in a step within the first seconds, also of an engine that gets to little else."""
    decoding = ProbeCall(_QUESTION_TOKENS, _OUTPUT_TOKENS)
    prompts = [ProbeCall(size) for size in _EARLY_SIZES]
    if facts.max_running > 1:
        yield Probe("prefills beside decodes", ((decoding,), tuple(prompts)))


def _mixes(facts: EngineFacts, longest_tokens: int) -> Iterator[Probe]:
    """Callers out of step: where one prefills, the others decode."""
    contexts = [context for context in _contexts(longest_tokens) if context <= _CONTEXTS[1]]
    sizes = [size for size in _MIXED_SIZES if size <= longest_tokens // 4]
    for context in (0, *contexts[-1:]):
        for num_callers in _MIXED_CALLERS:
            callers = tuple(
                tuple(
                    ProbeCall(
                        sizes[(i + j) % len(sizes)], 4 + (3 * i + 5 * j) % 9, _own(context, i)
                    )
                    for j in range(_MIXED_CALLS)
                )
                for i in range(num_callers)
            )
            if num_callers <= facts.max_running and _fits(facts, context, sizes[-1], num_callers):
                yield Probe("prefills beside decodes", callers)


def _long_with_decodes(facts: EngineFacts, longest_tokens: int) -> Iterator[Probe]:
    long = ProbeCall(min(3 * facts.token_budget, longest_tokens // 2))
    short = ProbeCall(_QUESTION_TOKENS, 2 * _OUTPUT_TOKENS)
    if facts.max_running > _LONG_WITH and _fits(facts, 0, _QUESTION_TOKENS, 2 * _LONG_WITH):
        yield Probe("prefills beside decodes", ((long,), *(((short,),) * _LONG_WITH)))


def _crowd(facts: EngineFacts, longest_tokens: int) -> Iterator[Probe]:
    """A job's rows: full steps in which ever more decode beside the prompts of the others."""
    call = ProbeCall(
        min(_CROWD_TOKENS, longest_tokens // 2), min(_CROWD_OUTPUT_TOKENS, longest_tokens // 4)
    )
    own_tokens = call.fresh_tokens + call.output_tokens + 2 * facts.engine.block_tokens
    num_callers = min(_CROWD, facts.max_running, facts.kv_tokens // 2 // own_tokens)
    if num_callers > 1:
        yield Probe("prefills beside decodes", ((call,),) * num_callers)


def _contexts(longest_tokens: int) -> list[int]:
    room_tokens = _QUESTION_TOKENS + 2 * _OUTPUT_TOKENS
    return [context for context in _CONTEXTS if context + room_tokens <= longest_tokens]


def _own(context: int, caller: int) -> int:
    """A length that no other caller's prefix has: contexts that many share are read from a
    processor's cache, and take less time than those of rows."""
    return max(0, context - caller)


def _fits(facts: EngineFacts, context: int, fresh_tokens: int, num_calls: int) -> bool:
    """Whether so many calls, each with its own context, are no more than a probe may take, and
    leave half of the KV cache free."""
    own_tokens = context + fresh_tokens + 2 * (_OUTPUT_TOKENS + facts.engine.block_tokens)
    is_short = num_calls * context <= _MOST_CONTEXT_TOKENS
    return is_short and 2 * num_calls * own_tokens <= facts.kv_tokens
