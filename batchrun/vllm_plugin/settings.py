"""What an engine is started with: the plug-in's own settings, and features of vLLM it refuses.

The settings stand in `--additional-config '{"batchrun": {...}}'`. What the plug-in cannot be
combined with is refused by name when the engine starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
)
from vllm.config import VllmConfig

from batchrun.cache.eviction import EVICTIONS
from batchrun.errors import ConfigError, known_name
from batchrun.estimator.forecast import ForecastRule
from batchrun.hints import AUTO_ONLINE_COST, HINT_KEY, MAX_BOUND_S, MAX_ONLINE_COST
from batchrun.scheduling.policies import POLICIES, QUEUES, QueueOptions
from batchrun.scheduling.queue_orders import DEFAULT_ALPHA

PolicyName = Annotated[str, AfterValidator(partial(known_name, known=POLICIES))]
QueueName = Annotated[str, AfterValidator(partial(known_name, known=QUEUES))]
EvictionName = Annotated[str, AfterValidator(partial(known_name, known=EVICTIONS))]


Bound = Annotated[float, Field(gt=0, le=MAX_BOUND_S, allow_inf_nan=False)]


OnlineCostFactor = Annotated[float, Field(gt=1, le=MAX_ONLINE_COST, allow_inf_nan=False)]


class OnlineSlo(BaseModel):
    """The bounds of online calls, in seconds; `jct_s` is for the last token. What batchrun.yaml may
    say of them is checked there, with libraries that an engine's own environment lacks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttft_s: Bound = 1.0
    tpot_s: Bound = 0.05
    jct_s: Bound | None = None


Slo = Annotated[
    Annotated[OnlineSlo, Tag("bounds")] | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda value: "auto" if isinstance(value, str) else "bounds"),
]


class PluginSettings(BaseModel):
    """What an operator may set.

    `slo`: the bounds of calls, or `auto`: learnt from what they would have alone.
    `online_queue`: the order in which waiting calls come in, under every policy but `bs`;
    `larry_alpha`: what waiting weighs under `larry`.
    `online_cost`: how many times as slow as alone calls may be (None: their bounds alone count).
    `reserve`: share (0 to 1) of all KV blocks kept for online bursts, or `forecast`.
    `forecast_rule`, `forecast_window_s`, `forecast_sigmas`: what the forecast is made of, the
    window that it looks back on, and the k of mean + k * sigma (None: the rule's own).
    `profile`: the file of `batchrun calibrate` that the step-time models start from.
    `channel`: whether to open the channel to the daemon that the environment names.
    `record_steps`: a file to record every step to, in the place of learning from it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: PolicyName = "echo"
    online_queue: QueueName = "auto"
    larry_alpha: Annotated[float, Field(ge=0, allow_inf_nan=False)] = DEFAULT_ALPHA
    eviction: EvictionName = "next-use"
    slo: Slo = OnlineSlo()
    online_cost: OnlineCostFactor | None = None
    reserve: Annotated[float, Field(ge=0, lt=1)] | Literal["forecast"] = "forecast"
    forecast_rule: ForecastRule = ForecastRule.GROWTH
    forecast_window_s: Annotated[int, Field(ge=300, le=604_800)] = 900
    forecast_sigmas: Annotated[float, Field(ge=0)] | None = None
    profile: str | None = None
    channel: bool = True
    record_steps: str | None = None

    @property
    def cost_in_force(self) -> float | None:
        """How many times as slow as alone calls may be, said or by default; None: nobody says."""
        default = AUTO_ONLINE_COST if self.slo == "auto" else None
        return self.online_cost or default

    @property
    def queue_options(self) -> QueueOptions:
        """What orders of the queue are told."""
        return QueueOptions(self.larry_alpha)


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


class Refusal(NamedTuple):
    """A feature of vLLM that is refused; `option` is how an operator turns it on."""

    feature: str
    option: str
    is_on: bool


def refusals(config: VllmConfig) -> tuple[Refusal, ...]:
    """Everything that is refused, and whether it is on in this configuration."""
    parallel, model = config.parallel_config, config.model_config
    scheduler = config.scheduler_config
    return (
        Refusal(
            "pipeline parallelism", "--pipeline-parallel-size", parallel.pipeline_parallel_size > 1
        ),
        # vLLM sets the size to 1 for the ranks of a dense model, but not their index.
        Refusal(
            "data-parallel ranks",
            "--data-parallel-size",
            parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0,
        ),
        Refusal(
            "context parallelism",
            "--decode-context-parallel-size, --prefill-context-parallel-size",
            max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
        ),
        Refusal(
            "a KV connector",
            "--kv-transfer-config, --kv-offloading-size",
            config.kv_transfer_config is not None,
        ),
        Refusal(
            "an encoder-cache connector",
            "--ec-transfer-config",
            config.ec_transfer_config is not None,
        ),
        Refusal(
            "speculative decoding", "--speculative-config", config.speculative_config is not None
        ),
        Refusal("a pooling model", "--runner pooling", model.runner_type == "pooling"),
        Refusal("a diffusion model", "--model", bool(model.is_diffusion)),
        Refusal("an encoder-decoder model", "--model", bool(model.is_encoder_decoder)),
        Refusal(
            "prefills in one piece",
            "--no-enable-chunked-prefill",
            not scheduler.enable_chunked_prefill,
        ),
        Refusal(
            "a limit on queued requests, which would turn online calls away while offline rows "
            "wait",
            "--max-num-queued-reqs, --max-num-queued-tokens",
            getattr(scheduler, "max_num_queued_reqs", None) is not None
            or getattr(scheduler, "max_num_queued_tokens", None) is not None,
        ),
    )


def check_combinations(config: VllmConfig) -> None:
    """Raises ConfigError, one line, for the first feature that is on and refused."""
    for refusal in refusals(config):
        if refusal.is_on:
            raise ConfigError(
                f"batchrun's scheduler cannot be combined with {refusal.feature} "
                f"({refusal.option}): leave that out, or set `policy: vllm` in batchrun.yaml to "
                "run vLLM's own scheduler"
            )
