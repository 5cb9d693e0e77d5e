"""The plug-in's settings: `--additional-config '{"batchrun": {...}}'` and the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batchrun.errors import ConfigError
from batchrun.estimator import ForecastRule
from batchrun.types import HINT_KEY, HINT_NONCE_VARIABLE

Seconds = Annotated[float, Field(gt=0)]
PolicyName = Literal["bs", "bs+e", "bs+e+s", "echo"]
EvictionName = Literal["lru", "echo-rc", "next-use"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OnlineSlo(_Strict):
    """The bounds of an online class, in seconds; `jct_s` is for the last token."""

    ttft_s: Seconds = 1.0
    tpot_s: Seconds = 0.05
    jct_s: Seconds | None = None


class PluginSettings(_Strict):
    """What an operator may set.

    `reserve`: share (0 to 1) of all KV blocks kept for online bursts, or `forecast`.
    `forecast_rule`, `forecast_window_s`, `forecast_sigmas`: what the forecast is made of, the
    window that it looks back on, and the k of mean + k * sigma (None: the rule's own).
    `profile`: the file of `batchrun calibrate` that the step-time models start from.
    `channel`: whether to open the channel to the daemon that the environment names.
    `record_steps`: a file to record every step to, in the place of learning from it.
    """

    policy: PolicyName = "echo"
    eviction: EvictionName = "next-use"
    slo: OnlineSlo = OnlineSlo()
    reserve: Annotated[float, Field(ge=0, lt=1)] | Literal["forecast"] = "forecast"
    forecast_rule: ForecastRule = ForecastRule.GROWTH
    forecast_window_s: Annotated[int, Field(ge=300)] = 900
    forecast_sigmas: Annotated[float, Field(ge=0)] | None = None
    profile: str | None = None
    channel: bool = True
    record_steps: str | None = None


def read_settings(additional_config: object) -> PluginSettings:
    """The settings under the key `batchrun`. Raises ConfigError with the key."""
    config = additional_config if isinstance(additional_config, Mapping) else {}
    given = config.get(HINT_KEY, {})
    try:
        return PluginSettings.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(["batchrun", *(str(part) for part in first["loc"])])
        raise ConfigError(f"--additional-config {key}: {first['msg']}") from error


def read_nonce() -> str:
    """The secret that a hint must carry; empty when the engine was started without one."""
    return os.environ.get(HINT_NONCE_VARIABLE, "")
