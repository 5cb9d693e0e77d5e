"""Keeping a `RequestView` of every live request true to vLLM's own `Request`."""

from __future__ import annotations

import math
from collections.abc import Iterable

from vllm.v1.request import Request

from batchrun.scheduling import RequestView
from batchrun.types import USUAL_OUTPUT_TOKENS, RequestClass
from batchrun.vllm_plugin.hints import AnyHint, FlexHint, Hint, SloHint
from batchrun.vllm_plugin.settings import OnlineSlo

MARGIN_SHARE = 0.25
"""Room for an answer that is longer than expected, as a share of what is."""


def make_view(
    request: Request, hint: AnyHint | None, slo: OnlineSlo, arrival_at_s: float
) -> RequestView:
    """The view of a request that has just come in; without a hint it is online."""
    lora = request.lora_request
    is_offline = isinstance(hint, Hint | FlexHint)
    view = RequestView(
        request_id=request.request_id,
        request_class=RequestClass.OFFLINE if is_offline else RequestClass.ONLINE,
        arrival_at_s=arrival_at_s,
        num_prompt_tokens=request.num_prompt_tokens,
        max_output_tokens=request.max_tokens,
        lora_id=0 if lora is None else lora.lora_int_id,
        num_tokens=request.num_tokens,
        handle=request,
    )
    if isinstance(hint, Hint):
        view.is_row, view.epoch, view.rank = True, hint.epoch, hint.rank
        view.expected_output_tokens = _with_margin(hint.output_tokens)
        if hint.nodes:
            view.group = hint.job, hint.nodes[-1].node
            view.num_followers = hint.nodes[-1].num_rows_to_come
    elif is_offline:
        view.expected_output_tokens = _with_margin(None)
    else:
        bounds = hint if isinstance(hint, SloHint) else slo
        view.slo_ttft_s, view.slo_tpot_s = bounds.ttft_s, bounds.tpot_s
        view.slo_jct_s = math.inf if bounds.jct_s is None else bounds.jct_s
    return view


def _with_margin(output_tokens: int | None) -> int:
    """What to set aside for an answer of about this length, or of one that nobody knows."""
    tokens = USUAL_OUTPUT_TOKENS if output_tokens is None else output_tokens
    return math.ceil((1 + MARGIN_SHARE) * tokens)


def stand_behind(view: RequestView, others: Iterable[RequestView]) -> None:
    """Give an offline call its place: behind all offline requests that are here, and before those
    that come later. So neither a long job nor a stream of calls keeps the other waiting for ever.
    """
    places = ((other.epoch, other.rank) for other in others if other.is_offline)
    view.epoch, view.rank = max(places, default=(0, 0))


def begin_turn(view: RequestView, request: Request, wall_offset_s: float) -> None:
    """The next turn of a streaming session begins; what came before it is its prompt now."""
    view.arrival_at_s = request.arrival_time - wall_offset_s
    view.first_token_at_s = None
    view.num_prompt_tokens = request.num_prompt_tokens
    view.num_tokens = request.num_tokens
    view.max_output_tokens = request.max_tokens


def refresh(view: RequestView, request: Request) -> None:
    """Bring the view of a running request up to now, steps in flight counted as done.

    What is left is vLLM's own sum (its `schedule`, top of the running loop); it is 0 when the
    output in flight is sure to be the last.
    """
    placeholders = request.num_output_placeholders
    computed = request.num_computed_tokens
    num_tokens, prompt = request.num_tokens, view.num_prompt_tokens
    left = num_tokens + placeholders - computed
    if placeholders and computed + 2 - placeholders >= prompt + view.max_output_tokens:
        left = 0
    view.work_left_tokens = left
    view.num_computed_tokens = computed
    view.num_output_tokens = num_tokens - prompt + placeholders
    view.num_tokens = num_tokens
