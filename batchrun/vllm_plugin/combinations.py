"""What the plug-in cannot be combined with, refused by name when an engine starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm.config import VllmConfig

from batchrun.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Refusal:
    """A feature of vLLM that is refused; `option` is how an operator turned it on."""

    feature: str
    option: str
    is_on: Callable[[VllmConfig], bool]


REFUSALS = (
    Refusal(
        "pipeline parallelism",
        "--pipeline-parallel-size",
        lambda config: config.parallel_config.pipeline_parallel_size > 1,
    ),
    Refusal(
        "data-parallel ranks",
        "--data-parallel-size",
        # vLLM sets the size to 1 for the ranks of a dense model, but not their index.
        lambda config: (
            config.parallel_config.data_parallel_size > 1
            or config.parallel_config.data_parallel_index > 0
        ),
    ),
    Refusal(
        "context parallelism",
        "--decode-context-parallel-size, --prefill-context-parallel-size",
        lambda config: (
            config.parallel_config.decode_context_parallel_size > 1
            or config.parallel_config.prefill_context_parallel_size > 1
        ),
    ),
    Refusal(
        "a KV connector",
        "--kv-transfer-config, --kv-offloading-size",
        lambda config: config.kv_transfer_config is not None,
    ),
    Refusal(
        "an encoder-cache connector",
        "--ec-transfer-config",
        lambda config: config.ec_transfer_config is not None,
    ),
    Refusal(
        "speculative decoding",
        "--speculative-config",
        lambda config: config.speculative_config is not None,
    ),
    Refusal(
        "a pooling model",
        "--runner pooling",
        lambda config: config.model_config.runner_type == "pooling",
    ),
    Refusal(
        "a diffusion model",
        "--model",
        lambda config: bool(config.model_config.is_diffusion),
    ),
    Refusal(
        "an encoder-decoder model",
        "--model",
        lambda config: bool(config.model_config.is_encoder_decoder),
    ),
    Refusal(
        "prefills in one piece",
        "--no-enable-chunked-prefill",
        lambda config: not config.scheduler_config.enable_chunked_prefill,
    ),
    Refusal(
        "a limit on queued requests, which would turn online calls away while offline rows wait",
        "--max-num-queued-reqs, --max-num-queued-tokens",
        lambda config: any(
            getattr(config.scheduler_config, name, None) is not None
            for name in ("max_num_queued_reqs", "max_num_queued_tokens")
        ),
    ),
)


def check_combinations(config: VllmConfig) -> None:
    """Raises ConfigError, one line, for the first feature that is on and refused."""
    for refusal in REFUSALS:
        if refusal.is_on(config):
            raise ConfigError(
                f"batchrun's scheduler cannot be combined with {refusal.feature} "
                f"({refusal.option}): leave that out, or set `policy: vllm` in batchrun.yaml to "
                "run vLLM's own scheduler"
            )
