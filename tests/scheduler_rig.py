"""A scheduler of whichever vLLM is imported, driven by hand: requests in, steps out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from batchrun.hints import HINT_KEY, HINT_VERSION
from batchrun.simulator.virtual.engine import BlockHasher
from batchrun.simulator.virtual.setup import NONCE, EngineShape, build_scheduler
from batchrun.vllm_plugin.scheduler import ColocatedScheduler

BLOCK_TOKENS = 16

Change = Callable[[VllmConfig], None]


def build(
    scheduler_cls: type[Scheduler] = ColocatedScheduler,
    *,
    policy: str = "echo",
    change: Change = lambda config: None,
    specs: Sequence[KVCacheSpec] = (),
    log_stats: bool = False,
    **shape: Any,
) -> Scheduler:
    """A scheduler as an engine core builds it, two steps in flight.

    `change` alters its config; `specs`, one for each KV group, replace full attention alone.
    """
    groups = [KVCacheGroupSpec([f"layer-{i}"], spec) for i, spec in enumerate(specs)]

    def construct(
        vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, **arguments: Any
    ) -> Scheduler:
        change(vllm_config)
        if groups:
            kv_cache_config = replace(kv_cache_config, kv_cache_groups=groups)
        given = {**arguments, "log_stats": log_stats}
        return scheduler_cls(vllm_config, kv_cache_config, **given)

    additional = {"batchrun": {"policy": policy, "reserve": 0.0}}
    engine_shape = EngineShape(**{"num_blocks": 100, "additional_config": additional, **shape})
    return build_scheduler(construct, engine_shape, is_async=True)  # type: ignore[arg-type]


def ours(scheduler: Scheduler) -> ColocatedScheduler:
    """The same scheduler, known to be batchrun's."""
    assert isinstance(scheduler, ColocatedScheduler)
    return scheduler


def hint(row: int, job: str = "job") -> str:
    """The daemon's hint of a row."""
    return json.dumps({
        "v": HINT_VERSION, "nonce": NONCE, "epoch": 1, "job": job, "row": row,
        "class": "offline", "rank": row, "nodes": [],
    })  # fmt: skip


def make_request(
    name: str,
    num_tokens: int = 40,
    *,
    row: int | None = None,
    lora: int = 0,
    max_tokens: int = 3,
    resumable: bool = False,
    stop: list[str] | None = None,
    priority: int = 0,
    features: list[MultiModalFeatureSpec] | None = None,
) -> Request:
    """A request with a prompt of its own; offline where it has a `row`."""
    first = sum(name.encode()) % 1_000
    adapter = LoRARequest(f"adapter-{lora}", lora, "/nowhere") if lora else None
    return Request(
        request_id=name,
        prompt_token_ids=[5 + (first + i) % 1_900 for i in range(num_tokens)],
        sampling_params=SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            stop=stop,
            extra_args=None if row is None else {HINT_KEY: hint(row)},
        ),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=adapter,
        resumable=resumable,
        priority=priority,
        mm_features=features,
        block_hasher=BlockHasher(BLOCK_TOKENS, ()),
    )


def answer(scheduler: Scheduler, output: SchedulerOutput) -> list[EngineCoreOutput]:
    """End a step: every request whose known tokens are all computed gets the token 7."""
    names = list(output.num_scheduled_tokens)
    sampled = [[] if scheduler.requests[name].is_prefill_chunk else [7] for name in names]
    result = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
    by_client = scheduler.update_from_output(output, result)
    return [output for outputs in by_client.values() for output in outputs.outputs]


def step(scheduler: Scheduler) -> dict[str, int]:
    """One step, waited for; the tokens of each request in it."""
    output = scheduler.schedule()
    answer(scheduler, output)
    return dict(output.num_scheduled_tokens)


def run(scheduler: Scheduler, max_steps: int = 200) -> list[dict[str, int]]:
    """Step until nothing is left. Raises AssertionError when something is, after `max_steps`."""
    steps = []
    while scheduler.has_unfinished_requests():
        steps.append(step(scheduler))
        assert len(steps) < max_steps, "it never ends"
    return steps
