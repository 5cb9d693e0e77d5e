"""The shipped router: every engine's price for a call, in seconds, and the least wins.

The time of prefill is priced with the calls that it delays: a mean number, the same for all
engines, since a price by the engine's own queue would send all long prompts to one. A hot prefix is
copied by itself once the queue at its home costs more. What a prompt evicts has no price: one for
it, by the learnt share of evicted pieces that had come back, won nothing on the three workloads
that fill the KV of all engines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchrun.pool.prefix_keys import IntArray
from batchrun.routing.engine_book import Call, Loads, PriceTable
from batchrun.routing.prefix_map import Floats
from batchrun.routing.router import Router, Terms


class Cost(Router):
    """Queue + own prefill, with whom it delays + its decodes + its slot."""

    def rank(self, call: Call, engines: Sequence[int], now_s: float) -> list[int]:
        """See `Router`."""
        book, numbers = self.book, np.asarray(engines)
        loads, prices = book.loads_of(numbers, now_s), book.prices_of(numbers)
        cached = book.tokens_held(call, numbers, now_s)
        missed = call.prompt_tokens - cached
        own_s = missed * (prices.token_s + prices.pair_s * (cached + 0.5 * missed))
        delayed = 1 + float(loads.calls.sum()) / len(engines)
        decodes_s, slot_s = self._decode_s(loads, prices)
        seconds = loads.waiting_s + own_s * delayed + (decodes_s + slot_s)
        order = self._cheapest_first(seconds, loads.calls, engines)
        self.terms = Terms(
            order, cached, loads.calls, loads.waiting_s, own_s, delayed, decodes_s, slot_s
        )
        return [engines[place] for place in order]

    def _decode_s(self, loads: Loads, prices: PriceTable) -> tuple[Floats, Floats]:
        """The call's own decodes with what they add to those of others, and the wait for a slot."""
        answer, calls = self.book.answer_tokens, loads.calls
        context = loads.prompt_tokens + calls * answer / 2
        step_s = prices.base_s + (calls + 1) * prices.call_s + context * prices.context_token_s
        added_s = prices.call_s + (self.book.prompt_tokens + answer / 2) * prices.context_token_s
        over = np.maximum(0, calls + 1 - prices.max_running)
        slot_s = over * answer * step_s / prices.max_running
        return answer * step_s + calls * answer / 2 * added_s, slot_s

    def _cheapest_first(self, seconds: Floats, calls: Floats, engines: Sequence[int]) -> list[int]:
        """Places in `engines`; of two that cost the same, the one with fewer calls now, or ever."""
        order: IntArray = seconds.argsort(kind="stable")
        in_order = seconds[order]
        if (in_order[1:] == in_order[:-1]).any():
            num_sent = np.array([self.num_sent[engine] for engine in engines])
            order = np.lexsort((num_sent, calls, seconds))
        places: list[int] = order.tolist()
        return places
