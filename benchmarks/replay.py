"""Online traffic to measure with: a bursty or a recorded trace, sent to any OpenAI chat endpoint.

python -m benchmarks.replay --base-url http://127.0.0.1:8000/v1 --model MODEL
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from batchrun.errors import BatchrunError, ConfigError
from batchrun.simulator.replay import (
    CHAT_ANSWER,
    CHAT_PROMPT,
    CallArrival,
    OnlineResult,
    ReplayTarget,
    TokenRange,
    make_prompt,
    percentile,
    replay,
)
from batchrun.simulator.traces.reading import Drawing, read_trace
from batchrun.simulator.traces.trace import Trace
from benchmarks.records import cell, parser

Figures = dict[str, Any]


@contextmanager
def callers_first() -> Iterator[bool]:
    """The calling thread, which makes the calls, waits for no core while the block runs.

    Callers are on machines of their own. Here they share cores with what they measure, and were
    seen to get none for half a second, which is not the engine's doing. What else the thread does
    goes first too; threads and processes that it starts run as usual. Gives whether the system
    allows it: it takes root's rights.
    """
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, *before)


def summarize(results: Sequence[OnlineResult], *, slo_ttft_s: float, slo_tpot_s: float) -> Figures:
    """Percentiles and the shares of ALL arrived calls that met the bounds, `slo_attainment` both.

    `slo_deadline` is the share whose every token i came by arrival + TTFT + i * TPOT (Echo, section
    5.1). A call without a first token counts as an endless TTFT; a percentile that falls on one is
    None, and so are shares and percentiles of no calls.
    """
    ttfts_s = [math.inf if r.ttft_s is None else r.ttft_s for r in results]
    tpots_s = [r.tpot_s for r in results if r.tpot_s is not None]
    itls_s = [gap_s for r in results for gap_s in r.itl_s]
    ttft_met = [ttft_s <= slo_ttft_s for ttft_s in ttfts_s]
    tpot_met = [r.error is None and (r.tpot_s is None or r.tpot_s <= slo_tpot_s) for r in results]
    waits_s = [r.e2e_s if r.ttft_s is None else r.ttft_s for r in results]
    num_answered = sum(r.error is None for r in results)
    return {
        "arrived": len(results),
        "answered": num_answered,
        "failed": len(results) - num_answered,
        "ttft_p50_s": percentile(ttfts_s, 0.50),
        "ttft_p99_s": percentile(ttfts_s, 0.99),
        "tpot_p50_s": percentile(tpots_s, 0.50),
        "tpot_p99_s": percentile(tpots_s, 0.99),
        "itl_p50_s": percentile(itls_s, 0.50),
        "itl_p99_s": percentile(itls_s, 0.99),
        "slo_ttft": _share(ttft_met),
        "slo_tpot": _share(tpot_met),
        "slo_attainment": _share([a and b for a, b in zip(ttft_met, tpot_met, strict=True)]),
        "slo_deadline": _share([keeps_deadlines(r, slo_ttft_s, slo_tpot_s) for r in results]),
        "online_longest_wait_s": max(waits_s, default=None),
        "slo_ttft_bound_s": slo_ttft_s,
        "slo_tpot_bound_s": slo_tpot_s,
    }


def keeps_deadlines(result: OnlineResult, slo_ttft_s: float, slo_tpot_s: float) -> bool:
    """Whether the call was answered and each token came by Echo's deadline."""
    if result.error is not None or result.ttft_s is None:
        return False
    times_s = accumulate(result.itl_s, initial=result.ttft_s)
    return all(at_s <= slo_ttft_s + i * slo_tpot_s for i, at_s in enumerate(times_s))


def _share(met: Sequence[bool]) -> float | None:
    return sum(met) / len(met) if met else None


@dataclass(frozen=True, slots=True)
class TraceShape:
    """Poisson arrivals at `rate_per_s`, times `burst_factor` in the first `burst_length_s` of
    every `burst_period_s`.

    Prompt lengths are aimed at with one common word per token; a tokenizer may count more.
    """

    duration_s: float
    rate_per_s: float
    burst_factor: float = 4.0
    burst_period_s: float = 30.0
    burst_length_s: float = 5.0
    prompt: TokenRange = CHAT_PROMPT
    output: TokenRange = CHAT_ANSWER

    def rate_at(self, at_s: float) -> float:
        """Arrivals per second at an instant of the trace."""
        is_burst = at_s % self.burst_period_s < self.burst_length_s
        return self.rate_per_s * (self.burst_factor if is_burst else 1.0)


def generate_trace(shape: TraceShape, *, seed: int) -> list[CallArrival]:
    """The arrivals of `shape` in order of time; the same seed gives the same trace."""
    rng = random.Random(seed)
    top_rate_per_s = shape.rate_per_s * max(1.0, shape.burst_factor)
    arrivals: list[CallArrival] = []
    at_s = 0.0
    while top_rate_per_s > 0:
        at_s += rng.expovariate(top_rate_per_s)
        if at_s >= shape.duration_s:
            break
        # Thinning: candidates come at the highest rate, each is kept with its instant's share.
        if rng.random() * top_rate_per_s < shape.rate_at(at_s):
            num_words = shape.prompt.draw(rng)
            max_tokens = shape.output.draw(rng)
            arrivals.append(CallArrival(at_s, make_prompt(num_words, rng=rng), max_tokens))
    return arrivals


def arrivals_of(trace: Trace, *, seed: int) -> list[CallArrival]:
    """The calls of a trace; prompts share nothing, whatever its prefix blocks say."""
    rng = random.Random(seed)
    lengths = zip(trace.num_prompt_tokens.tolist(), trace.num_output_tokens.tolist(), strict=True)
    return [
        CallArrival(at_s, make_prompt(num_words, rng=rng), max_tokens)
        for at_s, (num_words, max_tokens) in zip(trace.arrival_s.tolist(), lengths, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Replay a trace and print its figures. Exit code 4 if no call was answered."""
    options = _parser().parse_args(argv)
    target = ReplayTarget(
        base_url=options.base_url,
        model=options.model,
        api_key=options.api_key,
        timeout_s=options.timeout_s,
        extra_body={"ignore_eos": True} if options.ignore_eos else {},
    )
    try:
        results = asyncio.run(replay(_arrivals(options), target))
        summary = summarize(results, slo_ttft_s=options.slo_ttft_s, slo_tpot_s=options.slo_tpot_s)
    except BatchrunError as error:
        sys.stderr.write(f"replay: {error}\n")
        return error.exit_code
    if options.json is not None:
        calls = [asdict(result) | {"tpot_s": result.tpot_s} for result in results]
        options.json.write_text(json.dumps({"summary": summary, "calls": calls}) + "\n")
    sys.stdout.write(table(summary))
    if not summary["answered"]:
        reason = results[0].error if results else "the trace is empty"
        sys.stderr.write(f"replay: no call was answered; the first: {reason}\n")
        return 4
    return 0


def _parser() -> argparse.ArgumentParser:
    bursts = {"burst_factor": 4.0, "burst_period_s": 30.0, "burst_length_s": 5.0}
    limits = {"timeout_s": 120.0, "slo_ttft_s": 1.0, "slo_tpot_s": 0.05}
    made = parser(__doc__, duration_s=60.0, rate_per_s=2.0, **bursts, seed=0, **limits)
    add = made.add_argument
    add("--base-url", required=True, help="the endpoint's address, ending in /v1")
    add("--model", required=True)
    add("--api-key")
    add("--trace", type=Path, metavar="FILE", help="take times and lengths from a recorded trace")
    add("--ignore-eos", action="store_true", help="vLLM: generate up to max_tokens always")
    return made


def _arrivals(options: argparse.Namespace) -> list[CallArrival]:
    for flag in ("duration_s", "burst_period_s", "timeout_s"):
        if getattr(options, flag) <= 0:
            raise ConfigError(f"--{flag.replace('_', '-')} must be above 0")
    seed = options.seed
    if options.trace is not None:
        trace = read_trace(options.trace, drawing=Drawing(seed=seed))
        return arrivals_of(trace.between(0.0, options.duration_s), seed=seed)
    names = ("duration_s", "rate_per_s", "burst_factor", "burst_period_s", "burst_length_s")
    return generate_trace(TraceShape(**{name: getattr(options, name) for name in names}), seed=seed)


def table(summary: Figures) -> str:
    """The figures for people, one a line."""
    width = max(map(len, summary))
    return "".join(f"{key:<{width}}  {cell(value):>10}\n" for key, value in summary.items())


if __name__ == "__main__":
    sys.exit(main())
