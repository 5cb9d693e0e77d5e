"""The simulator: the shipped scheduler on a virtual clock, with gateway and daemon around it."""

from batchrun.simulator.engines import STOCK_POLICY, EnginePlan, ModelLaw
from batchrun.simulator.offline_jobs import JobTerms, OfflineJob, job_of_file, job_of_shape
from batchrun.simulator.online import Calls, CallTrace, SharedPrompts, windows_of
from batchrun.simulator.opening import engine_of, plan_of
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
    "engine_of",
    "job_of_file",
    "job_of_shape",
    "load_scenario",
    "plan_of",
    "simulate",
    "windows_of",
]
