"""Questions to the fair share and the deadlines, each a run in virtual time that gives a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from share_runs import (
    Capacity,
    SimJob,
    Simulation,
    document_rows,
    draw_rows,
    log_uniform,
)

from batchrun.pool.deadlines import DEFAULT_MARGINS, Margins
from batchrun.pool.fair_share import JobTurns
from batchrun.pool.job_shares import QUANTUM_TOKENS

Record = Mapping[str, Any]
FloatArray = npt.NDArray[np.float64]

WARM_S = 90.0
WINDOW_S = 120
LAG_S = 20.0
"""Results come so long after their rows were handed out, at most."""
WEIGHTS = (1, 2, 4)
FEASIBLE = (0.1, 0.8)
INFEASIBLE = (1.2, 2.5)


def draw_capacity(rng: np.random.Generator, duration_s: float, roughness: float = 1.0) -> Capacity:
    """2,000 to 12,000 tokens/s that wobble by up to 20 % in waves of 20 to 180 s, jitter by 10 %
    from second to second, and drift by up to 20 % from `WARM_S` on; `roughness` times that."""
    seconds = np.arange(int(WARM_S + 2 * duration_s))
    progress = np.clip((seconds - WARM_S) / duration_s, 0, 1)
    drift = 1 + rng.uniform(-0.2, 0.2) * roughness * progress
    phase = 2 * np.pi * (seconds / rng.uniform(20, 180) + rng.uniform())
    wobble = 1 + rng.uniform(0, 0.2) * roughness * np.sin(phase)
    jitter = np.clip(rng.normal(1, 0.1 * roughness, len(seconds)), 0.5, 1.5)
    return Capacity((log_uniform(rng, 2000, 12_000) * drift * wobble * jitter).tolist())


def draw_job(rng: np.random.Generator, job_id: str, tokens: float) -> SimJob:
    """A job of some shape and weight, with estimates up to 30 % off."""
    rows = draw_rows(rng, tokens, bias=rng.uniform(-0.3, 0.3))
    return SimJob(job_id, log_uniform(rng, 0.1, 10), rows)


def warm(
    rng: np.random.Generator, duration_s: float, turns: JobTurns, roughness: float = 1.0
) -> tuple[Simulation, float]:
    """Two jobs without a deadline that have run for a while, and the forecast by now."""
    capacity = draw_capacity(rng, duration_s, roughness)
    tokens = capacity.mean(0, WARM_S) * (WARM_S + duration_s)
    simulation = Simulation(capacity, turns)
    for job_id in ("other", "another"):
        simulation.submit(draw_job(rng, job_id, tokens * rng.uniform(0.2, 2)))
    simulation.run_until(WARM_S)
    forecast = turns._pools[0].capacity.tokens_per_s
    assert forecast is not None
    return simulation, forecast


def endless_jobs(seed: int, duration_s: int) -> tuple[Simulation, list[SimJob]]:
    """Three jobs of weights 1, 2 and 4 with more rows than `duration_s` is enough for."""
    rng = np.random.default_rng(seed)
    capacity = draw_capacity(rng, duration_s)
    simulation = Simulation(capacity)
    tokens = 2 * capacity.mean(0, duration_s) * duration_s
    jobs = [SimJob(f"{w}", w, draw_rows(rng, tokens, rng.uniform(-0.3, 0.3))) for w in WEIGHTS]
    for job in jobs:
        simulation.submit(job)
    return simulation, jobs


def off_parts(jobs: Sequence[SimJob], starts_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """How far each job's computed tokens in 120 s from each start are from its part, and that."""
    got = np.stack([job.done_by(starts_s + WINDOW_S) - job.done_by(starts_s) for job in jobs])
    part = got.sum(axis=0) * np.array(WEIGHTS)[:, None] / sum(WEIGHTS)
    return np.abs(got - part), part


def beyond_a_subtree(jobs: Sequence[SimJob], off: FloatArray, part: FloatArray) -> float:
    """The greatest distance beyond one subtree, at most a quantum, as a share of the part."""
    subtree = min(max(job.rows.largest_subtree_tokens for job in jobs), QUANTUM_TOKENS)
    return float((np.maximum(off - subtree, 0) / part).max())


def fair_run(seed: int, duration_s: int = 600) -> Record:
    """How far jobs of weights 1, 2, 4 are from their parts of any 120 s."""
    simulation, jobs = endless_jobs(seed, duration_s)
    simulation.run_until(duration_s)
    off, part = off_parts(jobs, np.arange(WARM_S, duration_s - WINDOW_S, dtype=np.float64))
    return {
        "question": "weights",
        "seed": seed,
        "off_share": float((off / part).max()),
        "off_share_beyond_a_subtree": beyond_a_subtree(jobs, off, part),
    }


def deadline_trial(
    seed: int,
    needs: tuple[float, float] = FEASIBLE,
    margins: Margins = DEFAULT_MARGINS,
    roughness: float = 1.0,
) -> Record:
    """One job with a deadline beside two without; it needs such shares of the forecast."""
    rng = np.random.default_rng(seed)
    duration_s = rng.uniform(180, 900)
    turns = JobTurns(margins=margins)
    simulation, forecast = warm(rng, duration_s, turns, roughness)
    need = rng.uniform(*needs)
    job = draw_job(rng, "due", need * forecast * duration_s)
    job.deadline_at = simulation.now_s + duration_s
    simulation.submit(job)
    simulation.run_until(job.deadline_at)
    return {
        "question": "deadline",
        "seed": seed,
        "needed_share": job.rows.computed_tokens / forecast / duration_s,
        **verdict(job, duration_s),
    }


def verdict(job: SimJob, duration_s: float) -> dict[str, float | None]:
    """Whether a job kept its deadline, and what was announced; instants as shares of its time."""
    assert job.deadline_at is not None
    start_s = job.deadline_at - duration_s
    missed_s = 0.0
    ends = [*(at for at, _ in job.news[1:]), min(job.finished_at, job.deadline_at)]
    for (at, outlook), end in zip(job.news, ends, strict=False):
        missed_s += 0.0 if outlook.is_kept else end - at
    return {
        "is_met": float(job.finished_at <= job.deadline_at),
        "finished_at_share": min((job.finished_at - start_s) / duration_s, 1.0),
        "num_news": len(job.news),
        "announced_at_share": (job.news[0][0] - start_s) / duration_s if job.news else None,
        "announced_share": missed_s / duration_s,
    }


def several_trial(seed: int) -> list[Record]:
    """Three deadlines that together need up to 80 %, then one that nothing can keep."""
    rng = np.random.default_rng(seed)
    durations_s = sorted(rng.uniform(180, 900, 3).tolist())
    simulation, forecast = warm(rng, durations_s[-1], JobTurns())
    jobs: list[tuple[SimJob, float]] = []
    tokens = 0.0
    for number, duration_s in enumerate(durations_s):
        share = max(rng.uniform(0.3, 0.8) * forecast * duration_s - tokens, 0.02 * tokens)
        jobs.append((draw_job(rng, f"due-{number}", share), duration_s))
        tokens += jobs[-1][0].rows.computed_tokens
    rng.shuffle(jobs)
    lost_s = rng.uniform(180, 900)
    jobs.append((draw_job(rng, "lost", rng.uniform(*INFEASIBLE) * forecast * lost_s), lost_s))
    for job, duration_s in jobs:
        job.deadline_at = simulation.now_s + duration_s
        simulation.submit(job)
    simulation.run_until(WARM_S + max(duration_s for _, duration_s in jobs))
    return [
        {"question": "several", "seed": seed, "job": job.job_id, **verdict(job, duration_s)}
        for job, duration_s in jobs
    ]


def urgent_run(seed: int) -> Record:
    """A job that is due in 3 min comes into a full window of documents, at a tiny weight."""
    rng = np.random.default_rng(seed)
    simulation = Simulation(Capacity([8000.0]))
    others = [SimJob(f"{weight}", weight, document_rows(rng, 6000, 20)) for weight in WEIGHTS]
    for other in others:
        simulation.submit(other)
    start_s = WARM_S + rng.uniform(0, 60)
    simulation.run_until(start_s)
    job = SimJob("due", 0.01, draw_rows(rng, 8000 * 90, bias=0.0), deadline_at=start_s + 180)
    simulation.submit(job)
    simulation.run_until(start_s + 180)
    first_at = job.sent_at[0]
    return {
        "question": "urgent",
        "seed": seed,
        "wait_s": first_at - start_s,
        "first_result_s": job.done_at[0] - start_s,
        "rows_of_others_before": sum(
            start_s < at < first_at for other in others for at in other.sent_at
        ),
        **verdict(job, 180),
    }


def pause_run(seed: int) -> Record:
    """The heaviest of three jobs is paused for 120 s: how far all are from their parts after it."""
    simulation, jobs = endless_jobs(seed, 600)
    simulation.run_until(WARM_S + 120)
    paused = jobs[-1]
    simulation.remove(paused.job_id)
    num_sent = len(paused.sent_at)
    simulation.run_until(WARM_S + 240)
    num_sent_meanwhile = len(paused.sent_at) - num_sent
    simulation.submit(paused)
    simulation.run_until(WARM_S + 360 + LAG_S)
    off, part = off_parts(jobs, np.array([WARM_S + 240 + LAG_S]))
    return {
        "question": "pause",
        "seed": seed,
        "rows_while_paused": num_sent_meanwhile,
        "off_share_beyond_a_subtree": beyond_a_subtree(jobs, off, part),
    }


def grain_run(*, is_per_row: bool) -> Record:
    """Three jobs of documents on an engine that keeps two prefixes: turns of a subtree or a row."""
    rng = np.random.default_rng(0)
    simulation = Simulation(Capacity([8000.0]), num_kept_prefixes=2, is_per_row=is_per_row)
    jobs = [SimJob(f"{weight}", weight, document_rows(rng, 8000, 20)) for weight in WEIGHTS]
    for job in jobs:
        simulation.submit(job)
    simulation.run_until(600)
    return {
        "question": "grain",
        "turn": "row" if is_per_row else "subtree",
        "rows_per_s": sum(job.num_done for job in jobs) / 600,
    }
