"""The order of waiting calls: how many keep their promises, at the knee of an engine and past it.

    python -m benchmarks.online_queue [--scenario NAME ...] [--order NAME ...] [--rates R ...]
                                      [--seeds N ...] [--law NAME] [--json FILE]

A virtual A100 with Llama-3.1-8B's shape and 8,600 KV blocks. What `plan_ms` says is charged to its
clock, beside half a millisecond for vLLM's own scheduling, so figures repeat nearly. No call tells
how long its answer will be. Scenarios:

- `classes`: two minutes of voice (TTFT 0.5 s, TPOT 50 ms), chat (1.5 s, 100 ms), summary (2 s and
  3 times the prompt alone, 187.5 ms) and batch (40 s to the last token); 65 % are chats, the others
  have prompts of 512 to 16,384 tokens. A minute more for the last ones.
- `job`: the same beside the job of the reference scenario, for as long as calls come.
- `bursts`: Azure's conversations, three times as many in 10 s of each 50 s; no classes.
  `larry:1000000` is the order of arrival with planned steps, which `arrival` has not here.
- `sharegpt`, `loogle`, `agents`: short chats, questions about six documents, conversations of
  agents with a common prompt; no classes.
- `accelgen`: AccelGen's draw of bounds and prompts, and the columns of its figure 11.
  `accelgen:0.6` has another share of long prompts (its figure 13), `accelgen:book`, `:alpaca` and
  `:sharegpt` one kind alone (its figure 14). `slack-no-chunks`, `larry:1000000` and `slack` are
  `slack-euclid` without chunks, order and fit (its figure 12).

Without `--rates` each scenario has those around its knee.

Orders are those of `online_queue` in batchrun.yaml under policy `echo`, `larry:ALPHA`, what
`benchmarks.queue_rivals` has, and stock vLLM with other budgets. `on-time-told` is told how long
answers will be: no history of them can be worth more.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from batchrun.simulator.virtual.engine import RequestRecord, TrafficSource, VirtualEngine
from batchrun.simulator.virtual.quick_decode import quick
from batchrun.simulator.virtual.setup import EngineShape, stock_scheduler
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from benchmarks.ablation_configs import means_of
from benchmarks.laws import LAWS
from benchmarks.planning_cost import TimedScheduler
from benchmarks.queue_calls import (
    Promise,
    PromisedCall,
    PromisedCalls,
    bursty_calls,
    classed_calls,
    synthetic_steps,
)
from benchmarks.queue_rivals import RIVALS, Rival
from benchmarks.queue_workloads import (
    accelgen_calls,
    accelgen_figures,
    agent_calls,
    loogle_calls,
    sharegpt_calls,
)
from benchmarks.records import Bar, Record, finish, grouped, markdown, parser
from benchmarks.row_feeds import RowSource, planned_order
from benchmarks.scenarios import Order, a100_8b, draw_job
from benchmarks.warm_up import SEED_OFFSET

NUM_PROCESSES = 2
CALLS_S, DRAIN_S = 120.0, 60.0
NUM_BLOCKS = 8_600
ROWS_IN_ENGINE = 256
ACCELGEN = "accelgen"
Draw = Callable[[float, float, int], list[PromisedCall]]
SCENARIOS: Mapping[str, tuple[Draw, tuple[float, ...]]] = {
    "classes": (classed_calls, (5.0, 6.0, 7.0)),
    "job": (classed_calls, (4.0,)),
    "bursts": (bursty_calls, (9.0,)),
    "sharegpt": (sharegpt_calls, (25.0, 30.0)),
    "loogle": (loogle_calls, (1.5, 2.5)),
    "agents": (agent_calls, (4.0, 6.0)),
    ACCELGEN: (accelgen_calls, (1.5, 2.5)),
}
"""Their calls, and rates around the knee of the engine."""
DEFAULT_ORDERS = ("vllm-512", "vllm-1024", "vllm-2048", "arrival", "slack", "on-time")
COLUMNS = (
    *("goodput_per_s", "slo_met", "ttft_met", "tpot_met", "jct_met", "ttft_p50_s", "ttft_p99_s"),
    *("ttft_ms_a_token_p50", "total_p50_s"),
    *(
        "longest_wait_s",
        "longest_wait_bounds",
        "online_preemptions",
        "offline_tokens_per_s",
        "plan_ms",
    ),
)
KNEE_PER_S = 5.0
GROUP = ("scenario", "rate_per_s")


class ChargedEngine(VirtualEngine):
    """An engine whose clock the CPU time of the last step's planning has moved on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.planning_ms: list[float] = []

    def step(self) -> bool:
        """One turn of the loop."""
        before = getattr(self.scheduler, "cost", None)
        is_busy = super().step()
        cost = getattr(self.scheduler, "cost", None)
        if cost is not before and cost is not None:
            self.planning_ms.append(max(0.0, cost["planning_cpu_ms"]))
            self.now_s += 1e-3 * self.planning_ms[-1]
        return is_busy


@dataclass(frozen=True, slots=True)
class Trial:
    """One run."""

    scenario: str
    order: str
    rate_per_s: float
    seed: int
    law: str


def main() -> int:
    """Run, print, save; 1 when a bar is missed."""
    defaults = {
        "scenario": ("classes",),
        "order": DEFAULT_ORDERS,
        "rates": (0.0,),
        "seeds": (0, 1, 2, 3, 4),
    }
    options = parser(__doc__, **defaults, law="noisy", processes=NUM_PROCESSES).parse_args()
    kinds = {scenario.partition(":")[0] for scenario in options.scenario}
    if not kinds <= set(SCENARIOS) or options.law not in LAWS:
        raise SystemExit(f"--scenario: {', '.join(SCENARIOS)}; --law: {', '.join(LAWS)}")
    trials = [
        Trial(scenario, order, rate, seed, options.law)
        for scenario in options.scenario
        for rate in rates_of(scenario, options.rates)
        for seed in options.seeds
        for order in options.order
    ]
    records: list[Record] = []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for record in pool.imap(measure, trials):
            print(*(record[key] for key in (*GROUP, "order", "seed")), file=sys.stderr, flush=True)
            records.append(record)
    means = {place: means_of(of, "order") for place, of in grouped(records, *GROUP).items()}
    for (scenario, rate), rows in means.items():
        print(f"\n{scenario}, {rate:g} calls/s, means of {len(options.seeds)} seeds\n")
        table = [[order, *map(row.get, COLUMNS)] for order, row in rows.items()]
        print(markdown(["order", *COLUMNS], table))
    return finish(options.json, records, judge(means))


def rates_of(scenario: str, given: Sequence[float]) -> Sequence[float]:
    """The calls/s to run it with: those given, or its own."""
    return given if any(given) else SCENARIOS[scenario.partition(":")[0]][1]


def measure(trial: Trial) -> Record:
    """The figures of one run, with units in their names."""
    calls = calls_of(trial)
    rival = RIVALS.get(trial.order, Rival(trial.order))
    callers = PromisedCalls(calls, trial.seed, tells_lengths=rival.is_told)
    sources: list[TrafficSource] = [callers]
    has_job = trial.scenario == "job"
    if has_job:
        job = planned_order(draw_job(a100_8b().job, trial.seed, Order.SHUFFLED))
        sources.append(RowSource(job, ROWS_IN_ENGINE))
    scheduler_cls = stock_scheduler(2) if rival.is_stock else TimedScheduler
    shape = EngineShape(
        NUM_BLOCKS,
        rival.budget,
        max_num_seqs=rival.max_running,
        additional_config={} if rival.is_stock else {"batchrun": rival.settings},
    )
    law = LAWS[trial.law](trial.seed)
    engine = ChargedEngine(quick(scheduler_cls), shape, law, sources)
    scheduler = engine.scheduler
    if isinstance(scheduler, ColocatedScheduler):
        for load, seconds in synthetic_steps(LAWS["noisy"](trial.seed + SEED_OFFSET), trial.seed):
            scheduler.state.estimates.observe(load, seconds)
        if rival.policy is not None:
            scheduler.take_over(rival.policy({f"call-{i}": c for i, c in enumerate(calls)}))
    engine.run_until(CALLS_S if has_job else CALLS_S + DRAIN_S)
    planning_ms = engine.planning_ms
    is_accelgen = trial.scenario.startswith(ACCELGEN)
    return {
        "scenario": trial.scenario,
        "order": trial.order,
        "rate_per_s": trial.rate_per_s,
        "seed": trial.seed,
        "law": trial.law,
        **_kept(calls, engine, until_s=CALLS_S - (max_ttft_s(calls) if has_job else 0.0)),
        "online_preemptions": sum(
            r.num_preemptions for r in engine.records.values() if r.is_online
        ),
        "offline_tokens_per_s": _offline_tokens(engine) / engine.now_s,
        **(accelgen_figures(calls, engine, CALLS_S) if is_accelgen else {}),
        "plan_ms": median(planning_ms) if planning_ms else 0.0,
        "plan_p99_ms": float(np.percentile(planning_ms, 99)) if planning_ms else 0.0,
        "plan_errors": getattr(getattr(scheduler, "state", None), "num_policy_errors", 0),
    }


def calls_of(trial: Trial) -> list[PromisedCall]:
    """The calls of a run."""
    name, _, mix = trial.scenario.partition(":")
    if mix:
        return accelgen_calls(trial.rate_per_s, CALLS_S, trial.seed, mix)
    return SCENARIOS[name][0](trial.rate_per_s, CALLS_S, trial.seed)


def max_ttft_s(calls: Sequence[PromisedCall]) -> float:
    """The loosest bound of a first token that is no completion bound."""
    return max((c.promise.ttft_s for c in calls if c.promise.jct_s is None), default=0.0)


def _kept(calls: Sequence[PromisedCall], engine: VirtualEngine, until_s: float) -> Record:
    """How the promises to the calls that came until then were kept, all and each."""
    kept: list[tuple[bool, bool, bool]] = []
    waits_s: list[float] = []
    totals_s: list[float] = []
    bounds: list[float] = []
    prompts: list[int] = []
    met_by_class: dict[str, list[bool]] = {}
    for number, call in enumerate(calls):
        if call.arrival_at_s >= until_s:
            continue
        record = engine.records.get(f"call-{number}")
        if record is None:
            continue
        times_s = record.token_times_s
        waits_s.append((times_s[0] if times_s else engine.now_s) - call.arrival_at_s)
        end_s = engine.now_s if record.finished_at_s is None else record.finished_at_s
        totals_s.append(end_s - call.arrival_at_s)
        prompts.append(call.num_prompt_tokens)
        bounds.append(waits_s[-1] / call.promise.ttft_s)
        kept.append(_judged(call.promise, record, waits_s[-1], engine.now_s))
        met_by_class.setdefault(call.promise.name, []).append(all(kept[-1]))
    parts = np.array(kept, np.bool_)
    ttft_met, tpot_met, jct_met = parts.mean(axis=0).tolist()
    return {
        "calls": len(kept),
        "goodput_per_s": float(parts.all(axis=1).sum()) / until_s,
        "slo_met": float(parts.all(axis=1).mean()),
        "ttft_met": ttft_met,
        "tpot_met": tpot_met,
        "jct_met": jct_met,
        **{f"{name}_met": fmean(met) for name, met in sorted(met_by_class.items())},
        "ttft_p50_s": float(np.percentile(waits_s, 50)),
        "ttft_p95_s": float(np.percentile(waits_s, 95)),
        "ttft_p99_s": float(np.percentile(waits_s, 99)),
        "ttft_ms_a_token_p50": 1e3 * float(np.median(np.divide(waits_s, prompts))),
        "ttft_ms_a_token_p95": 1e3 * float(np.percentile(np.divide(waits_s, prompts), 95)),
        "total_p50_s": float(np.median(totals_s)),
        "total_p95_s": float(np.percentile(totals_s, 95)),
        "longest_wait_s": max(waits_s),
        "longest_wait_bounds": max(bounds),
    }


def _judged(
    promise: Promise, record: RequestRecord, wait_s: float, now_s: float
) -> tuple[bool, bool, bool]:
    """Whether the first token, the mean time per token and the end were in time. A call that has
    not ended by then has broken a bound on its end."""
    times_s = record.token_times_s
    gap_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else 0.0
    end_s = now_s if record.finished_at_s is None else record.finished_at_s
    has_ended = record.finished_at_s is not None
    is_in_time = promise.jct_s is None or (
        has_ended and end_s - record.arrival_at_s <= promise.jct_s
    )
    return wait_s <= promise.ttft_s, gap_s <= promise.tpot_s, is_in_time


def _offline_tokens(engine: VirtualEngine) -> int:
    """Prompt and answer tokens of the rows that have ended."""
    return sum(
        record.num_prompt_tokens + len(record.output_token_ids)
        for record in engine.records.values()
        if not record.is_online and record.finished_at_s is not None
    )


Means = Mapping[tuple[Any, ...], Mapping[str, Mapping[str, float]]]
"""By scenario and rate, then by order: the means over the seeds."""


def judge(means: Means) -> Iterator[Bar]:
    """What the orders must reach, where the rows that a bar needs were run."""
    for (scenario, rate), rows in means.items():
        prefix = f"{scenario} {rate:g}/s"
        best = max((row["goodput_per_s"] for o, row in rows.items() if o[:4] == "vllm"), default=0)
        arrival, ours = rows.get("arrival"), rows.get("on-time")
        if arrival is not None and ours is not None and scenario != "job":
            ratio = ours["goodput_per_s"] / max(arrival["goodput_per_s"], 1e-9)
            yield Bar(f"{prefix}: on-time / arrival goodput", ratio, 1.0)
        if scenario == "classes" and ours is not None:
            is_knee = rate <= KNEE_PER_S
            if is_knee:
                yield Bar(f"{prefix}: on-time slo_met", ours["slo_met"], 0.95)
            if best:
                ratio = ours["goodput_per_s"] / best
                yield Bar(f"{prefix}: on-time / best vLLM goodput", ratio, 1.15 if is_knee else 2.0)
            if arrival is not None and not is_knee:
                ratio = ours["longest_wait_s"] / arrival["longest_wait_s"]
                yield Bar(f"{prefix}: longest wait / arrival's", ratio, 2.0, is_most=True)
        if scenario == "job" and ours is not None and arrival is not None:
            ratio = ours["offline_tokens_per_s"] / arrival["offline_tokens_per_s"]
            yield Bar(f"{prefix}: offline tokens / arrival's", ratio, 0.95)
            yield Bar(f"{prefix}: ttft_met", ours["ttft_met"], arrival["ttft_met"])
        larry = rows.get("larry:1000")
        if scenario == "bursts" and larry is not None and arrival is not None:
            p50, p99 = (larry[key] / arrival[key] for key in ("ttft_p50_s", "ttft_p99_s"))
            yield Bar(f"{prefix}: arrival / larry:1000 TTFT p50", 1 / p50, 1.8)
            yield Bar(f"{prefix}: larry:1000 / arrival TTFT p99", p99, 1.25, is_most=True)


if __name__ == "__main__":
    raise SystemExit(main())
