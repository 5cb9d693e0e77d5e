"""Which engine a call goes to: what the router says, among those that can be reached."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from batchrun.routing.engine_book import Call, EngineTraits, Sent
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


@dataclass(slots=True)
class _Engine:
    """One upstream: its column in what the workers share, None where that is full."""

    column: int | None = None
    down_until_s: float = -math.inf
    is_ready: bool = True


@dataclass(slots=True, eq=False)
class RoutedCall:
    """A call as the router sees it, and where it is; `usage` sees its reply."""

    call: Call
    text: PromptText
    is_offline: bool = False
    usage: ReplyUsage = field(default_factory=ReplyUsage)


class Balancer:
    """Asks the router, and tells it of every call's way. Instants are those of the system's one
    monotonic clock, in all workers."""

    def __init__(self, shared: SharedBook) -> None:
        self._shared = shared
        self._router_name = DEFAULT_ROUTER
        self._router = make_router(DEFAULT_ROUTER, shared.book)
        self._engines: dict[Upstream, _Engine] = {}
        self._bytes_per_token = BYTES_PER_TOKEN

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
        before = self._engines
        columns = self._shared.columns_of([(_identity(each), each.started) for each in upstreams])
        self._engines = {}
        told = {each: each.models for each in before}
        for each in upstreams:
            # A daemon that has just come has not asked the engines that its predecessor asked.
            is_known = each.models is None and each in told
            upstream = replace(each, models=told[each]) if is_known else each
            engine = before.get(upstream, _Engine())
            engine.column = columns.get(_identity(upstream))
            if upstream.is_ready and not engine.is_ready:
                self.answered(upstream, engine)
            engine.is_ready = upstream.is_ready
            self._engines[upstream] = engine
            if engine.column is not None:
                self._shared.book.traits[engine.column] = upstream.traits or EngineTraits()

    def read(self, body: bytes | None, *, is_offline: bool = False) -> RoutedCall:
        """What the router is told of a call with this body."""
        text = read_prompt(body or b"")
        ratio = self._bytes_per_token
        call = Call(max(1, round(text.num_bytes / ratio)), text.keys, PIECE_BYTES / ratio)
        return RoutedCall(call, text, is_offline)

    def candidates(self, routed: RoutedCall, *, now_s: float) -> list[Upstream]:
        """The engines of the call's model that neither hang nor are ejected, best first; those that
        are the last choice come late, and those that just refused a connection last. An offline
        call goes first where it can give way to others."""
        serving = self._serving(routed)
        by_column = {
            engine.column: upstream
            for upstream, engine in serving.items()
            if engine.column is not None
        }
        columns = list(by_column)
        ranked = self._router.rank(routed.call, columns, now_s) if columns else []
        order = [by_column[column] for column in ranked]
        order += [upstream for upstream, engine in serving.items() if engine.column is None]

        def lateness(upstream: Upstream) -> tuple[bool, bool, bool]:
            is_down = self._engines[upstream].down_until_s > now_s
            is_unfit = routed.is_offline and not upstream.runs_offline_calls
            return is_down, upstream.is_last_choice, is_unfit

        usable = (
            each
            for each in order
            if not each.is_hung and not self._left_s(self._engines[each], now_s)
        )
        return sorted(usable, key=lateness)

    def take_turn(self, upstream: Upstream, *, now_s: float) -> bool:
        """Whether a call may be sent there now: one at a time where the engine is on trial."""
        engine = self._engines.get(upstream)
        if engine is None or engine.column is None:
            return True
        return self._shared.ejections.take_turn(engine.column, now_s)

    def failed(self, upstream: Upstream, *, now_s: float) -> None:
        """A call could not be connected to the engine, or hung there."""
        engine = self._engines.get(upstream)
        if engine is None or engine.column is None:
            return
        if self._shared.ejections.failed(engine.column, now_s):
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
        lefts = [self._left_s(each, now_s) for each in self._serving(routed).values()]
        return min((left_s for left_s in lefts if left_s > 0), default=0.0)

    def _left_s(self, engine: _Engine, now_s: float) -> float:
        column = engine.column
        return 0.0 if column is None else self._shared.ejections.left_s(column, now_s)

    def is_served(self, routed: RoutedCall) -> bool:
        """Whether an engine has the call's model, or may have it, be it reached or not."""
        is_sure = all(each.models is not None for each in self._engines)
        return not self._engines or not is_sure or bool(self._serving(routed))

    def _serving(self, routed: RoutedCall) -> dict[Upstream, _Engine]:
        """The engines of the call's model. A single one says itself what it does not serve."""
        if len(self._engines) == 1:
            return self._engines
        engines = self._engines.items()
        return {each: engine for each, engine in engines if each.serves(routed.text.model)}

    def mark_down(self, upstream: Upstream, *, now_s: float) -> None:
        """Try others first for a while, because this engine could not be reached."""
        self.failed(upstream, now_s=now_s)
        engine = self._engines.get(upstream)
        if engine is not None:
            engine.down_until_s = now_s + COOLDOWN_S
            if engine.column is not None:
                self._shared.book.left(engine.column)

    @contextmanager
    def sending(self, upstream: Upstream, routed: RoutedCall) -> Iterator[None]:
        """The call is on its way while the block runs; the engine may have left the list."""
        engine, usage = self._engines.get(upstream), routed.usage
        if engine is None or engine.column is None:
            yield
            return
        now_s = usage.now_s()
        wait_s = self._shared.book.loads([engine.column], now_s)[engine.column].waiting_s
        sent = self._router.sent(routed.call, engine.column, now_s)
        usage.on_begin = partial(self._began, upstream, sent)
        timer = None
        if not routed.text.is_stream:
            # Nobody sees when the first token of such a call comes.
            loop, due_s = asyncio.get_running_loop(), wait_s + sent.prefill_s
            timer = loop.call_later(due_s, self._router.first_token, sent, now_s + due_s)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            self._ended(sent, routed)

    def _began(self, upstream: Upstream, sent: Sent, now_s: float) -> None:
        self.answered(upstream)
        self._router.first_token(sent, now_s)

    def _ended(self, sent: Sent, routed: RoutedCall) -> None:
        usage = routed.usage
        is_told = usage.output_tokens > 0
        self._router.ended(
            sent, usage.now_s(), usage.cached_tokens, usage.output_tokens if is_told else None
        )
        if usage.prompt_tokens and routed.text.num_bytes:
            ratio = min(16.0, max(0.5, routed.text.num_bytes / usage.prompt_tokens))
            self._bytes_per_token += (ratio - self._bytes_per_token) / RATIO_CALLS


def _identity(upstream: Upstream) -> str:
    """What tells two engines apart: a list that somebody wrote may have a name twice."""
    return f"{upstream.name} {upstream.url}"
