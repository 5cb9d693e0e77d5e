"""LARRY's and SAL's study: orders of calls inside engines, and who spreads calls over several.

    python -m benchmarks.larry_study [--deployment NAME ...] [--num-engines N ...]
                                     [--order NAME ...] [--router NAME ...] [--scales X ...]
                                     [--seeds N ...] [--json FILE]

Their figures 7 to 11 on virtual engines: one engine with each order (7, 8), LARRY with alpha 1, 500
and 1,000 (9), and 4 or 8 engines with each router (10, 11). Deployments: `8b`, Llama-3 8B on an
A100 of 40 GB, and `70b`, Llama-3 70B in FP8 on two H100. Calls are those of Azure's conversations
(their SW-Chat is another trace, and has no public file), lengths and arrivals together, its clock
scaled: a scale of 1 is about what an engine ends in the long run. At most 1,024 tokens a step;
calls of the first 30 s are load, not judged.

Orders are those of `benchmarks.online_queue`: `vllm-1024` is first come, first served, `no-preempt`
lets a call in when the longest answer has room, `trail` is told the answers. All but vLLM's plan
every step; they start from steps of all sizes that they have seen. TTFT by the token of the prompt
is the paper's normalised one. `front_end_waiting` is how many calls an API server, that takes
`FRONT_END` for each, keeps from the scheduler on average.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from batchrun.config import STOCK_POLICY
from batchrun.estimator.least_squares import FloatArray
from batchrun.simulator.cluster import EnginePlan, FrontEndTimes
from batchrun.simulator.online import PREFIX, Calls
from batchrun.simulator.simulation import Simulation, SimulationPlan
from batchrun.simulator.virtual.engine import RequestRecord
from batchrun.simulator.virtual.setup import A100Law, EngineShape
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from benchmarks.ablation_configs import means_of
from benchmarks.queue_calls import PLAIN, PromisedCall, synthetic_steps
from benchmarks.queue_rivals import RIVALS, Rival
from benchmarks.records import Bar, Record, finish, grouped, markdown, parser
from benchmarks.scenarios import azure_calls

NUM_PROCESSES = 2
WARM_S, JUDGED_S, REST_S = 30.0, 120.0, 60.0
TOKENS_A_STEP = 1_024
MOST_OF_TRACE = 0.9
"""More of the trace than this is no window of it."""
FRONT_END = FrontEndTimes(0.002, 2e-6)
"""Of vLLM's API server on a GPU machine, roughly: parse and render, and tokenise."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """One engine: its law, its KV, and the calls/s that it ends with `arrival` when more wait."""

    law: A100Law
    num_blocks: int
    capacity_per_s: float


DEPLOYMENTS = {
    "8b": Deployment(A100Law(), 8_600, 8.5),
    "70b": Deployment(
        A100Law(
            flop_per_token=141e9,
            flop_per_token_pair=4 * 8_192 * 80,
            flop_per_s=2 * 700e12,
            weight_bytes=71e9,
            kv_bytes_per_token=327_680,
            bytes_per_s=2 * 2.6e12,
        ),
        14_000,
        6.3,
    ),
}
ORDERS = ("vllm-1024", "no-preempt", "trail", "larry:1", "larry:500", "larry:1000")
ROUTERS = ("random", "p2c", "sal", "sal-printed", "cost")
COLUMNS = (
    *("ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "ttft_ms_a_token_p50", "ttft_ms_a_token_p95"),
    *("total_p50_s", "total_p95_s", "ended_per_s", "preempted_share", "front_end_waiting"),
)


@dataclass(frozen=True, slots=True)
class Trial:
    """One run."""

    deployment: str
    num_engines: int
    order: str
    router: str
    scale: float
    seed: int


def main() -> int:
    """Run, print, save; 1 when a bar is missed."""
    defaults = {
        "deployment": tuple(DEPLOYMENTS),
        "num_engines": (1, 4, 8),
        "order": ORDERS,
        "router": ROUTERS,
        "scales": (0.7, 0.9, 1.1),
        "seeds": (0, 1, 2, 3, 4),
    }
    options = parser(__doc__, **defaults, processes=NUM_PROCESSES).parse_args()
    trials = [
        Trial(deployment, num, order, router, scale, seed)
        for deployment in options.deployment
        for num in options.num_engines
        for router in (options.router if num > 1 else options.router[:1])
        for scale in options.scales
        for order in options.order
        for seed in options.seeds
    ]
    records: list[Record] = []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for record in pool.imap(measure, trials):
            print(*list(record.values())[:6], file=sys.stderr, flush=True)
            records.append(record)
    for (deployment, num, router, scale), rows in _means(records).items():
        print(f"\n{deployment}, {num} engines, {router}, scale {scale:g}\n")
        table = [[order, *map(row.get, COLUMNS)] for order, row in rows.items()]
        print(markdown(["order", *COLUMNS], table))
    return finish(options.json, records, _judge(records))


def measure(trial: Trial) -> Record:
    """The figures of one run, with units in their names."""
    deployment, rival = DEPLOYMENTS[trial.deployment], RIVALS.get(trial.order, Rival(trial.order))
    calls = calls_of(trial)
    shape = EngineShape(deployment.num_blocks, TOKENS_A_STEP)
    policy = STOCK_POLICY if rival.is_stock else "echo"
    settings = {} if rival.is_stock else rival.settings
    plan = EnginePlan(shape, policy, settings, deployment.law, front_end=FRONT_END)
    whole_s = WARM_S + JUDGED_S + REST_S
    simulation = Simulation(
        SimulationPlan(
            whole_s,
            calls,
            num_engines=trial.num_engines,
            engine=plan,
            seed=trial.seed,
            router=trial.router,
        )
    )
    told = {
        f"{PREFIX}{i}": PromisedCall(0.0, int(prompt), int(answer), PLAIN)
        for i, (prompt, answer) in enumerate(
            zip(calls.num_prompt_tokens, calls.num_output_tokens, strict=True)
        )
    }
    for engine in simulation.engines.engines:
        scheduler = engine.scheduler
        if isinstance(scheduler, ColocatedScheduler):
            for load, seconds in synthetic_steps(deployment.law, trial.seed):
                scheduler.state.estimates.observe(load, seconds)
            if rival.policy is not None:
                scheduler.take_over(rival.policy(told))
    ended = _listen(simulation)
    simulation.engines.run_until(whole_s)
    living = [record for engine in simulation.engines.engines for record in engine.records.values()]
    return {
        "deployment": trial.deployment,
        "num_engines": trial.num_engines,
        "order": trial.order,
        "router": trial.router if trial.num_engines > 1 else "",
        "scale": trial.scale,
        "seed": trial.seed,
        **_latencies(calls, [*ended, *living], whole_s),
        "front_end_waiting": _front_end_waiting(calls, trial.num_engines),
    }


def calls_of(trial: Trial) -> Calls:
    """A window of the trace, from anywhere, at the deployment's capacity times the scale; several
    at once where one holds too few calls."""
    rng = np.random.default_rng(7_000 + trial.seed)
    at_s = np.array(azure_calls(1.0).arrivals_s)
    rate = DEPLOYMENTS[trial.deployment].capacity_per_s * trial.scale * trial.num_engines
    num = math.ceil(rate * (WARM_S + JUDGED_S) / (MOST_OF_TRACE * len(at_s)))
    windows = [_window(at_s, rate / num, rng) for _ in range(num)]
    arrival_s = np.concatenate([window.arrival_s for window in windows])
    order = np.argsort(arrival_s, kind="stable")
    return Calls(
        arrival_s[order],
        np.concatenate([window.num_prompt_tokens for window in windows])[order],
        np.concatenate([window.num_output_tokens for window in windows])[order],
    )


def _window(at_s: FloatArray, rate: float, rng: np.random.Generator) -> Calls:
    trace = azure_calls(1.0)
    scaled_s = at_s * (len(at_s) / at_s[-1] / rate)
    start_s = rng.uniform(0, scaled_s[-1])
    turn_s = scaled_s[-1] + 1 / rate
    from_start_s = (scaled_s - start_s) % turn_s
    order = np.argsort(from_start_s, kind="stable")
    chosen = order[: int(np.searchsorted(from_start_s[order], WARM_S + JUDGED_S))]
    return Calls(
        from_start_s[chosen],
        np.array(trace.prompt_tokens)[chosen],
        np.array(trace.output_tokens)[chosen],
    )


def _listen(simulation: Simulation) -> list[RequestRecord]:
    """The calls that end, as they do."""
    ended: list[RequestRecord] = []
    told = simulation.engines.at_end

    def at_end(index: int, record: RequestRecord) -> None:
        told(index, record)
        # Its request goes; what is read of it later is a number.
        ended.append(replace(record, num_ended_preemptions=record.num_preemptions, request=None))

    simulation.engines.at_end = at_end
    return ended


def _latencies(calls: Calls, records: Sequence[RequestRecord], whole_s: float) -> Record:
    """Of the judged calls; one that no engine has begun to answer took until the end of the run."""
    ttft_s = whole_s - calls.arrival_s
    total_s = ttft_s.copy()
    num_preempted = num_ended = 0
    for record in records:
        number = int(record.request_id.removeprefix(PREFIX))
        num_preempted += record.num_preemptions > 0
        if record.token_times_s:
            ttft_s[number] = record.token_times_s[0] - record.arrival_at_s
        if record.finished_at_s is not None:
            num_ended += WARM_S <= record.finished_at_s < WARM_S + JUDGED_S
            total_s[number] = record.finished_at_s - record.arrival_at_s
    judged = calls.arrival_s >= WARM_S
    by_token = 1e3 * ttft_s[judged] / calls.num_prompt_tokens[judged]
    quantiles = {
        f"{name}_p{level}{unit}": float(np.percentile(values, level))
        for name, unit, values, levels in (
            ("ttft", "_s", ttft_s[judged], (50, 95, 99)),
            ("ttft_ms_a_token", "", by_token, (50, 95)),
            ("total", "_s", total_s[judged], (50, 95)),
        )
        for level in levels
    }
    return {
        "calls": int(judged.sum()),
        **quantiles,
        "ended_per_s": num_ended / JUDGED_S,
        "preempted_share": num_preempted / max(1, len(records)),
    }


def _front_end_waiting(calls: Calls, num_engines: int) -> float:
    """Calls that the API servers have and the schedulers do not, on average (Little's law), if
    calls were spread one after the other."""
    waited_s = 0.0
    free_at_s = [0.0] * num_engines
    for number, (at_s, tokens) in enumerate(
        zip(calls.arrival_s.tolist(), calls.num_prompt_tokens.tolist(), strict=True)
    ):
        server = number % num_engines
        free_at_s[server] = max(free_at_s[server], at_s) + FRONT_END.seconds(tokens)
        waited_s += free_at_s[server] - at_s
    return waited_s / float(calls.arrival_s[-1])


def _means(records: Sequence[Record]) -> dict[tuple[Any, ...], dict[str, dict[str, float]]]:
    """By deployment, engines, router and scale, then by order: the means over the seeds."""
    places = grouped(records, "deployment", "num_engines", "router", "scale")
    return {place: means_of(of, "order") for place, of in places.items()}


def _judge(records: Sequence[Record]) -> Iterator[Bar]:
    """The paper's factors, shown: the best of the others over LARRY with alpha 1, and over SAL."""
    means = _means(records)
    for (deployment, num, router, scale), rows in means.items():
        others = [row for order, row in rows.items() if not order.startswith("larry")]
        prefix = f"{deployment}, {num} engines, {router or 'alone'}, scale {scale:g}"
        if "larry:1" in rows and others:
            for key in ("ttft_p50_s", "ttft_p95_s", "ttft_ms_a_token_p50"):
                best = min(row[key] for row in others)
                yield Bar(f"{prefix}: best other / larry:1 {key}", best / rows["larry:1"][key])
        rivals = [means.get((deployment, num, name, scale), {}) for name in ("random", "p2c")]
        of_rivals = [rows["larry:1"] for rows in rivals if "larry:1" in rows]
        if router == "sal" and "larry:1" in rows and of_rivals:
            ratio = min(row["ttft_p50_s"] for row in of_rivals) / rows["larry:1"]["ttft_p50_s"]
            yield Bar(f"{prefix}: best of random and p2c / sal TTFT p50", ratio)


if __name__ == "__main__":
    raise SystemExit(main())
