"""Estimates: how long a step takes, how much KV online requests will want.

Pure: no clock, no random source, no other part of batchrun but its errors.
"""

from batchrun.estimator.chunk import largest_chunk, pivot_tokens
from batchrun.estimator.echo_base_fit import fit_echo_base
from batchrun.estimator.echo_fit import fit_echo
from batchrun.estimator.fit import FittedModel, fit_all, fit_linear
from batchrun.estimator.forecast import ForecastCoverage, ForecastRule, KvForecast
from batchrun.estimator.held_out import HeldOutError
from batchrun.estimator.online_fit import COLD_START, OnlineFit
from batchrun.estimator.profile import CalibrationProfile, EngineIdentity, profile_from_json
from batchrun.estimator.roofline_fit import fit_roofline
from batchrun.estimator.step_load import StepLoad
from batchrun.estimator.step_table import Observation, StepTable
from batchrun.estimator.step_time import (
    AnyModel,
    EchoBaseModel,
    EchoModel,
    LinearModel,
    RooflineModel,
    StepTimeModel,
    model_from_record,
    model_to_record,
)

__all__ = [
    "COLD_START",
    "AnyModel",
    "CalibrationProfile",
    "EchoBaseModel",
    "EchoModel",
    "EngineIdentity",
    "FittedModel",
    "ForecastCoverage",
    "ForecastRule",
    "HeldOutError",
    "KvForecast",
    "LinearModel",
    "Observation",
    "OnlineFit",
    "RooflineModel",
    "StepLoad",
    "StepTable",
    "StepTimeModel",
    "fit_all",
    "fit_echo",
    "fit_echo_base",
    "fit_linear",
    "fit_roofline",
    "largest_chunk",
    "model_from_record",
    "model_to_record",
    "pivot_tokens",
    "profile_from_json",
]
