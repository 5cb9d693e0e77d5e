"""The shipped router: every engine's price for a call, in seconds, and the least wins.

The time of prefill is priced with the calls that it delays: a mean number, the same for all
engines, since a price by the engine's own queue would send all long prompts to one. Of a hot prefix
the calls that will use the copy share that price, or it would stay at its first home: the mean
grows with the queue there. What a prompt evicts is priced by the share of evicted pieces that were
wanted again: nearly all where documents just fill the KV of all engines, next to none where each is
asked about for a while and never again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchrun.pool.prefix_keys import IntArray
from batchrun.routing.engine_book import Call, Loads, PriceTable
from batchrun.routing.prefix_map import Floats
from batchrun.routing.router import Router, Terms

HOT_CALLS = 6
"""A prefix is hot where more calls than these use it at once: so many may meet by chance."""


class Cost(Router):
    """Queue + own prefill, with whom it delays + what it evicts + its decodes + its slot."""

    def rank(self, call: Call, engines: Sequence[int], now_s: float) -> list[int]:
        """See `Router`."""
        book, numbers = self.book, np.asarray(engines)
        loads, prices = book.loads_of(numbers, now_s), book.prices_of(numbers)
        cached = book.tokens_held(call, numbers, now_s)
        missed = call.prompt_tokens - cached
        own_s = missed * (prices.token_s + prices.pair_s * (cached + 0.5 * missed))
        lost = self._lost_shares(missed / call.piece_tokens, numbers)
        evicted_s, num_calls = own_s * lost, float(np.add.reduce(loads.calls))
        num_sharing = min(book.num_sharing(call, numbers, now_s), num_calls) / HOT_CALLS
        # To share a copy wins nothing where it pushes out what others share.
        is_hot = num_sharing > 1.0
        delaying_s = evicted_s + (own_s - evicted_s) / num_sharing if is_hot else own_s
        delays_s = delaying_s * (num_calls / len(engines))
        decodes_s, slot_s = self._decode_s(loads, prices)
        seconds = loads.waiting_s + (own_s + delays_s) + evicted_s + (decodes_s + slot_s)
        order = self._cheapest_first(seconds, loads.calls, engines)
        known = cached, loads.calls, loads.waiting_s, own_s, delays_s, evicted_s, decodes_s, slot_s
        self.terms = Terms(order, *known)
        return [engines[place] for place in order]

    def _lost_shares(self, num_new: Floats, engines: IntArray) -> Floats:
        """Of so many new pieces, the share that each push out one that others will want again."""
        prefixes = self.book.prefixes
        if not (returned_share := prefixes.returned_share):
            return np.zeros(len(engines))
        return prefixes.evicted_shares(engines, num_new) * returned_share

    def _decode_s(self, loads: Loads, prices: PriceTable) -> tuple[Floats, Floats]:
        """The call's own decodes with what they add to those of others, and the wait for a slot."""
        answer, with_own = self.book.answer_tokens, loads.calls + 1
        decoded = loads.calls * (answer / 2)
        context = loads.prompt_tokens + decoded
        step_s = prices.base_s + with_own * prices.call_s + context * prices.context_token_s
        added_s = prices.call_s + (self.book.prompt_tokens + answer / 2) * prices.context_token_s
        steps_s = answer * step_s
        slot_s = np.maximum(0.0, with_own / prices.max_running - 1.0) * steps_s
        return steps_s + decoded * added_s, slot_s

    def _cheapest_first(self, seconds: Floats, calls: Floats, engines: Sequence[int]) -> list[int]:
        """Places in `engines`; of two that cost the same, the one with fewer calls now, or ever."""
        order: IntArray = seconds.argsort(kind="stable")
        in_order = seconds[order]
        if np.count_nonzero(in_order[1:] == in_order[:-1]):
            num_sent = np.array([self.num_sent[engine] for engine in engines])
            order = np.lexsort((num_sent, calls, seconds))
        places: list[int] = order.tolist()
        return places
