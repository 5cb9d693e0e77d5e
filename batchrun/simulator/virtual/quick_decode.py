"""Steps in which every request only decodes, in a fraction of the time that vLLM takes for them.

Most steps of a served engine admit nobody, end nobody and find room for every token. vLLM goes
through all its cases for each request of such a step; here the few fields that it would change are
changed alone. What a simulation sees is the same to the last block: a test compares the two step by
step (tests/simulation/test_quick_decode.py). Any other step is vLLM's own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from batchrun.simulator.virtual.engine import STOP_TOKEN_ID

KNOWN_VERSIONS = ("0.32.",)
"""Releases of vLLM whose steps were compared; with any other every step is vLLM's own."""

RUNNING = RequestStatus.RUNNING
STOP = [STOP_TOKEN_ID]
NOTHING_CACHED = CachedRequestData.make_empty()


class QuickOutput(SchedulerOutput):
    """A step scheduled here. It names the tokens of each request, and nothing for a worker."""


class QuickDecode(AsyncScheduler):
    """vLLM's scheduler, quicker where nothing but decoding happens. For virtual engines only.

    It stands between a scheduler class and vLLM's (`quick`), which therefore plans, counts and
    learns in every step as it always does. `num_quick_steps` counts the steps scheduled here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_quick_steps = 0
        self._can_be_quick = vllm.__version__.startswith(KNOWN_VERSIONS) and _is_plain(self)

    # The signature is vLLM's.
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:  # noqa: FBT001, FBT002
        """The next step: quick where it only decodes, else vLLM's own."""
        due = None if throttle_prefills else self._only_decodes()
        return super().schedule(throttle_prefills) if due is None else self._decode(due)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """One token for every request of a quick step in which none ends; else vLLM's own."""
        sampled = model_runner_output.sampled_token_ids
        if type(scheduler_output) is QuickOutput and STOP not in sampled:
            going_on = self._going_on(scheduler_output)
            if going_on is not None:
                return self._hand_out(going_on, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _only_decodes(self) -> list[Request] | None:
        """The requests that get a token, if the next step does nothing else and finds room."""
        if (
            not self._can_be_quick
            or self.waiting
            or self.kv_holding_waiting
            or self.need_mamba_block_aligned_split
            or self._pause_state != PauseState.UNPAUSED
            or len(self.running) > self.max_num_scheduled_tokens
        ):
            return None
        due: list[Request] = []
        num_blocks, size, longest = 0, self.block_size, self.max_model_len - 2
        for request in self.running:
            computed, in_flight = request.num_computed_tokens, request.num_output_placeholders
            last = request.num_prompt_tokens + request.max_tokens
            if in_flight > 0 and computed + 2 - in_flight >= last:
                continue
            if len(request._all_token_ids) + in_flight != computed + 1 or computed > longest:
                return None
            if request.is_prefill_chunk:
                return None
            num_blocks += computed % size == 0
            due.append(request)
        is_room = num_blocks <= self.kv_cache_manager.block_pool.get_num_free_blocks()
        return due if due and is_room else None

    def _decode(self, due: list[Request]) -> SchedulerOutput:
        """Schedule one token of each; a request takes a block, or has one cached, when it is due.

        vLLM asks for both in every step, and gets either only at a multiple of the block's size.
        """
        self.current_step += 1
        self.num_quick_steps += 1
        size = self.block_size
        tokens: dict[str, int] = {}
        for request in due:
            computed = request.num_computed_tokens
            if computed % size == 0 or len(request._all_token_ids) % size == 0:
                self.kv_cache_manager.allocate_slots(request, 1)
            tokens[request.request_id] = 1
            request.num_computed_tokens = computed + 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += 1
        self.kv_cache_manager.take_new_block_ids()
        self.prev_step_scheduled_req_ids.clear()
        self.prev_step_scheduled_req_ids.update(tokens)
        output = QuickOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=NOTHING_CACHED,
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=len(tokens),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
            preempted_req_ids=self.reset_preempted_req_ids,
        )
        self.finished_req_ids = set()
        self.reset_preempted_req_ids = set()
        return output

    def _going_on(self, output: SchedulerOutput) -> list[Request] | None:
        """The requests of the step, if all of them run on after this token."""
        going_on: list[Request] = []
        requests, longest = self.requests, self.max_model_len
        for request_id in output.num_scheduled_tokens:
            request = requests.get(request_id)
            if (
                request is None
                or request.status != RUNNING
                or request.num_stale_output_tokens
                or request.prefill_stats is not None
                or len(request._output_token_ids) + 1 >= request.max_tokens
                or len(request._all_token_ids) + 1 >= longest
            ):
                return None
            going_on.append(request)
        return going_on

    def _hand_out(
        self, going_on: list[Request], result: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        size = self.block_size
        outputs: list[EngineCoreOutput] = []
        for request, new_tokens in zip(going_on, result.sampled_token_ids, strict=True):
            request.num_in_flight_tokens -= 1
            request._output_token_ids.append(new_tokens[0])
            request._all_token_ids.append(new_tokens[0])
            if len(request._all_token_ids) % size == 0:
                request.update_block_hashes()
            request.num_output_placeholders -= 1
            known = request.num_computed_tokens - request.num_output_placeholders
            if known % size == 0:
                self.kv_cache_manager.cache_blocks(request, known)
            outputs.append(EngineCoreOutput(request.request_id, new_tokens))
        return {going_on[0].client_index: EngineCoreOutputs(outputs=outputs)}


@cache
def quick(scheduler_cls: type[Scheduler]) -> type[Scheduler]:
    """`scheduler_cls` with quick steps under it; itself if it does not schedule ahead."""
    if not issubclass(scheduler_cls, AsyncScheduler):
        return scheduler_cls
    if scheduler_cls is AsyncScheduler:
        return QuickDecode
    return type(f"Quick{scheduler_cls.__name__}", (scheduler_cls, QuickDecode), {})


def _is_plain(scheduler: AsyncScheduler) -> bool:
    """Whether nothing but tokens and blocks of one kind is to be kept account of."""
    return (
        len(scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups) == 1
        and not scheduler.num_spec_tokens
        and not scheduler.use_v2_model_runner
        and not scheduler.defer_block_free
        and not scheduler.log_stats
        and scheduler.connector is None
        and scheduler.ec_connector is None
        and scheduler.lora_config is None
    )
