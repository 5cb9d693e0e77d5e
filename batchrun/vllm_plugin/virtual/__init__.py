"""The virtual engine: a real vLLM scheduler class on a virtual clock, without a model."""

from batchrun.vllm_plugin.virtual.engine import Timing, TrafficSource, VirtualEngine
from batchrun.vllm_plugin.virtual.feeder import DAEMON_WINDOW, JobFeeder, OnlineSource, Window
from batchrun.vllm_plugin.virtual.laws import A100Law, NoisyLaw, PoolingLaw, StepItem, StepLaw
from batchrun.vllm_plugin.virtual.metrics import Slo, summarize
from batchrun.vllm_plugin.virtual.run import Run, run, run_watched
from batchrun.vllm_plugin.virtual.scenarios import (
    a100_8b,
    echo_hit_rate,
    echo_qa_long,
    echo_qa_short,
    echo_sharegpt,
    kv_pressure,
    kv_pressure_tide,
)
from batchrun.vllm_plugin.virtual.setup import EngineShape, stock_scheduler
from batchrun.vllm_plugin.virtual.tables import CallTable, DocumentLengths, JobTable
from batchrun.vllm_plugin.virtual.warmup import WarmUp, observe
from batchrun.vllm_plugin.virtual.workload import (
    Job,
    Order,
    Scenario,
    draw_calls,
    draw_job,
    hit_optimum,
    planned_order,
)

__all__ = [
    "DAEMON_WINDOW",
    "A100Law",
    "CallTable",
    "DocumentLengths",
    "EngineShape",
    "Job",
    "JobFeeder",
    "JobTable",
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
    "echo_hit_rate",
    "echo_qa_long",
    "echo_qa_short",
    "echo_sharegpt",
    "hit_optimum",
    "kv_pressure",
    "kv_pressure_tide",
    "observe",
    "planned_order",
    "run",
    "run_watched",
    "stock_scheduler",
    "summarize",
]
