"""What a step computes, read off vLLM's output."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from batchrun.estimator import StepLoad


def scheduled_load(
    output: SchedulerOutput, planned: StepLoad | None, requests: Mapping[str, Request]
) -> StepLoad | None:
    """The load of the step: the planned one where the step went as planned, None for an empty one.

    `requests` are the scheduler's, after it scheduled the step.
    """
    num_tokens = output.total_num_scheduled_tokens
    if not num_tokens:
        return None
    if (
        planned is not None
        and planned.num_tokens == num_tokens
        and planned.num_requests == len(output.num_scheduled_tokens)
    ):
        return planned
    load = StepLoad()
    for request_id, tokens in output.num_scheduled_tokens.items():
        request = requests[request_id]
        context = request.num_computed_tokens
        load.add(tokens, context, is_decode=tokens == 1 and context > request.num_prompt_tokens)
    return load
