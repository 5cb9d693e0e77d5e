"""What an engine is started with: the plug-in's own settings, and features of vLLM it refuses.

The settings stand in `--additional-config '{"batchrun": {...}}'` and in the environment. What the
plug-in cannot be combined with is refused by name when the engine starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from vllm.config import VllmConfig

from batchrun.cache.eviction import EVICTIONS
from batchrun.errors import ConfigError, known_name
from batchrun.estimator.forecast import ForecastRule
from batchrun.hints import HINT_KEY, HINT_NONCE_VARIABLE
from batchrun.scheduling.policies import POLICIES, QUEUES

Seconds = Annotated[float, Field(gt=0)]
PolicyName = Annotated[str, AfterValidator(partial(known_name, known=POLICIES))]
QueueName = Annotated[str, AfterValidator(partial(known_name, known=QUEUES))]
EvictionName = Annotated[str, AfterValidator(partial(known_name, known=EVICTIONS))]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OnlineSlo(_Strict):
    """The bounds of an online class, in seconds; `jct_s` is for the last token."""

    ttft_s: Seconds = 1.0
    tpot_s: Seconds = 0.05
    jct_s: Seconds | None = None


class PluginSettings(_Strict):
    """What an operator may set.

    `online_queue`: the order in which waiting calls come in, under every policy but `bs`.
    `reserve`: share (0 to 1) of all KV blocks kept for online bursts, or `forecast`.
    `forecast_rule`, `forecast_window_s`, `forecast_sigmas`: what the forecast is made of, the
    window that it looks back on, and the k of mean + k * sigma (None: the rule's own).
    `profile`: the file of `batchrun calibrate` that the step-time models start from.
    `channel`: whether to open the channel to the daemon that the environment names.
    `record_steps`: a file to record every step to, in the place of learning from it.
    """

    policy: PolicyName = "echo"
    online_queue: QueueName = "arrival"
    eviction: EvictionName = "next-use"
    slo: OnlineSlo = OnlineSlo()
    reserve: Annotated[float, Field(ge=0, lt=1)] | Literal["forecast"] = "forecast"
    forecast_rule: ForecastRule = ForecastRule.GROWTH
    forecast_window_s: Annotated[int, Field(ge=300)] = 900
    forecast_sigmas: Annotated[float, Field(ge=0)] | None = None
    profile: str | None = None
    channel: bool = True
    record_steps: str | None = None

    @property
    def orders_calls(self) -> bool:
        """Whether calls come in otherwise than in vLLM's own steps, which then are planned too."""
        return self.online_queue != "arrival"


def read_settings(additional_config: object) -> PluginSettings:
    """The settings under the key `batchrun`. Raises ConfigError with the key."""
    config = additional_config if isinstance(additional_config, Mapping) else {}
    given = config.get(HINT_KEY, {})
    try:
        return PluginSettings.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(["batchrun", *(str(part) for part in first["loc"])])
        problem = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"--additional-config {key}: {problem}") from error


def read_nonce() -> str:
    """The secret that a hint must carry; empty when the engine was started without one."""
    return os.environ.get(HINT_NONCE_VARIABLE, "")


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
