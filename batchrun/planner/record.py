"""The plan as plain values, for machines."""

from __future__ import annotations

from dataclasses import asdict

from batchrun.planner.capacity import CapacityPlan
from batchrun.planner.fleet import Fleet
from batchrun.planner.promise import Promise
from batchrun.planner.words import no_answer, paragraph


def record_of(plan: CapacityPlan) -> dict[str, object]:
    """One JSON object: seconds, tokens, shares from 0 to 1."""
    promise, day = plan.request.promise, plan.day
    return {
        "promise": asdict(promise),
        "peak": {
            "start_s": plan.load.window.start_s,
            "end_s": plan.load.window.end_s,
            "num_calls": plan.load.num_judged,
        },
        "kinds": [_fleet(fleet, promise) for fleet in plan.fleets],
        "chosen": None if plan.chosen is None else _chosen(plan.chosen),
        "windows": [] if day is None else [asdict(each) for each in day.windows],
        "jobs": [asdict(job) for job in plan.jobs],
        "gpu_hours_alone": plan.gpu_hours_alone if plan.jobs else None,
        "cost_alone": plan.cost_alone,
        "paragraph": paragraph(plan),
    }


def _fleet(fleet: Fleet, promise: Promise) -> dict[str, object]:
    return {
        "name": fleet.kind.name,
        "price_per_gpu_hour": fleet.kind.price,
        "gpus_per_engine": fleet.kind.gpus,
        "num_engines": fleet.num_engines,
        "price_per_hour": fleet.price_per_hour,
        "is_impossible": fleet.is_impossible,
        "why_not": None if fleet.num_engines is not None else no_answer(fleet),
        "tried": [each.record(promise) for each in fleet.tried],
        "hopeless_calls": [asdict(each) for each in fleet.hopeless],
    }


def _chosen(fleet: Fleet) -> dict[str, object]:
    return {
        "name": fleet.kind.name,
        "num_engines": fleet.num_engines,
        "num_gpus": (fleet.num_engines or 0) * fleet.kind.gpus,
        "price_per_hour": fleet.price_per_hour,
    }
