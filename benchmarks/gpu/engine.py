"""A real vLLM engine core in this process, with a fresh scheduler for every phase.

`EngineCore.step_fn` is vLLM's own loop body: two steps in flight on a GPU, one on a CPU. Between
phases the idle core gets a new scheduler, and with it an empty KV cache and another policy or token
budget, while the model stays loaded. Requests come from the sources of the virtual engine, on a
clock that starts with the phase.
"""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from batchrun.estimator.probes import PROBING_SETTINGS, PromptMaker, make_round
from batchrun.estimator.profile import CalibrationProfile, calibrate, read_recording
from batchrun.hints import HINT_KEY, HINT_NONCE_VARIABLE
from batchrun.simulator.virtual.engine import (
    OFFLINE_PRIORITY,
    ONLINE_PRIORITY,
    Arrival,
    RequestRecord,
    TrafficSource,
)
from batchrun.simulator.virtual.setup import NONCE
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from benchmarks.gpu.shape import Shape
from benchmarks.row_feeds import ProbeSource

MAX_ROUNDS = 3


def calibrate_model(
    model: LoadedModel, budget: int, folder: Path, *, limit_s: float
) -> tuple[CalibrationProfile, Path]:
    """Probe the loaded model for at most about `limit_s` and write its profile to `folder`.

    Raises EngineError when the model computed too few steps in that time.
    """
    steps_path, profile_path = folder / "steps.jsonl", folder / "profile.json"
    scheduler = model.renew_scheduler(budget, {**PROBING_SETTINGS, "record_steps": str(steps_path)})
    facts = read_recording(steps_path.read_text()).facts
    prompts = PromptMaker(facts.vocabulary)
    callers = ProbeSource()
    phase = Phase(model, scheduler, [callers])
    for _ in range(MAX_ROUNDS):
        prompts.next_round()
        for probe in make_round(facts):
            if phase.now_s < limit_s:
                callers.begin(probe, prompts)
                phase.run_until(math.inf, until_idle=True)
    phase.finish()
    profile = calibrate(read_recording(steps_path.read_text()), measured_at=time.time())
    profile_path.write_text(profile.to_json())
    return profile, profile_path


STOP_TOKEN_ID = -1
"""Ends an answer. No vocabulary has it, so random weights never do."""
IDLE_POLL_S = 0.001
"""vLLM's own sleep after a step that computed nothing."""
DRAIN_LIMIT_S = 30.0


class WatchedScheduler(ColocatedScheduler):
    """`ColocatedScheduler` that shows what each step was made of and how long planning took.

    Answers end where the load says, not where random weights do: their last token becomes
    `STOP_TOKEN_ID`, by the lengths in `answer_tokens`, so that no policy knows them before.
    """

    on_step: Callable[[SchedulerOutput, float], None] | None = None
    answer_tokens: Mapping[str, int] = MappingProxyType({})

    # The signature is vLLM's.
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:  # noqa: FBT001, FBT002
        """As the product's, timed."""
        begin_s = time.perf_counter()
        output = super().schedule(throttle_prefills)
        if self.on_step is not None:
            self.on_step(output, time.perf_counter() - begin_s)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """As the product's, after each answer's last token was put in."""
        sampled = model_runner_output.sampled_token_ids
        for request_id, place in model_runner_output.req_id_to_index.items():
            request, num_tokens = self.requests.get(request_id), self.answer_tokens.get(request_id)
            if request is None or num_tokens is None or not sampled or not sampled[place]:
                continue
            if request.num_output_tokens == num_tokens - 1:
                sampled[place] = [STOP_TOKEN_ID]
        return super().update_from_output(scheduler_output, model_runner_output)


class LoadedModel:
    """A model on the device, ready for phases. Shut its core down at the end."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        """Load random weights and allocate the KV cache: 30 to 90 s on a GPU."""
        os.environ[HINT_NONCE_VARIABLE] = NONCE
        # The config alone: weights are random, prompts are token ids.
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(shape.config))
        arguments = EngineArgs(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            block_size=shape.block_tokens,
            num_gpu_blocks_override=shape.num_blocks,
            max_num_batched_tokens=shape.budget,
            max_num_seqs=256,
            scheduling_policy="priority",
            enable_prefix_caching=True,
            scheduler_cls=WatchedScheduler,
            additional_config={HINT_KEY: {"policy": "bs"}},
            **shape.engine,
        )
        config = arguments.create_engine_config()
        self.core = EngineCore(config, Executor.get_class(config), log_stats=False)

    def renew_scheduler(self, budget: int, settings: Mapping[str, object]) -> WatchedScheduler:
        """A new scheduler on the idle core, with an empty KV cache."""
        core = self.core
        old = core.scheduler
        assert isinstance(old, WatchedScheduler)
        assert not old.has_requests()
        config = copy.copy(core.vllm_config)
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.max_num_batched_tokens = budget
        config.scheduler_config.max_num_scheduled_tokens = budget
        config.additional_config = {HINT_KEY: dict(settings)}
        block_tokens, hash_block_tokens = resolve_kv_cache_block_sizes(old.kv_cache_config, config)
        core.scheduler = WatchedScheduler(
            config,
            old.kv_cache_config,
            structured_output_manager=core.structured_output_manager,
            include_finished_set=False,
            log_stats=False,
            block_size=block_tokens,
            hash_block_size=hash_block_tokens,
        )
        return core.scheduler


class Step(NamedTuple):
    """A step that computed something: when it was scheduled, its tokens, the planning time."""

    at_s: float
    num_tokens: int
    num_offline_tokens: int
    planning_s: float


class Phase:
    """One scheduler under load. `requests` holds every request that ever arrived, by id."""

    def __init__(
        self, model: LoadedModel, scheduler: WatchedScheduler, sources: Sequence[TrafficSource]
    ) -> None:
        self.requests: dict[str, RequestRecord] = {}
        self.steps: list[Step] = []
        self._core = model.core
        self._scheduler = scheduler
        self._sources = sources
        self._began_s = time.monotonic()
        scheduler.use_clock(lambda: self.now_s)
        scheduler.on_step = self._on_step
        self._answer_tokens: dict[str, int] = {}
        scheduler.answer_tokens = self._answer_tokens

    @property
    def now_s(self) -> float:
        """Seconds since the phase began."""
        return time.monotonic() - self._began_s

    def run_until(self, end_s: float, *, until_idle: bool = False) -> None:
        """Run until the clock reaches `end_s`, or with `until_idle` until all work is done."""
        while self.now_s < end_s:
            for source in self._sources:
                if source.next_due_s <= self.now_s:
                    for arrival in source.take_due(self.now_s):
                        self._add(arrival)
            if not self._step() and until_idle:
                return

    def finish(self) -> None:
        """Abort what is left and run until the core is idle. Raises TimeoutError."""
        self._core.abort_requests([
            request_id
            for request_id, record in self.requests.items()
            if record.finished_at_s is None
        ])
        deadline_s = self.now_s + DRAIN_LIMIT_S
        while self._step():
            if self.now_s > deadline_s:
                raise TimeoutError(f"the engine is not idle after {DRAIN_LIMIT_S:g} s")
        self._scheduler.on_step = None

    def _add(self, arrival: Arrival) -> None:
        num_output = arrival.num_output_tokens
        if num_output is not None:
            self._answer_tokens[arrival.request_id] = num_output
        request = Request(
            request_id=arrival.request_id,
            prompt_token_ids=arrival.prompt_token_ids,
            sampling_params=SamplingParams(
                max_tokens=arrival.max_output_tokens,
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                stop_token_ids=None if num_output is None else [STOP_TOKEN_ID],
                extra_args=None if arrival.hint is None else {HINT_KEY: arrival.hint},
            ),
            pooling_params=None,
            arrival_time=arrival.arrival_at_s,
            priority=ONLINE_PRIORITY if arrival.is_online else OFFLINE_PRIORITY,
            block_hasher=self._core.request_block_hasher,
        )
        self.requests[arrival.request_id] = RequestRecord(
            arrival.request_id,
            arrival.is_online,
            arrival.arrival_at_s,
            len(arrival.prompt_token_ids),
            token_seed=0,
            request=None,
        )
        self._core.add_request(request)

    def _step(self) -> bool:
        """One turn of vLLM's loop; False when it has nothing to do."""
        core = self._core
        if not core.scheduler.has_requests() and not core.batch_queue:
            time.sleep(IDLE_POLL_S)
            return False
        outputs, is_executed = core.step_fn()
        core.post_step(model_executed=is_executed)
        for batch in (outputs or {}).values():
            for output in batch.outputs:
                self._deliver(output)
        if not is_executed and not outputs and core.scheduler.has_requests():
            time.sleep(IDLE_POLL_S)
        return True

    def _deliver(self, output: EngineCoreOutput) -> None:
        record = self.requests[output.request_id]
        record.token_times_s += [self.now_s] * len(output.new_token_ids)
        if output.finish_reason is not None:
            record.finished_at_s = self.now_s
            record.finish_reason = str(output.finish_reason)
            for source in self._sources:
                source.on_finished(output.request_id)

    def _on_step(self, output: SchedulerOutput, planning_s: float) -> None:
        num_tokens = output.num_scheduled_tokens
        if not num_tokens:
            return
        now_s, requests = self.now_s, self.requests
        for new in output.scheduled_new_reqs:
            record = requests[new.req_id]
            if record.admitted_at_s is None:
                record.admitted_at_s, record.num_hit_tokens = now_s, new.num_computed_tokens
        offline = sum(num for name, num in num_tokens.items() if not requests[name].is_online)
        self.steps.append(Step(now_s, output.total_num_scheduled_tokens, offline, planning_s))
