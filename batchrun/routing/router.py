"""What a router is asked, and what it answers: the engines for a call, best first."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from batchrun.pool.prefix_keys import IntArray
from batchrun.routing.engine_book import Call, EngineBook, Sent
from batchrun.routing.prefix_map import Floats


class Terms(NamedTuple):
    """What a ranking was made of: `order` are places in what was ranked, best first; all else has a
    number for each place.

    `cached` are tokens of the prompt that are held there, `calls` those that are there. Seconds:
    prefills before the call's own, its own, what that delays others,
    those of what it pushes out and others will want again, its decodes, and its wait for a slot.
    """

    order: Sequence[int]
    cached: IntArray
    calls: Floats
    queue_s: Floats
    prefill_s: Floats
    delays_s: Floats
    evicted_s: Floats
    decodes_s: Floats
    slot_s: Floats


class Router(ABC):
    """Ranks the engines of a book, which it knows by number.

    A caller offers only engines that may be had at all and keeps what is its own (windows,
    suspects, engines that were refused): it filters, the router ranks. The caller reports a call's
    way here, and the router to the book. Instants are those of the book.
    """

    def __init__(self, book: EngineBook, rng: random.Random) -> None:
        self.book = book
        self.rng = rng
        self.num_sent: Counter[int] = Counter()
        self.terms: Terms | None = None
        """Of the last ranking, where the router weighs seconds."""

    @abstractmethod
    def rank(self, call: Call, engines: Sequence[int], now_s: float) -> list[int]:
        """These engines, all of them, of which there is one at least, best first."""

    def sent(self, call: Call, engine: int, now_s: float, *, in_line: bool = True) -> Sent:
        """The call went to this engine, whatever its rank was; see `EngineBook.sent`."""
        self.num_sent[engine] += 1
        return self.book.sent(call, engine, now_s, in_line=in_line)

    def first_token(self, sent: Sent, now_s: float) -> None:
        """Its first token has come."""
        self.book.first_token(sent, now_s)

    def ended(
        self,
        sent: Sent,
        now_s: float,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """See `EngineBook.ended`."""
        self.book.ended(sent, now_s, cached_tokens, output_tokens)
