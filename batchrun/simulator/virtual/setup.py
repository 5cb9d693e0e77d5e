"""A vLLM scheduler as an engine core builds it, for a model that is only a config file.

And the law of its step times, which policies and estimators never see.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

from batchrun.estimator.step_load import StepLoad
from batchrun.estimator.step_time import StepTimeModel
from batchrun.hints import HINT_NONCE_VARIABLE

NONCE = "virtual-engine"

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 131_072,
    "torch_dtype": "float16",
}


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What an operator would set on a vLLM engine. Defaults are the reference scenario's.

    `num_blocks` KV blocks of `block_tokens` tokens; `token_budget` tokens and `max_num_seqs`
    requests in a step. `additional_config` reaches the scheduler class in its VllmConfig.
    """

    num_blocks: int = 8600
    token_budget: int = 2048
    max_num_seqs: int = 256
    block_tokens: int = 16
    max_model_len: int = 32_768
    policy: Literal["fcfs", "priority"] = "priority"
    additional_config: Mapping[str, object] = field(default_factory=dict)


def stock_scheduler(steps_in_flight: int) -> type[Scheduler]:
    """The class that vLLM itself uses with so many steps in flight."""
    return AsyncScheduler if steps_in_flight > 1 else Scheduler


def build_scheduler(
    scheduler_cls: type[Scheduler], shape: EngineShape, *, is_async: bool
) -> Scheduler:
    """A scheduler of the class with an empty KV cache. Takes about 0.1 s.

    `is_async` says that steps are scheduled ahead, as on a GPU. The environment carries the hint
    nonce `NONCE` while the scheduler is built.
    """
    with _quiet_vllm():
        config = _vllm_config(shape)
    # The CPU platform turns it off; this engine has no platform.
    config.scheduler_config.async_scheduling = is_async
    spec = FullAttentionSpec(
        block_size=shape.block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float16
    )
    kv_cache_config = KVCacheConfig(
        num_blocks=shape.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    with _hint_nonce(), _quiet_vllm():
        return scheduler_cls(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=shape.block_tokens,
            log_stats=False,
        )


def _vllm_config(shape: EngineShape) -> VllmConfig:
    with tempfile.TemporaryDirectory(prefix="batchrun-virtual-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL_CONFIG))
        model = ModelConfig(
            model=folder,
            served_model_name="virtual",
            max_model_len=shape.max_model_len,
            dtype="float16",
            skip_tokenizer_init=True,
        )
    scheduler = SchedulerConfig(
        max_num_batched_tokens=shape.token_budget,
        max_num_seqs=shape.max_num_seqs,
        max_model_len=shape.max_model_len,
        enable_chunked_prefill=True,
        policy=shape.policy,
        is_encoder_decoder=False,
    )
    cache = CacheConfig(block_size=shape.block_tokens, enable_prefix_caching=True)
    cache.num_gpu_blocks = shape.num_blocks
    return VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        additional_config=dict(shape.additional_config),
    )


@contextmanager
def _hint_nonce() -> Iterator[None]:
    before = os.environ.get(HINT_NONCE_VARIABLE)
    os.environ[HINT_NONCE_VARIABLE] = NONCE
    try:
        yield
    finally:
        if before is None:
            del os.environ[HINT_NONCE_VARIABLE]
        else:
            os.environ[HINT_NONCE_VARIABLE] = before


@contextmanager
def _quiet_vllm() -> Iterator[None]:
    """vLLM's warnings about the platform concern no virtual engine."""
    logger = logging.getLogger("vllm")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


StepItem = tuple[int, int, bool]


class StepLaw(Protocol):
    """What a step takes, in seconds."""

    @property
    def expected(self) -> StepLaw:
        """The law without its noise; asking it changes nothing."""

    def step_s(self, items: Sequence[StepItem]) -> float:
        """The duration of one step. A noisy law draws: call it once per step."""


@dataclass(frozen=True, slots=True)
class A100Law:
    """Llama-3.1-8B in bf16 on an A100-40GB, as in Echo's evaluation (section 7.1): a roofline.

    step = overhead + max(c, m) + overlap_loss * min(c, m), where c is the time of the arithmetic
    and m that of reading the weights and every KV entry of the step's requests.
    """

    overhead_s: float = 0.003
    flop_per_token: float = 16e9
    flop_per_token_pair: float = 4 * 4096 * 32
    flop_per_s: float = 220e12
    weight_bytes: float = 16e9
    kv_bytes_per_token: float = 131_072
    bytes_per_s: float = 1.4e12
    overlap_loss: float = 0.25

    @property
    def expected(self) -> StepLaw:
        """Itself: this law has no noise."""
        return self

    def step_s(self, items: Sequence[StepItem]) -> float:
        """See the class; a chunk of n tokens attends to n * (context - n / 2) pairs."""
        tokens = contexts = doubled_pairs = 0
        for new, context, _ in items:
            tokens += new
            contexts += context
            doubled_pairs += new * (2 * context - new)
        flop = self.flop_per_token * tokens + self.flop_per_token_pair * doubled_pairs / 2
        compute_s = flop / self.flop_per_s
        memory_s = (self.weight_bytes + self.kv_bytes_per_token * contexts) / self.bytes_per_s
        shorter_s, longer_s = sorted((compute_s, memory_s))
        return self.overhead_s + longer_s + self.overlap_loss * shorter_s


@dataclass(frozen=True, slots=True)
class ModelLaw:
    """Steps take as long as a fitted model says."""

    model: StepTimeModel

    @property
    def expected(self) -> StepLaw:
        """Itself: a model has no noise."""
        return self

    def step_s(self, items: Sequence[StepItem]) -> float:
        """The model's prediction."""
        return self.model.predict_s(StepLoad.of(items))
