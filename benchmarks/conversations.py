"""Online calls that belong together: conversations whose turns share what was said, and grow.

Turn n's prompt is the whole of turn n-1's, its answer, and a new message: an agent that calls
tools, or a chat. All begin with one prompt of instructions and tools.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from batchrun.simulator.offline_jobs import Bounds, LogNormalTokens
from batchrun.simulator.online import OnlineCall

TTFT_S, TPOT_S = 1.0, 0.05
"""The bounds of online calls. The caller has an answer when these have passed for all its tokens,
whoever serves it: all schedulers get the same calls, and none that its answers are late for."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """One turn; the prompt of the first also has what was said before the run began."""

    at_s: float
    conversation: int
    message_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations begin as a Poisson process; between an answer and the next message lies an
    exponential time of `think_s` on average. Those that began `lead_s` before the run go on in it.
    """

    rate_per_s: float
    turns: Bounds
    think_s: float
    message: LogNormalTokens
    answer: LogNormalTokens
    system_tokens: int
    lead_s: float = 180.0

    def draw(self, duration_s: float, seed: int) -> list[OnlineCall]:
        """The calls of the first `duration_s` seconds, by arrival."""
        rng = random.Random(2000 + seed)
        turns = sorted(self._turns(rng, duration_s), key=lambda turn: turn.at_s)
        calls: list[OnlineCall] = []
        last: dict[int, int] = {}
        for turn in turns:
            before = last.get(turn.conversation)
            last[turn.conversation] = len(calls)
            calls.append(
                OnlineCall(
                    turn.at_s,
                    turn.message_tokens,
                    turn.answer_tokens,
                    self.system_tokens if before is None else 0,
                    before,
                )
            )
        return calls

    def _turns(self, rng: random.Random, duration_s: float) -> Iterator[_Turn]:
        """Those within the run, conversation by conversation."""
        begin_s, conversation = -self.lead_s, 0
        while (begin_s := begin_s + rng.expovariate(self.rate_per_s)) < duration_s:
            conversation += 1
            at_s, said_tokens = begin_s, 0
            for _ in range(rng.randint(*self.turns)):
                message, answer = self.message.draw(rng), self.answer.draw(rng)
                said_tokens += message
                if 0 <= at_s < duration_s:
                    yield _Turn(at_s, conversation, said_tokens, answer)
                    said_tokens = 0
                else:
                    said_tokens += answer
                at_s += TTFT_S + answer * TPOT_S + rng.expovariate(1 / self.think_s)
