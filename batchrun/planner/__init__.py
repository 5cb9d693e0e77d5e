"""The capacity planner: engines for the peak, and what jobs cost beside the calls."""

from batchrun.durations import count, duration, share
from batchrun.planner.beside import TimesBeside, fitting, times_beside
from batchrun.planner.capacity import CapacityPlan, JobPlan, PlanRequest, plan_capacity
from batchrun.planner.day import alone_s
from batchrun.planner.fleet import MAX_ENGINES, Fleet, cheapest, size_fleet
from batchrun.planner.kinds import EngineKind, check_kinds, kind_of_profile, parse_kind
from batchrun.planner.peak import PEAK_S, PeakLoad, peak_load
from batchrun.planner.promise import DEFAULT_TARGET, Attainment, Promise
from batchrun.planner.record import record_of
from batchrun.planner.words import no_answer, paragraph

__all__ = [
    "DEFAULT_TARGET",
    "MAX_ENGINES",
    "PEAK_S",
    "Attainment",
    "CapacityPlan",
    "EngineKind",
    "Fleet",
    "JobPlan",
    "PeakLoad",
    "PlanRequest",
    "Promise",
    "TimesBeside",
    "alone_s",
    "cheapest",
    "check_kinds",
    "count",
    "duration",
    "fitting",
    "kind_of_profile",
    "no_answer",
    "paragraph",
    "parse_kind",
    "peak_load",
    "plan_capacity",
    "record_of",
    "share",
    "size_fleet",
    "times_beside",
]
