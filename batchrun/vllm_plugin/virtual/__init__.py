"""The virtual engine: a real vLLM scheduler class on a virtual clock, without a model."""

from batchrun.vllm_plugin.virtual.engine import Timing, TrafficSource, VirtualEngine
from batchrun.vllm_plugin.virtual.feeder import DAEMON_WINDOW, JobFeeder, OnlineSource, Window
from batchrun.vllm_plugin.virtual.laws import A100Law, NoisyLaw, PoolingLaw, StepItem, StepLaw
from batchrun.vllm_plugin.virtual.metrics import Slo, summarize
from batchrun.vllm_plugin.virtual.run import Run, run
from batchrun.vllm_plugin.virtual.setup import EngineShape, stock_scheduler
from batchrun.vllm_plugin.virtual.warmup import WarmUp, observe
from batchrun.vllm_plugin.virtual.workload import (
    Job,
    Order,
    Scenario,
    a100_8b,
    draw_calls,
    draw_job,
    kv_pressure,
    kv_pressure_tide,
    planned_order,
)

__all__ = [
    "DAEMON_WINDOW",
    "A100Law",
    "EngineShape",
    "Job",
    "JobFeeder",
    "NoisyLaw",
    "OnlineSource",
    "Order",
    "PoolingLaw",
    "Run",
    "Scenario",
    "Slo",
    "StepItem",
    "StepLaw",
    "Timing",
    "TrafficSource",
    "VirtualEngine",
    "WarmUp",
    "Window",
    "a100_8b",
    "draw_calls",
    "draw_job",
    "kv_pressure",
    "kv_pressure_tide",
    "observe",
    "planned_order",
    "run",
    "stock_scheduler",
    "summarize",
]
