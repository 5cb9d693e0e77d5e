"""Which engine a call goes to: what the router says, among those that can be reached."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from batchrun.hints import SloBounds
from batchrun.routing.decisions import (
    Decision,
    EngineRouting,
    Records,
    Weighed,
    document_of,
    figures_of,
)
from batchrun.routing.engine_book import Call, EngineTraits, Sent
from batchrun.routing.lateness import LateCalls
from batchrun.routing.router import Terms
from batchrun.routing.routers import DEFAULT_ROUTER, ROUTERS, make_router
from batchrun.server.gateway.body_prompt import PIECE_BYTES, PromptText, read_prompt
from batchrun.server.gateway.replies import ReplyUsage
from batchrun.server.gateway.shared_book import SharedBook
from batchrun.server.gateway.upstreams import Upstream

log = logging.getLogger(__name__)

COOLDOWN_S = 5.0
BYTES_PER_TOKEN = 4.0
"""Until replies have told better."""
RATIO_CALLS = 200
MAX_MODELS = 256
MAX_MODEL_CHARS = 256
"""Names whose engines are remembered, and the longest of them; callers choose them."""

JsonObject = dict[str, Any]


@dataclass(slots=True)
class _Engine:
    """One upstream: its column in what the workers share, None where that is full, and what
    decisions name it by."""

    column: int | None = None
    digest: int = 0
    down_until_s: float = -math.inf
    is_ready: bool = True
    started: int = 0


@dataclass(frozen=True, slots=True)
class _Serving:
    """The engines of a model: those that the router ranks, by column, and `others`.

    None `is_late` that takes all calls, none `is_unfit` that takes offline ones.
    """

    by_column: Mapping[int, Upstream]
    columns: Sequence[int]
    others: Sequence[Upstream]
    is_late: bool
    is_unfit: bool

    @classmethod
    def of(cls, engines: Mapping[Upstream, _Engine]) -> _Serving:
        by_column = {
            engine.column: each for each, engine in engines.items() if engine.column is not None
        }
        return cls(
            by_column,
            list(by_column),
            [each for each, engine in engines.items() if engine.column is None],
            any(each.is_hung or each.is_last_choice or each.is_gone for each in engines),
            not all(each.runs_offline_calls for each in engines),
        )


@dataclass(slots=True, eq=False)
class RoutedCall:
    """A call as the router sees it, and where it is; `usage` sees its reply.

    `order` and `terms` are the columns of the engines as they were ranked, and why. `slo` is what
    it is promised; None: nothing that the gateway knows of; `awaited` the engine that owes it a
    first token. Of engines it may meet one that dies. One without a body asks for a list.
    """

    call: Call
    text: PromptText
    is_offline: bool = False
    usage: ReplyUsage = field(default_factory=ReplyUsage)
    order: Sequence[int] = ()
    terms: Terms | None = None
    slo: SloBounds | None = None
    has_met_death: bool = False
    has_body: bool = True
    awaited: str = ""


class Balancer:
    """Asks the router, and tells it of every call's way. Instants are those of the system's one
    monotonic clock, in all workers."""

    def __init__(self, shared: SharedBook) -> None:
        self._shared = shared
        self._router_name = DEFAULT_ROUTER
        self._router = make_router(DEFAULT_ROUTER, shared.book)
        self._engines: dict[Upstream, _Engine] = {}
        self._has_models = False
        """Whether engines differ in theirs."""
        self._served: dict[str | None, _Serving] = {}
        self._down_until_s = -math.inf
        self._bytes_per_token = BYTES_PER_TOKEN
        self._most_tokens = EngineTraits().kv_tokens
        """What the largest engine holds; none takes a longer prompt."""
        self._late: LateCalls | None = None
        self._lives: dict[int, tuple[int, int]] = {}

    @property
    def upstreams(self) -> tuple[Upstream, ...]:
        return tuple(self._engines)

    def replace(self, upstreams: Sequence[Upstream], router: str = DEFAULT_ROUTER) -> None:
        """Take over a new list; what is known of engines that run on stays, running calls go on.

        A router of a name that this release does not know leaves the one before.
        """
        if router != self._router_name and router in ROUTERS:
            self._router_name = router
            self._router = make_router(router, self._shared.book)
        before, names = self._engines, _identities(upstreams)
        columns = self._shared.columns_of([
            (name, each.started) for name, each in zip(names, upstreams, strict=True)
        ])
        self._engines, self._served = {}, {}
        traits = [each.traits or EngineTraits() for each in upstreams] or [EngineTraits()]
        self._most_tokens = max(each.kv_tokens for each in traits)
        self._has_models = len({each.models for each in upstreams}) > 1
        told = {each.name: each.models for each in before}
        for name, each in zip(names, upstreams, strict=True):
            # A daemon that has just come has not asked the engines that its predecessor asked.
            is_known = each.models is None and each.name in told
            upstream = replace(each, models=told[each.name]) if is_known else each
            engine = before.get(upstream, _Engine(started=upstream.started))
            engine.column = columns.get(name)
            is_anew = not engine.is_ready or engine.started != upstream.started
            if upstream.is_ready and is_anew:
                engine.down_until_s = -math.inf
                self.answered(upstream, engine)
            engine.is_ready, engine.started = upstream.is_ready, upstream.started
            self._engines[upstream] = engine
            if engine.column is not None:
                engine.digest = self._shared.digest_of(engine.column)
                self._meet(engine.column)
                self._shared.book.introduce(engine.column, upstream.traits or EngineTraits())

    def _meet(self, column: int) -> None:
        """What this worker has learnt of the column's engine counts for that engine alone."""
        life = self._shared.life_of(column)
        if self._lives.setdefault(column, life) != life:
            self._lives[column] = life
            if self._late is not None:
                self._late.forget(column)

    def read(self, body: bytes | None, *, is_offline: bool = False) -> RoutedCall:
        """What the router is told of a call with this body."""
        text = read_prompt(body or b"", needs_model=self._has_models)
        ratio = self._bytes_per_token
        tokens = max(1, min(round(text.num_bytes / ratio), self._most_tokens))
        call = Call(tokens, text.keys, PIECE_BYTES / ratio)
        usage = ReplyUsage(text.num_choices, is_sparse=text.is_sparse)
        return RoutedCall(call, text, is_offline, usage, has_body=body is not None)

    def candidates(self, routed: RoutedCall, *, now_s: float) -> list[Upstream]:
        """The engines of the call's model that neither hang nor are ejected, best first; those that
        are the last choice or gone come late, and those that just refused a connection last.
        An offline call goes first where it can give way to others."""
        serving = self._serving(routed.text.model)
        columns = serving.columns
        routed.order = self._router.rank(routed.call, columns, now_s) if columns else ()
        routed.terms = self._router.terms if columns else None
        order = [*map(serving.by_column.__getitem__, routed.order), *serving.others]
        is_unfit = routed.is_offline and serving.is_unfit
        troubled_until_s = max(self._down_until_s, self._shared.ejections.until_s)
        if not (serving.is_late or is_unfit or now_s < troubled_until_s):
            return order

        def lateness(upstream: Upstream) -> tuple[bool, bool, bool, bool]:
            is_down = self._engines[upstream].down_until_s > now_s
            is_unfit = routed.is_offline and not upstream.runs_offline_calls
            return is_down, upstream.is_gone, upstream.is_last_choice, is_unfit

        return sorted((each for each in order if self.takes_calls(each, now_s)), key=lateness)

    def takes_calls(self, upstream: Upstream, now_s: float) -> bool:
        """Whether the engine neither hangs nor is ejected."""
        return not upstream.is_hung and not self._left_s(self._engines[upstream], now_s)

    def refuse_late(self, *, is_on: bool) -> None:
        """Whether `in_time` tells of late calls. What it learns them from is kept while it does."""
        if not is_on:
            self._late = None
        elif self._late is None:
            self._late = LateCalls(self._shared.book)

    def in_time(
        self, candidates: list[Upstream], routed: RoutedCall, *, now_s: float
    ) -> tuple[list[Upstream], float]:
        """The candidates, those first in which the call can be in time. And if there is none, by
        how many seconds it would be late in the best of them. Those that come late among the
        candidates stay behind the others, and count where there are no others."""
        if self._late is None or routed.slo is None or routed.is_offline or not candidates:
            return candidates, 0.0
        usual = [each for each in candidates if self._is_usual(each, now_s)] or candidates
        behind = [each for each in candidates if each not in usual]
        columns = [self._engines[each].column for each in usual]
        known = [column for column in columns if column is not None]
        late_s = self._late.excess_s(routed.call, routed.slo, known, now_s)
        excess_s = [late_s.get(-1 if column is None else column, 0.0) for column in columns]
        order = sorted(range(len(usual)), key=lambda place: excess_s[place] > 0)
        return [*(usual[place] for place in order), *behind], min(excess_s)

    def _is_usual(self, upstream: Upstream, now_s: float) -> bool:
        is_down = self._engines[upstream].down_until_s > now_s
        return not (upstream.is_gone or upstream.is_last_choice or is_down)

    def take_turn(self, upstream: Upstream, *, now_s: float) -> bool:
        """Whether a call may be sent there now: one at a time where the engine is on trial."""
        engine = self._engines.get(upstream)
        if engine is None or engine.column is None:
            return True
        return self._shared.ejections.take_turn(engine.column, now_s)

    def num_ejections_in_a_row(self, upstream: Upstream) -> int:
        """How often the engine was ejected since a call succeeded."""
        engine = self._engines.get(upstream)
        if engine is None or engine.column is None:
            return 0
        return self._shared.ejections.num_in_a_row(engine.column)

    def failed(self, upstream: Upstream, *, now_s: float, found: int | None = None) -> None:
        """A call could not be connected to the engine, or hung there; when it was sent, it `found`
        so many ejections in a row."""
        engine = self._engines.get(upstream)
        if engine is None or engine.column is None:
            return
        if self._shared.ejections.failed(engine.column, now_s, found):
            left_s = self._shared.ejections.left_s(engine.column, now_s)
            log.error("engine %s: its calls fail; it gets none for %.0f s", upstream.name, left_s)

    def answered(self, upstream: Upstream, engine: _Engine | None = None) -> None:
        """The engine answered a call, or is ready again."""
        engine = engine or self._engines.get(upstream)
        if engine is not None and engine.column is not None:
            self._shared.ejections.succeeded(engine.column)

    def ejected(self, *, now_s: float) -> list[tuple[str, float, int]]:
        """Each engine by name, for how many seconds it still gets no calls, and how often that
        was."""
        shared = self._shared.ejections
        return [
            (upstream.name, self._left_s(engine, now_s), shared.num_ejections(engine.column))
            for upstream, engine in self._engines.items()
            if engine.column is not None
        ]

    def back_in_s(self, routed: RoutedCall, *, now_s: float) -> float:
        """When the first engine of the call's model that is ejected may be tried again; 0: none
        is."""
        columns = self._serving(routed.text.model).columns
        lefts = [self._shared.ejections.left_s(column, now_s) for column in columns]
        return min((left_s for left_s in lefts if left_s > 0), default=0.0)

    def _left_s(self, engine: _Engine, now_s: float) -> float:
        column = engine.column
        return 0.0 if column is None else self._shared.ejections.left_s(column, now_s)

    def is_served(self, routed: RoutedCall) -> bool:
        """Whether an engine has the call's model, or may have it, be it reached or not."""
        serving = self._serving(routed.text.model)
        return (
            bool(serving.columns or serving.others)
            or not self._engines
            or any(each.models is None for each in self._engines)
        )

    def _serving(self, model: str | None) -> _Serving:
        """The engines of a model. A single one says itself what it does not serve."""
        found = self._served.get(model)
        if found is None:
            is_single = len(self._engines) == 1
            engines = self._engines.items()
            found = _Serving.of({
                each: engine for each, engine in engines if is_single or each.serves(model)
            })
            if len(self._served) >= MAX_MODELS:
                self._served.clear()
            if model is None or len(model) <= MAX_MODEL_CHARS:
                self._served[model] = found
        return found

    def mark_down(self, upstream: Upstream, *, now_s: float, found: int) -> None:
        """Try others first for a while: this engine could not be reached. See `failed`."""
        self.failed(upstream, now_s=now_s, found=found)
        engine = self._engines.get(upstream)
        if engine is not None:
            self._down_until_s = engine.down_until_s = now_s + COOLDOWN_S
            if engine.column is not None:
                self._shared.book.left(engine.column)

    @contextmanager
    def sending(self, upstream: Upstream, routed: RoutedCall) -> Iterator[None]:
        """The call is on its way while the block runs; the engine may have left the list, and what
        has no body is no work for it."""
        engine, usage = self._engines.get(upstream), routed.usage
        if engine is None or engine.column is None or not routed.has_body:
            yield
            return
        now_s, timer, wait_s = usage.now_s(), None, 0.0
        num_ejected = self._shared.ejections.num_in_a_row(engine.column)
        if not routed.text.is_stream:
            wait_s = self._shared.book.loads([engine.column], now_s)[engine.column].waiting_s
        in_line = not (routed.is_offline and upstream.runs_offline_calls)
        sent = self._router.sent(routed.call, engine.column, now_s, in_line=in_line)
        late = self._late if routed.slo is not None and not routed.is_offline else None
        if late is not None and routed.slo is not None:
            late.sent(sent, routed.slo)
        usage.on_begin = partial(self._began, upstream, sent, late)
        number = self._note(routed, sent, engine.digest)
        if not routed.text.is_stream:
            # Nobody sees when the first token of such a call comes.
            loop, due_s = asyncio.get_running_loop(), wait_s + sent.prefill_s
            timer = loop.call_later(due_s, self._presumed_begun, sent, now_s + due_s, late)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            if late is not None:
                late.left(sent)
            self._shared.ejections.left(engine.column, num_ejected, usage.now_s())
            self._ended(sent, routed, number)

    def _began(self, upstream: Upstream, sent: Sent, late: LateCalls | None, now_s: float) -> None:
        self.answered(upstream)
        self._router.first_token(sent, now_s)
        if late is not None:
            late.began(sent, now_s)

    def _presumed_begun(self, sent: Sent, now_s: float, late: LateCalls | None) -> None:
        self._router.first_token(sent, now_s)
        if late is not None:
            late.left(sent)

    def _note(self, routed: RoutedCall, sent: Sent, digest: int) -> int:
        """Keep why; an engine that left the list meanwhile stands last."""
        order, terms, call = routed.order, routed.terms, routed.call
        rank = order.index(sent.engine) if sent.engine in order else len(order)
        others = order[1:2] if rank == 0 else order[:1]
        runner_up = self._shared.digest_of(others[0]) if others else 0
        if terms is None:
            prefill = {"cached_tokens": sent.cached_tokens, "prefill_s": sent.prefill_s}
            weighed, other = Weighed(digest, **prefill), Weighed(runner_up)
        else:
            places = terms.order
            weighed = (
                Weighed.of(digest, terms, places[rank]) if rank < len(places) else Weighed(digest)
            )
            other = Weighed.of(runner_up, terms, places[rank == 0]) if others else Weighed()
        return self._shared.ring.note(
            Decision(
                sent.at_s,
                rank,
                len(order),
                call.prompt_tokens,
                call.piece_tokens,
                weighed,
                other,
            ),
            call.keys,
        )

    def explain(self, now_s: float, most: int) -> JsonObject:
        """Where the last calls went, and why; the newest `most` of them one by one."""
        names, decisions, figures = self._figures(now_s)
        return document_of(self._router_name, figures, decisions[:most], names, now_s)

    def ended_calls(self, now_s: float, since_s: float) -> JsonObject:
        """The calls of all workers that ended after this, with the keys of their prompts."""
        return {"now_s": now_s, **self._shared.ended_calls(since_s, now_s)._asdict()}

    def figures(self) -> list[EngineRouting]:
        """By engine, where the last calls of all workers went, and what is known of its cache."""
        return self._figures(ReplyUsage.now_s())[2]

    def _figures(self, now_s: float) -> tuple[dict[int, str], Records, list[EngineRouting]]:
        decisions, prefixes = self._shared.decisions(), self._shared.book.prefixes
        known = [(each.name, engine) for each, engine in self._engines.items()]
        names = {engine.digest: name for name, engine in known if engine.column is not None}
        pieces = {
            engine.digest: prefixes.num_pieces(engine.column, now_s)
            for _, engine in known
            if engine.column is not None
        }
        return names, decisions, figures_of(decisions, names, pieces)

    def _ended(self, sent: Sent, routed: RoutedCall, number: int) -> None:
        usage = routed.usage
        cached, prompt = usage.cached_tokens, usage.prompt_tokens or math.nan
        # A stream tells of tokens only when asked; it has an event for each, more or less.
        output_tokens = usage.output_tokens or max(0, usage.num_events - 1)
        self._shared.ring.ended(
            number,
            prompt,
            math.nan if cached is None or not usage.prompt_tokens else cached,
            output_tokens,
            usage.now_s(),
        )
        if not routed.text.tells_of_cache:
            cached = None
        if cached is not None and usage.prompt_tokens:
            # The router counts in tokens of this worker's measure.
            cached = round(cached * routed.call.prompt_tokens / usage.prompt_tokens)
        self._router.ended(sent, usage.now_s(), cached, output_tokens or None)
        if usage.prompt_tokens and routed.text.num_bytes and not routed.text.has_media:
            ratio = min(16.0, max(0.5, routed.text.num_bytes / usage.prompt_tokens))
            self._bytes_per_token += (ratio - self._bytes_per_token) / RATIO_CALLS


def _identities(upstreams: Sequence[Upstream]) -> list[str]:
    """What tells engines apart: names, be the engine reached itself or through its agent; and
    addresses, as a list that somebody wrote may have a name twice."""
    num = Counter(each.name for each in upstreams)
    return [each.name if num[each.name] == 1 else f"{each.name} {each.url}" for each in upstreams]
