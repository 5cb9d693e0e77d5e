"""The simulator: the shipped scheduler on a virtual clock, with gateway and daemon around it."""

from batchrun.simulator.engines import STOCK_POLICY, EnginePlan, ModelLaw
from batchrun.simulator.front_end import FrontEndTimes
from batchrun.simulator.offline_jobs import (
    JobTerms,
    OfflineJob,
    job_of_file,
    job_of_plan,
    job_of_shape,
    without_rows,
)
from batchrun.simulator.online import Calls, CallTrace, SharedPrompts, windows_of
from batchrun.simulator.opening import calibrated, engine_of, plan_of
from batchrun.simulator.scenario_file import (
    REFERENCE,
    EnginesSpec,
    ScenarioFile,
    SloSpec,
    load_scenario,
)
from batchrun.simulator.simulation import (
    JobFigures,
    OfflineFigures,
    OnlineFigures,
    Simulated,
    SimulationPlan,
    simulate,
)
from batchrun.simulator.tables import Tables

__all__ = [
    "REFERENCE",
    "STOCK_POLICY",
    "CallTrace",
    "Calls",
    "EnginePlan",
    "EnginesSpec",
    "FrontEndTimes",
    "JobFigures",
    "JobTerms",
    "ModelLaw",
    "OfflineFigures",
    "OfflineJob",
    "OnlineFigures",
    "ScenarioFile",
    "SharedPrompts",
    "Simulated",
    "SimulationPlan",
    "SloSpec",
    "Tables",
    "calibrated",
    "engine_of",
    "job_of_file",
    "job_of_plan",
    "job_of_shape",
    "load_scenario",
    "plan_of",
    "simulate",
    "windows_of",
    "without_rows",
]
