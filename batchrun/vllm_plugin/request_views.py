"""Keeping a `RequestView` of every live request true to vLLM's own `Request`."""

from __future__ import annotations

from vllm.v1.request import Request

from batchrun.scheduling import RequestView
from batchrun.types import RequestClass
from batchrun.vllm_plugin.hints import Hint
from batchrun.vllm_plugin.settings import OnlineSlo


def make_view(
    request: Request, hint: Hint | None, slo: OnlineSlo, arrival_at_s: float
) -> RequestView:
    """The view of a request that has just come in; without a hint it is online."""
    lora = request.lora_request
    view = RequestView(
        request_id=request.request_id,
        request_class=RequestClass.ONLINE if hint is None else RequestClass.OFFLINE,
        arrival_at_s=arrival_at_s,
        num_prompt_tokens=request.num_prompt_tokens,
        max_output_tokens=request.max_tokens,
        lora_id=0 if lora is None else lora.lora_int_id,
        num_tokens=request.num_tokens,
        handle=request,
    )
    if hint is None:
        view.slo_ttft_s, view.slo_tpot_s = slo.ttft_s, slo.tpot_s
    else:
        view.rank = hint.rank
        view.group = hint.nodes[-1].node if hint.nodes else None
    return view


def refresh(view: RequestView, request: Request) -> None:
    """Bring the view of a running request up to now, steps in flight counted as done.

    What is left is vLLM's own sum (its `schedule`, top of the running loop); it is 0 when the
    output in flight is sure to be the last.
    """
    placeholders = request.num_output_placeholders
    computed = request.num_computed_tokens
    left = request.num_tokens_with_spec + placeholders - computed
    last = request.num_prompt_tokens + request.max_tokens
    if placeholders > 0 and computed + 2 - placeholders >= last:
        left = 0
    view.work_left_tokens = left
    view.num_computed_tokens = computed
    view.num_output_tokens = request.num_output_tokens + placeholders
    view.num_tokens = request.num_tokens
