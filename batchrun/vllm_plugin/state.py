"""What the plug-in knows of one engine, and a `RequestView` of each of its live requests.

`EngineState` is what planner, view builder and the link to the daemon share. None of them holds the
scheduler, which alone keeps the state true to vLLM and works by it.
"""

from __future__ import annotations

import logging
import math
import os
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from msgspec import UNSET
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

from batchrun.estimator.answer_length import AnswerLengths
from batchrun.estimator.call_history import CallHistory
from batchrun.estimator.caller_margin import CallerMargin
from batchrun.estimator.step_time import AnyModel
from batchrun.hints import (
    HINT_KEY,
    HINT_NONCE_VARIABLE,
    FlexHint,
    Hint,
    HintError,
    RowHint,
    SloBounds,
    SloHint,
    key_of,
    read_hint,
)
from batchrun.scheduling.online_queue import ONLINE_MEMORY_S
from batchrun.scheduling.view import BY_ARRIVAL, UNKNOWN_TOKENS, RequestView
from batchrun.types import USUAL_OUTPUT_TOKENS, RequestClass
from batchrun.vllm_plugin.compat import block_law, cuts_no_image
from batchrun.vllm_plugin.estimates import Estimates, StepClock, engine_facts, read_models
from batchrun.vllm_plugin.kv_cache import KvTiers, OnlineBlocks
from batchrun.vllm_plugin.settings import OnlineSlo, PluginSettings
from batchrun.wire import FeltCalls, Orders

log = logging.getLogger(__name__)

_BY_RANK = attrgetter("epoch", "rank", "arrival_at_s", "request_id")

WALL_DRIFT_S = 0.01
"""By so much the wall clock may leave ours before arrivals are placed anew: two readings are never
of one instant, and calls that came together are to stay in order."""


class PlanQueue(RequestQueue):
    """All waiting and preempted requests, by class.

    `len`, iteration and removal see everything, so that aborts, counts and pauses work as in
    vLLM; truth, `peek_request` and `pop_request` see only what `expose` named. `online` is in
    order of priority, then arrival, and `offline` in planned order. `views` holds a view of every
    live request; a preempted request that ends is freed, view and all, before vLLM takes it out.
    """

    def __init__(self, views: Mapping[str, RequestView]) -> None:
        self._views = views
        self._waiting: dict[str, RequestView] = {}
        self._exposed: list[Request] = []
        self.online: list[RequestView] = []
        self.offline: list[RequestView] = []
        self.added_again: list[Request] = []

    def expose(self, requests: Sequence[Request]) -> None:
        """Let vLLM's waiting loop see these, in this order, until the next call."""
        self._exposed = list(reversed(requests))

    def add_request(self, request: Request) -> None:
        """Add a request at the place of its class's order. A preempted session whose turn ends vLLM
        adds again, and then takes it out for good: it is one of `added_again`."""
        if request.request_id in self._waiting:
            self.added_again.append(request)
            return
        view = self._views[request.request_id]
        self._waiting[request.request_id] = view
        if view.request_class is RequestClass.ONLINE:
            insort(self.online, view, key=BY_ARRIVAL)
        else:
            insort(self.offline, view, key=_BY_RANK)

    def prepend_request(self, request: Request) -> None:
        """Add a request; the plan, not the queue, decides who goes first."""
        if request.request_id not in self._waiting:
            self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Request:
        """The next exposed request. Raises IndexError when there is none."""
        return self._exposed[-1]

    def pop_request(self) -> Request:
        """Take the next exposed request out. Raises IndexError when there is none."""
        request = self._exposed.pop()
        self._take_out(request)
        return request

    def remove_request(self, request: Request) -> None:
        """Take a request out. Raises ValueError when it is not there, as a deque does."""
        if request.request_id not in self._waiting:
            raise ValueError(f"{request.request_id} is not waiting")
        self._take_out(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take out those of the requests that are there."""
        for request in requests:
            if request.request_id in self._waiting:
                self._take_out(request)

    def check(self) -> None:
        """Recount; raises AssertionError when the two orders and the whole disagree."""
        listed = [view.request_id for view in (*self.online, *self.offline)]
        assert sorted(listed) == sorted(self._waiting)
        assert self.online == sorted(self.online, key=BY_ARRIVAL)
        assert self.offline == sorted(self.offline, key=_BY_RANK)

    def _take_out(self, request: Request) -> None:
        view = self._waiting.pop(request.request_id)
        if view.request_class is RequestClass.ONLINE:
            del self.online[bisect_left(self.online, BY_ARRIVAL(view), key=BY_ARRIVAL)]
        else:
            del self.offline[bisect_left(self.offline, _BY_RANK(view), key=_BY_RANK)]

    def __bool__(self) -> bool:
        return bool(self._exposed)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter([view.handle for view in self._waiting.values()])


class EngineState:
    """The live requests of an engine, and what is known of its KV and its steps.

    `views` has a view of every live request and `queue` the order in which waiting ones are planned
    (it is vLLM's waiting queue only while steps are planned). `kv` is None while vLLM's own free
    queue is in place; `online_blocks` counts what online requests hold. `estimates` and `steps` say
    how long steps take and how much KV online requests will need, `calls` how many of them come and
    how long their answers become, `slo` what those without a class are promised now, `margin` what
    of it steps beside rows leave to callers, `untold_answers` how long answers are of offline work
    of which no hint tells. `clock` returns monotonic seconds; less `wall_offset_s`, the times of
    the `wall` clock, as vLLM's arrivals, are on its scale (None: they are at once). A hint counts
    if it carries the `nonce`; without a nonce none does.
    """

    def __init__(
        self,
        settings: PluginSettings,
        config: VllmConfig,
        manager: KVCacheManager,
        block_tokens: int,
    ) -> None:
        """`manager` is the scheduler's, with blocks of `block_tokens`."""
        self.settings = settings
        self.slo = OnlineSlo() if settings.slo == "auto" else settings.slo
        self.manager = manager
        self.block_tokens = block_tokens
        self.total_blocks = manager.block_pool.num_gpu_blocks
        self.law = block_law(manager, block_tokens)
        self.online_blocks = OnlineBlocks(manager, self.law.block_tokens)
        self.watermark_blocks = int(getattr(manager, "watermark_blocks", 0))
        self.max_loras = config.lora_config.max_loras if config.lora_config else 0
        self.cuts_no_image = cuts_no_image(config)
        self.clock: Callable[[], float] = time.monotonic
        self.wall: Callable[[], float] | None = time.time
        self.wall_offset_s = time.time() - time.monotonic()
        self.nonce = os.environ.get(HINT_NONCE_VARIABLE, "")
        self.views: dict[str, RequestView] = {}
        self.queue = PlanQueue(self.views)
        self.kv: KvTiers | None = None
        self.facts = engine_facts(config, self.total_blocks)
        self.steps = StepClock()
        self.believe(read_models(settings.profile, self.facts.engine))
        self.is_offline_on = True
        self.num_offline = 0
        self._places: list[tuple[int, int]] = []
        self._call_seen_at_s = self._class_seen_at_s = -math.inf
        self._classed: set[str] = set()
        self.untold_answers = AnswerLengths([USUAL_OUTPUT_TOKENS])
        self.calls = CallHistory()
        self.margin = CallerMargin()
        self.num_malformed_hints = 0
        self.num_policy_errors = 0
        self.surviving = Surviving(self)
        num_groups = len(manager.kv_cache_config.kv_cache_groups)
        self._can_tier = bool(config.cache_config.enable_prefix_caching) and num_groups == 1

    def believe(self, models: Sequence[AnyModel]) -> None:
        """Start from these step-time models, the best first, as from those of a profile."""
        self.estimates = Estimates(self.settings, self.total_blocks, models)

    def num_online_blocks(self) -> int:
        """Blocks that online requests hold. O(requests)."""
        online = (v for v in self.views.values() if v.request_class is RequestClass.ONLINE)
        return self.online_blocks.count([
            v.handle for v in online if v.handle.status is RequestStatus.RUNNING
        ])

    def read_hint(self, request: Request) -> Hint | None:
        """The request's hint; None without one, and for one that makes no sense (counted)."""
        params = request.sampling_params
        if params is None or request.resumable or not params.extra_args:
            return None
        try:
            return read_hint(params.extra_args.get(HINT_KEY), self.nonce)
        except HintError:
            self.num_malformed_hints += 1
            return None

    def enter(self, request: Request) -> tuple[RequestView, Hint | None]:
        """Keep a view of a request that has come in: online work unless its hint says otherwise."""
        hint = self.read_hint(request)
        arrival_at_s = self.arrived_at_s(request)
        view = make_view(request, hint, self.slo, arrival_at_s)
        if isinstance(hint, FlexHint):
            stand_behind(view, self._places)
        if view.is_offline and view.expected_output_tokens == UNKNOWN_TOKENS:
            view.expected_output_tokens = self.untold_answers.room_tokens
            self.untold_answers.sent(request.request_id)
        if not view.is_offline:
            self.call_began(arrival_at_s)
        if isinstance(hint, SloHint):
            self._class_seen_at_s = arrival_at_s
            self._classed.add(request.request_id)
        self.views[request.request_id] = view
        if view.is_offline:
            self.num_offline += 1
            insort(self._places, (view.epoch, view.rank))
        self._announce(request, hint)
        return view, hint

    def call_began(self, arrival_at_s: float) -> None:
        """A call, or a session's turn, has come in."""
        self.calls.begun(arrival_at_s)
        self._call_seen_at_s = max(self._call_seen_at_s, arrival_at_s)

    def arrived_at_s(self, request: Request) -> float:
        """When the request came; never later than now, whatever its wall clock showed."""
        if self.wall is None:
            return request.arrival_time
        now_s = self.follow_wall()
        return min(now_s, request.arrival_time - self.wall_offset_s)

    def follow_wall(self) -> float:
        """Now. The offset of the wall clock is right then, though that was set since it was looked
        at, or the machine slept, while our clock stood."""
        now_s = self.clock()
        if self.wall is not None and abs(self.wall() - now_s - self.wall_offset_s) > WALL_DRIFT_S:
            self.wall_offset_s = self.wall() - now_s
        return now_s

    def has_classes(self, now_s: float) -> bool:
        """Whether a call with bounds of its own is there, or came in the last minute."""
        return bool(self._classed) or now_s - self._class_seen_at_s < ONLINE_MEMORY_S

    def were_calls_lately(self, now_s: float) -> bool:
        """Whether one came or ended in the last minute."""
        return now_s - self._call_seen_at_s < ONLINE_MEMORY_S

    def are_calls_near(self, now_s: float) -> bool:
        """Whether calls are there, or were lately."""
        return self.were_calls_lately(now_s) or len(self.views) > self.num_offline

    def leave(self, request: Request) -> RequestView | None:
        """Forget a request that ends, before its blocks are freed; None for one never seen."""
        view = self.views.pop(request.request_id, None)
        self._classed.discard(request.request_id)
        if view is not None:
            if view.is_offline:
                self.num_offline -= 1
                del self._places[bisect_left(self._places, (view.epoch, view.rank))]
            else:
                self._call_seen_at_s = self.clock()
            self._learn_length(request, view)
        if self.kv is not None:
            self.kv.finished(request)
        return view

    def mark_call(self, request: Request, view: RequestView | None) -> None:
        """A request is about to give its blocks up; one without a view is an online one."""
        if self.kv is not None and (view is None or not view.is_row):
            for blocks in self.manager.get_blocks(request.request_id).blocks:
                self.kv.tiers.mark_call(blocks)

    def keep_by_use(self) -> None:
        """From now on blocks are evicted by what rows and calls will read, where KV is cached and
        the model has one KV group; others keep vLLM's own queue."""
        if self.kv is None and self._can_tier:
            self.kv = KvTiers(self.manager, self.settings.eviction)
            for view in self.views.values():
                if view.is_offline:
                    self._announce(view.handle, self.read_hint(view.handle))

    def expire(self, now_s: float) -> None:
        """Void what hints and online hits said too long ago."""
        if self.kv is not None:
            self.kv.expire(now_s)

    def count_jobs(self, orders: Orders) -> None:
        """The hints of these jobs count for another lease, or no longer."""
        if self.kv is not None:
            self.kv.renew(orders.epoch, orders.renew, self.clock())
            for job in orders.forget:
                self.kv.forget(job)

    def got_token(self, view: RequestView, now_s: float, *, is_last: bool) -> None:
        """An online request got a token; `first_token_at_s` is not set by the first yet."""
        if not self.num_offline:
            return
        if view.first_token_at_s is None:
            self.margin.saw_first(now_s, is_late=now_s - view.arrival_at_s > view.slo_ttft_s)
        elif is_last and (num_gaps := view.handle.num_output_tokens - 1) > 0:
            is_late = now_s - view.first_token_at_s > num_gaps * view.slo_tpot_s
            self.margin.saw_last(now_s, is_late=is_late)

    def hear_callers(self, felt: FeltCalls | None) -> None:
        """What the gateway saw of calls counts for the margin, if rows were beside them."""
        if felt is not None:
            self.margin.hear(felt, self.clock(), beside_rows=self.num_offline > 0)

    def _learn_length(self, request: Request, view: RequestView) -> None:
        """A request ends; of those whose hints tell nothing, the next ones are expected alike."""
        if request.status in _COMPLETE or ends_on_string(request):
            if not view.is_offline:
                promise = view.promise if view.slo_jct_s < math.inf else None
                self.calls.ended(request.num_output_tokens, promise)
            self.untold_answers.ended(request.request_id, request.num_output_tokens)
        else:
            self.untold_answers.lost(request.request_id)

    def _announce(self, request: Request, hint: Hint | None) -> None:
        if isinstance(hint, RowHint) and self.kv is not None:
            self.kv.announce(request, hint, self.clock())


_COMPLETE = frozenset({
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
})


def ends_on_string(request: Request) -> bool:
    """Whether the request is taken to have come to a stop string: the front end looks for those,
    and the engine is only told to abort."""
    params = request.sampling_params
    is_aborted = request.status == RequestStatus.FINISHED_ABORTED and not request.resumable
    return is_aborted and request.num_output_tokens > 0 and bool(params and params.stop)


class Surviving:
    """For what only watches an engine, or could be done without in this step: an error within is
    counted, and the first is logged, where it would end the engine and all requests."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def __enter__(self) -> None:
        """Nothing is opened: it may be used again and again."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._state.num_policy_errors += 1
        if self._state.num_policy_errors == 1:
            log.error("batchrun: this failed; the step goes on without it", exc_info=error)
        return True


def make_view(
    request: Request, hint: Hint | None, slo: OnlineSlo, arrival_at_s: float
) -> RequestView:
    """The view of a request that has just come in; without a hint it is online."""
    lora = request.lora_request
    is_offline = isinstance(hint, RowHint | FlexHint)
    view = RequestView(
        request_id=request.request_id,
        request_class=RequestClass.OFFLINE if is_offline else RequestClass.ONLINE,
        arrival_at_s=arrival_at_s,
        num_prompt_tokens=request.num_prompt_tokens,
        max_output_tokens=request.max_tokens,
        priority=request.priority,
        lora_id=0 if lora is None else lora.lora_int_id,
        num_tokens=request.num_tokens,
        handle=request,
    )
    if isinstance(hint, RowHint):
        view.is_row, view.epoch, view.rank = True, hint.epoch, hint.rank
        if hint.output_tokens is not UNSET:
            view.expected_output_tokens = hint.output_tokens
        key = key_of(hint)
        if key is not None:
            view.group = hint.job, key.node
            view.announced_followers = key.num_rows_to_come
    elif not is_offline:
        view.has_class = isinstance(hint, SloHint)
        bounds = hint.slo if isinstance(hint, SloHint) else slo
        view.slo_ttft_s, view.slo_tpot_s = bounds.ttft_s, bounds.tpot_s
        view.slo_jct_s = math.inf if bounds.jct_s is None else bounds.jct_s
        view.slo_value = bounds.value if isinstance(bounds, SloBounds) else 1.0
    return view


def stand_behind(view: RequestView, places: Sequence[tuple[int, int]]) -> None:
    """Give an offline call its place: behind all offline requests that are here, whose `places` are
    in order, and before those that come later. So neither a long job nor a stream of calls keeps
    the other waiting for ever.
    """
    view.epoch, view.rank = places[-1] if places else (0, 0)


def begin_turn(view: RequestView, request: Request, arrival_at_s: float) -> None:
    """The next turn of a streaming session begins; what came before it is its prompt now."""
    view.arrival_at_s = arrival_at_s
    view.first_token_at_s = None
    view.num_prompt_tokens = request.num_prompt_tokens
    view.num_tokens = request.num_tokens
    view.max_output_tokens = request.max_tokens
