"""The shipped router: every engine's price for a call, in seconds, and the least wins.

The time of prefill is priced with the calls that it delays: a mean number, the same for all
engines, since a price by the engine's own queue would send all long prompts to one. A hot prefix is
copied by itself once the queue at its home costs more. What a prompt evicts has no price: one for
it, by the learnt share of evicted pieces that had come back, won nothing on the three workloads
that fill the KV of all engines.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchrun.routing.engine_book import Call, Load
from batchrun.routing.router import Router


class Cost(Router):
    """Queue + own prefill, with whom it delays + its decodes + its slot."""

    def rank(self, call: Call, engines: Sequence[int], now_s: float) -> list[int]:
        """See `Router`."""
        book = self.book
        loads, cached = book.loads(engines, now_s), book.cached_tokens(call, engines)
        delayed = 1 + sum(load.calls for load in loads.values()) / len(loads)

        def price(engine: int) -> tuple[float, int, int]:
            load = loads[engine]
            own_s = book.traits[engine].prices.prefill_s(call.prompt_tokens, cached[engine])
            seconds = load.waiting_s + own_s * delayed + self._decode_s(engine, load)
            return seconds, load.calls, self.num_sent[engine]

        return sorted(engines, key=price)

    def _decode_s(self, engine: int, load: Load) -> float:
        """The call's own decodes, what they add to those of others, and the wait for a slot."""
        traits, answer = self.book.traits[engine], self.book.answer_tokens
        prices = traits.prices
        step_s = prices.decode_s(load.calls + 1, load.prompt_tokens + load.calls * answer / 2)
        added_s = prices.call_s + (self.book.prompt_tokens + answer / 2) * prices.context_token_s
        over = load.calls + 1 - traits.max_running
        slot_s = max(0, over) * answer * step_s / traits.max_running
        return answer * step_s + load.calls * answer / 2 * added_s + slot_s
