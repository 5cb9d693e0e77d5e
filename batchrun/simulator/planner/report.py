"""The plan in words: one paragraph for whoever pays, and one line for each call without hope.

The plan as plain values, for machines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from batchrun.quantities import count, duration, seconds, share
from batchrun.simulator.planner.capacity import CapacityPlan, JobPlan
from batchrun.simulator.planner.fleet import Fleet, HopelessCalls
from batchrun.simulator.planner.peak import Attainment, Promise

DAY_HOURS = 24


def paragraph(plan: CapacityPlan) -> str:
    """The whole plan in a few sentences; why there is none, where there is none."""
    if plan.chosen is None:
        return " ".join(no_answer(fleet) for fleet in plan.fleets)
    sentences = [*_engines(plan, plan.chosen), *_jobs(plan)]
    if plan.chosen.hopeless:
        sentences += [hopeless(each) for each in plan.chosen.hopeless]
    return " ".join(sentences)


def no_answer(fleet: Fleet) -> str:
    """Why a kind of engine has no answer."""
    name = fleet.kind.name
    if fleet.is_impossible:
        reasons = " ".join(hopeless(each) for each in fleet.hopeless if each.is_too_many)
        return f"Impossible on {name}, however many engines: {reasons}"
    last = fleet.tried[-1]
    return (
        f"Up to {fleet.most_engines:,} engines of {name} were tried and do not hold: "
        f"{last.num_engines:,} keep TTFT for {share(last.ttft_share)} and TPOT for "
        f"{share(last.tpot_share)} of the calls; --max-engines sets how many are tried."
    )


def hopeless(calls: HopelessCalls) -> str:
    """Which calls no engine serves in time, and the heaviest of them."""
    tokens = f"{calls.num_prompt_tokens:,} prompt and {calls.num_output_tokens:,} answer tokens"
    many = f"{calls.num_calls:,} of {calls.num_judged:,} calls ({share(_part(calls))}"
    end = "more than may miss)" if calls.is_too_many else "which the target allows)"
    if calls.took_s is None or calls.bound_s is None:
        return (
            f"Call {calls.number:,} of the trace has {tokens}, more than the context of "
            f"{calls.context_tokens:,}; so have {many}, {end}."
        )
    return (
        f"Call {calls.number:,} of the trace, with {tokens}, has a {calls.bound} of "
        f"{seconds(calls.took_s)} on an idle engine, and {seconds(calls.bound_s)} are promised; "
        f"alone already {many}, {end} miss it."
    )


def _part(calls: HopelessCalls) -> float:
    return calls.num_calls / calls.num_judged


def _engines(plan: CapacityPlan, fleet: Fleet) -> Iterator[str]:
    promise, window, num = plan.request.promise, plan.load.window, fleet.num_engines
    assert num is not None
    found = fleet.of(num)
    assert found is not None
    length_s = window.end_s - window.start_s
    yield (
        f"{count(num, 'engine')} of {fleet.kind.name} ({count(num * fleet.kind.gpus, 'GPU')}) "
        f"{'keeps' if num == 1 else 'keep'} the promise of {promised(promise)} in the busiest "
        f"{duration(length_s)} of the trace, which begins at {duration(window.start_s)} and has "
        f"{found.num_calls / length_s:,.3g} calls/s: TTFT holds for {share(found.ttft_share)} of "
        f"the calls, TPOT for {share(found.tpot_share)}."
    )
    fewer = fleet.of(num - 1)
    if fewer is not None:
        yield f"One engine fewer does not ({_shares(fewer)})."
    if fleet.price_per_hour is not None:
        yield (
            f"The calls so cost {fleet.price_per_hour:,.2f} an hour, "
            f"{fleet.price_per_hour * DAY_HOURS:,.2f} for 24 hours, with or without jobs."
        )
    others = [each for each in plan.fleets if each is not fleet]
    if others:
        yield "Dearer or impossible: " + "; ".join(_other(each) for each in others) + "."


def _other(fleet: Fleet) -> str:
    if fleet.num_engines is None:
        return f"{fleet.kind.name} ({'impossible' if fleet.is_impossible else 'not held'})"
    return (
        f"{fleet.num_engines:,} of {fleet.kind.name} for {fleet.price_per_hour or 0:,.2f} an hour"
    )


def _jobs(plan: CapacityPlan) -> Iterator[str]:
    day, fleet = plan.day, plan.chosen
    if day is None or fleet is None:
        return
    served = sum(each.served_tokens_per_s for each in day.windows) / len(day.windows)
    least = min(each.served_tokens_per_s for each in day.windows)
    yield (
        f"Beside the calls they serve {served:,.0f} offline tokens/s on average over the trace, "
        f"{least:,.0f} in its busiest part."
    )
    for job in plan.jobs:
        yield _job(job)
    cost = "" if plan.cost_alone is None else f", which cost {plan.cost_alone:,.2f}"
    yield (
        f"On engines of their own the jobs would take {plan.gpu_hours_alone:,.2f} GPU-hours{cost}; "
        "beside the calls they need no further GPU."
    )


def _job(job: JobPlan) -> str:
    if job.takes_s is None:
        return f"{job.name} never ends: the engines have no time left for it."
    text = f"{job.name} is done {duration(job.takes_s)} after it is submitted"
    if job.deadline_s is None:
        return f"{text}."
    gap = duration(abs(job.deadline_s - job.takes_s))
    return f"{text}, {gap} {'before' if job.is_deadline_kept else 'after'} its deadline."


def _shares(each: Attainment) -> str:
    return f"TTFT {share(each.ttft_share)}, TPOT {share(each.tpot_share)}"


def promised(promise: Promise) -> str:
    """The promise in a few words."""
    return (
        f"a TTFT of {seconds(promise.ttft_s)} and a TPOT of {seconds(promise.tpot_s)} for "
        f"{promise.target * 100:g} % of the calls"
    )


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
