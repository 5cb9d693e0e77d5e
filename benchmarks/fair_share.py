"""Fair shares and deadlines between jobs, in virtual time: what `weight` and `deadline` are worth.

    python -m benchmarks.fair_share [--trials N] [--json FILE]

Weights: three endless jobs of weights 1, 2 and 4, and each one's part of every 120 s; one of them
is paused. Deadlines: a job with a deadline beside two without, of random sizes, weights and
subtrees, on a capacity that wobbles and drifts, with estimates that are off by up to 30 %; then
three deadlines and one that cannot be kept; then other margins on a capacity twice as rough, and
deadlines that are ignored. Urgency: a job that is due soon comes into a full window. What a
decision costs is the one figure that the machine decides.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from statistics import fmean

from batchrun.pool.deadlines import DEFAULT_MARGINS, Margins
from benchmarks.fair_share_trials import (
    FEASIBLE,
    INFEASIBLE,
    Record,
    deadline_trial,
    decision_cost,
    fair_run,
    grain_run,
    pause_run,
    several_trial,
    urgent_run,
)
from benchmarks.records import Bar, write_records

NUM_RUNS = 12
TIGHT = (0.6, 0.8)
ROUGH = 2.0
MARGINS = {
    f"{factor:g} x margins": Margins(*(factor * margin for margin in astuple(DEFAULT_MARGINS)))
    for factor in (0, 0.5, 1, 2)
}
IGNORED = Margins(reserve=0, fair=-1e9)
"""Fair shares always count as enough: deadlines claim nothing."""


def measure(num_trials: int) -> list[Record]:
    """All questions, one after the other."""
    records: list[Record] = []
    records += [fair_run(seed) for seed in range(NUM_RUNS)]
    records += [pause_run(seed) for seed in range(NUM_RUNS)]
    records += [grain_run(is_per_row=is_per_row) for is_per_row in (False, True)]
    records += trials("feasible", num_trials, FEASIBLE)
    records += trials("infeasible", num_trials // 2, INFEASIBLE)
    for seed in range(num_trials // 4):
        records += several_trial(seed)
    for name, margins in MARGINS.items():
        records += trials(f"rough, {name}", num_trials // 2, TIGHT, margins, ROUGH)
    records += trials("fair shares alone", num_trials // 2, FEASIBLE, IGNORED)
    records += [urgent_run(seed) for seed in range(NUM_RUNS)]
    records += [decision_cost()]
    return records


def trials(
    question: str,
    num_trials: int,
    needs: tuple[float, float],
    margins: Margins = DEFAULT_MARGINS,
    roughness: float = 1.0,
) -> list[Record]:
    """Trials of one kind, under a name of their own."""
    found = (deadline_trial(seed, needs, margins, roughness) for seed in range(num_trials))
    return [{**record, "question": question} for record in found]


def judge(records: Sequence[Record]) -> list[Bar]:
    """The bars, and figures to read beside them."""

    def values(question: str, key: str, job: str = "") -> list[float]:
        asked = (r for r in records if r["question"] == question)
        found = (r[key] for r in asked if str(r.get("job", "")).startswith(job))
        return [math.inf if value is None else float(value) for value in found]

    beyond = "off_share_beyond_a_subtree"
    announced_at = "announced_at_share"
    per_subtree, per_row = values("grain", "rows_per_s")
    return [
        Bar("weights, off beyond a subtree", max(values("weights", beyond)), 0.05, is_most=True),
        Bar("the same after a pause", max(values("pause", beyond)), 0.05, is_most=True),
        Bar("rows of a paused job", max(values("pause", "rows_while_paused")), 0, is_most=True),
        Bar("feasible deadlines met", fmean(values("feasible", "is_met")), 1.0),
        Bar("longest wrong news", max(values("feasible", "announced_share")), 0.05, is_most=True),
        Bar("last news of a miss", max(values("infeasible", announced_at)), 0.5, is_most=True),
        Bar("several deadlines met", fmean(values("several", "is_met", "due")), 1.0),
        Bar("the one too many", max(values("several", announced_at, "lost")), 0.5, is_most=True),
        Bar("urgent: s to the first row", max(values("urgent", "wait_s")), 1.0, is_most=True),
        Bar("urgent: rows before", max(values("urgent", "rows_of_others_before")), 0, is_most=True),
        Bar("us per decision, 16 jobs", max(values("decision", "mean_us")), 20.0, is_most=True),
        Bar("turns of a subtree over turns of a row, rows/s", per_subtree / per_row),
    ]


def main() -> int:
    """Measure, print, save; exit 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=200, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    records = measure(options.trials)
    _print_trials(records)
    bars = judge(records)
    print("\n" + "\n".join(str(bar) for bar in bars))
    if options.json is not None:
        write_records(options.json, records)
    return 0 if all(bar.is_met for bar in bars) else 1


def _print_trials(records: Sequence[Record]) -> None:
    """A line for each kind of trial with deadlines."""
    print("| trials | runs | met | done at, mean | announced | first at, latest | for, longest |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    kinds: dict[str, list[Record]] = {}
    for record in records:
        if "is_met" in record:
            kind = str(record["question"])
            kind += ", " + str(record["job"]).split("-")[0] if "job" in record else ""
            kinds.setdefault(kind, []).append(record)
    for kind, found in kinds.items():
        first = [at for r in found if (at := r["announced_at_share"]) is not None]
        lasted = max(r["announced_share"] for r in found)
        met = fmean(r["is_met"] for r in found)
        latest = f"{max(first):.3f}" if first else "-"
        done = fmean(r["finished_at_share"] for r in found)
        print(
            f"| {kind} | {len(found)} | {met:.1%} | {done:.2f} | {len(first)} | {latest} "
            f"| {lasted:.3f} |"
        )


if __name__ == "__main__":
    raise SystemExit(main())
