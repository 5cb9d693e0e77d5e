"""Estimates: how long a step takes, how much KV online requests will want.

Pure: no clock, no random source, no other part of batchrun but its errors.
"""

from batchrun.estimator.calibrating import calibrate
from batchrun.estimator.chunk import largest_chunk, pivot_tokens
from batchrun.estimator.echo_base_fit import fit_echo_base
from batchrun.estimator.echo_fit import fit_echo
from batchrun.estimator.engine_facts import EngineFacts, EngineIdentity
from batchrun.estimator.fit import FittedModel, fit_all, fit_linear
from batchrun.estimator.forecast import ForecastCoverage, ForecastRule, KvForecast
from batchrun.estimator.held_out import HeldOutError
from batchrun.estimator.identical import IdenticalSpread, identical_spread
from batchrun.estimator.online_fit import COLD_START, OnlineFit
from batchrun.estimator.probes import (
    PROBING_SETTINGS,
    Probe,
    ProbeCall,
    PromptMaker,
    make_round,
)
from batchrun.estimator.profile import CalibrationProfile, OnlineLatency, profile_from_json
from batchrun.estimator.recording import Recording, facts_line, read_recording, step_line
from batchrun.estimator.roofline_fit import fit_roofline
from batchrun.estimator.step_gap import ObservedGap, StepGap, fit_gap
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
    "PROBING_SETTINGS",
    "AnyModel",
    "CalibrationProfile",
    "EchoBaseModel",
    "EchoModel",
    "EngineFacts",
    "EngineIdentity",
    "FittedModel",
    "ForecastCoverage",
    "ForecastRule",
    "HeldOutError",
    "IdenticalSpread",
    "KvForecast",
    "LinearModel",
    "Observation",
    "ObservedGap",
    "OnlineFit",
    "OnlineLatency",
    "Probe",
    "ProbeCall",
    "PromptMaker",
    "Recording",
    "RooflineModel",
    "StepGap",
    "StepLoad",
    "StepTable",
    "StepTimeModel",
    "calibrate",
    "facts_line",
    "fit_all",
    "fit_echo",
    "fit_echo_base",
    "fit_gap",
    "fit_linear",
    "fit_roofline",
    "identical_spread",
    "largest_chunk",
    "make_round",
    "model_from_record",
    "model_to_record",
    "pivot_tokens",
    "profile_from_json",
    "read_recording",
    "step_line",
]
