"""Write docs/results.md: every recorded result, with its machine, date and commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from benchmarks.records import RESULTS, Run, markdown, read_runs

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
HEAD = """\
# Results

Every figure that was recorded and is kept, from `benchmarks/results/` (made by
`python -m benchmarks.results_page`). A commit that is called *not in the repository* was rewritten
before it was published, or had changes that were not committed: such a run cannot be repeated to
the letter.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """What is shown of a benchmark: records that are alike in `by` are one row of means of
    `figures`; both are keys with blanks between.

    `optional` names keys of `by` that older runs do not have. `where` names the values of which a
    record must have one.
    """

    title: str
    by: str
    figures: str
    where: Mapping[str, Sequence[str]] = field(default_factory=dict)
    optional: str = ""


ONLINE = "ttft_p50_s ttft_p99_s tpot_p50_s slo_ttft slo_tpot slo_deadline"
CONFIGS = (
    *("online-only-512", "online-only-2048", "stock-shuffled-2048", "stock-grouped-1024"),
    *("stock-in-our-order-512", "stock-in-our-order-2048"),
    *("bs", "bs+e", "bs+e+s", "echo", "echo unsorted", "stock no limit, context 32768"),
    *("echo no limit, context 32768", "echo no limit, context 131072"),
)
SECTIONS: dict[str, Section] = {
    "ablation": Section(
        "Policies on the virtual engine, means over seeds",
        "scenario law warm blocks config",
        f"offline_tokens_per_s prefix_hit_rate {ONLINE}",
        {"config": CONFIGS},
        optional="warm",
    ),
    "api_fuzz": Section("Random calls of the API", "operation", "calls mean_ms slowest_ms problem"),
    "buckets": Section(
        "Jobs of unlike lengths to their end, groups in other orders",
        "job law online order",
        "job_s offline_tokens_per_s prefix_hit_rate",
    ),
    "cpu_colocation": Section(
        "Co-location on real CPU engines, means of the windows",
        "server",
        f"offline_tokens_per_s computed_tokens_per_s prefix_hit_rate {ONLINE} slo_attainment",
        {"kind": ("window",)},
    ),
    "crash": Section(
        "Kills",
        "deployment",
        "num_kills num_jobs num_rows num_executions num_explained num_problems",
        {"kind": ("deployment",)},
    ),
    "cpu_online_cost": Section(
        "The dial on the real CPU engine, means of windows",
        "online_cost alone",
        "offline_tokens_per_s ttft_p50_s ttft_p99_s tpot_p50_s tpot_p99_s",
    ),
    "online_cost": Section(
        "The dial on the virtual engine, means over seeds",
        "law blocks config",
        "offline_tokens_per_s ttft_p50_s ttft_p99_s tpot_p50_s tpot_p99_s",
    ),
    "cpu_online_queue": Section(
        "Two classes in bursts on real CPU engines, means of windows",
        "server",
        "arrived failed goodput_per_s slo_met interactive_slo_attainment documents_slo_attainment "
        "interactive_ttft_p50_s documents_ttft_p50_s longest_wait_s longest_wait_bounds",
        {"kind": ("window",)},
    ),
    "daemon_load": Section(
        "What a row costs the daemon",
        "num_agents",
        "rows rows_per_s cpu_us_per_row agents_us_per_row engines_us_per_row status_max_s "
        "resident_mb",
    ),
    "large_job": Section(
        "One job of millions of rows",
        "rows row_tokens",
        "submit_s plan_s resume_s output_s submit_peak_gib daemon_peak_gib store_bytes_per_row "
        "reply_bytes_per_row input_bytes_per_row output_bytes_per_row rows_per_s",
        optional="row_tokens",
    ),
    "eta": Section(
        "Ranges of an ETA, by the part of a job's time that has passed",
        "phase",
        "answers coverage median_width median_error median_bias",
    ),
    "evil": Section(
        "Odd engines and callers in bad faith", "group", "cases problems", {"kind": ("sum",)}
    ),
    "evictions": Section(
        "Orders of eviction, means over seeds",
        "stream blocks eviction",
        "offline_tokens_per_s prefix_hit_rate online_hit_rate job_s slo_ttft slo_tpot",
    ),
    "fidelity": Section(
        "The simulator against the real CPU engine",
        "workload figure",
        "predicted measured error spread",
    ),
    "forecast": Section(
        "Forecasts of online KV",
        "trace rule",
        "num_minutes covered mean_forecast_blocks of_constant",
    ),
    "gateway_cost": Section(
        "What the gateway adds",
        "phase",
        "calls broken direct_ttft_p50_ms added_ttft_p50_ms added_ttft_p99_ms "
        "added_chunk_p50_ms added_chunk_p99_ms",
    ),
    "gpu": Section(
        "Co-location on a GPU",
        "scenario policy order budget online",
        f"offline_tokens_per_s computed_tokens_per_s prefix_hit_rate {ONLINE} plan_ms",
        {"kind": ("phase",)},
    ),
    "hit_rates": Section(
        "Hits of batchrun's order and of others",
        "job blocks online eviction order",
        "prefix_hit_rate prefix_hit_optimum share_of_optimum job_s",
    ),
    "images": Section(
        "Rows of eight frames on a tiny vision model, real vLLM",
        "way",
        "rows done hit_rate expected_hit_rate prompt_tokens inspected_prompt_tokens duration_s",
        {"way": ("job with files", "job with addresses", "batch with data URLs")},
    ),
    "placement": Section(
        "Rows of one job over several engines",
        "case",
        "num_engines makespan_s bound_s of_bound computed loss",
    ),
    "online_queue": Section(
        "Orders of waiting calls, means over seeds",
        "scenario rate_per_s order",
        "goodput_per_s slo_met ttft_p50_s ttft_p99_s longest_wait_s offline_tokens_per_s "
        "tokens_per_s accelgen_goodput_per_s iterations_met whole_met jct_mean_s",
    ),
    "queue_oracle": Section(
        "The shipped order beside a search that knows all that comes",
        "rate_per_s seed width",
        "oracle_per_s on_time_per_s distance on_time_noisy_per_s distance_noisy",
    ),
    "larry_study": Section(
        "LARRY's and SAL's figures 7 to 11, means over seeds",
        "deployment num_engines router scale order",
        "ttft_p50_s ttft_p99_s ttft_ms_a_token_p50 total_p50_s ended_per_s front_end_waiting",
    ),
    "page_cost": Section(
        "What the page costs, with a thousand jobs and sixteen engines",
        "what jobs engines",
        "p50_s p95_s daemon_share page_share",
    ),
    "page_memory": Section(
        "Pages left open: growth from the minutes after half time to the last",
        "view minutes",
        "heap_mib heap_growth nodes nodes_growth listeners_growth",
        {"kind": ("growth",)},
    ),
    "plan_trials": Section(
        "The planner's number on another draw of the traffic, shares of pairs",
        "traffic",
        "as_given found enough as_given_holds holds is_kept_beside_jobs holds_beside_jobs "
        "ttft_kept tpot_kept ttft_kept_beside_jobs tpot_kept_beside_jobs planning_cpu_s",
    ),
    "planning_cost": Section(
        "What a plan costs",
        "load",
        "running candidates step_ms planning_ms planning_cpu_ms",
    ),
    "pool": Section(
        "What it costs to know a job",
        "shape rows",
        "key_s sort_s nodes_s peak_bytes dispatched_per_s result_us",
    ),
    "python_cost": Section(
        "Rows asked from Python beside a job file",
        "rows",
        "map_s submit_s ratio map_cpu_s submit_cpu_s cpu_ratio",
        {"kind": ("medians",)},
    ),
    "routing": Section(
        "Routers on the same calls, means over seeds",
        "engines is_beside_job setting workload num_gateways num_workers knows_evictions router",
        "capacity_per_s rate_per_s mean_s p99_s ttft_p50_s ttft_p99_s prefix_hit_rate kept "
        "decision_us offline_tokens_per_s",
        optional="engines is_beside_job setting num_gateways num_workers knows_evictions",
    ),
    "map_agreement": Section(
        "What a router foretells of the caches of two real CPU engines",
        "calls",
        "num_calls agreement too_much_share too_little_share off_mean_tokens hit_rate_foretold "
        "hit_rate_returned num_rows_done",
    ),
    "rivals": Section(
        "The gateway in turn with other routers, the same calls before the same engines",
        "workload rival",
        "rate_per_s calls failed mean_ttft_s p50_ttft_s p99_ttft_s mean_s prefix_hit_rate "
        "cpu_us_per_call",
    ),
    "decision_cost": Section(
        "What the choice of an engine costs the gateway",
        "router body_bytes num_engines",
        "cpu_us decisions_per_s",
    ),
    "preble_ablation": Section(
        "Preble's ablation on light engines: each step has what the ones before it have",
        "rate_per_s step",
        "mean_s p99_s ttft_p50_s ttft_p99_s prefix_hit_rate moved_share reordered_share",
    ),
    "row_access": Section(
        "Rows in planned order",
        "num_rows row_bytes group_rows access",
        "prepare_cpu_s rows_per_cpu_s prepare_peak_bytes longest_read_s",
    ),
    "simulator_speed": Section(
        "How fast the simulator is",
        "name",
        "virtual_s cpu_s times_real_time engines wall_s peak_mib served_tokens_per_s ttft_p99_s",
    ),
    "soak": Section("Half an hour of faults", "name", "value", {"kind": ("bar",)}),
    "store": Section(
        "What the store costs",
        "rows order",
        "commits_per_s ack_p99_s peak_rss_bytes resume_s export_s",
    ),
    "trace_beside_jobs": Section(
        "A recorded trace beside three jobs, on the real CPU engine",
        "part",
        "seconds arrived slo_attainment slo_ttft slo_tpot ttft_p50_s ttft_p99_s tpot_p50_s "
        "online_longest_wait_s rows rows_missing rows_repeated rows_failed documents_hit_rate "
        "documents_expected_hit_rate system_hit_rate system_expected_hit_rate",
        {"part": ("calls alone", "calls beside jobs")},
    ),
    "reserve": Section(
        "Reserves of KV for bursts of calls, means over seeds",
        "scenario blocks config",
        "offline_tokens_per_s slo_ttft slo_deadline ttft_p99_s online_preemptions",
        {"config": ("0.0", "growth")},
    ),
    "resources": Section(
        "Floods of callers and engines, on a machine shared with other work",
        "load",
        "late_max_s answer_max_s memory_mb answers num_503 other_errors wait_max_s",
    ),
    "tenants": Section(
        "Two keys, the other honest or in bad faith",
        "engine other",
        "rows other_rows share rows_per_s calls attained slowest_call_s",
    ),
    "tide": Section(
        "Replicas that follow the tide of a day, by light engines' table",
        "trace seed fleet",
        "engine_hours of_oracle attainment offline_tokens deadlines_kept most_engines num_changes",
        {"fleet": ("fixed", "follows", "oracle")},
    ),
}


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(RESULTS))
    return 0


def page(results: Path) -> str:
    """The whole page, a section for each benchmark that has results."""
    parts = [HEAD]
    for name, section in SECTIONS.items():
        path = results / f"{name}.jsonl"
        if path.exists():
            parts.append(f"## {section.title}\n\n`python -m benchmarks.{name}`\n")
            parts += [text for run in read_runs(path) for text in _shown(run, section)]
    return "\n".join(parts)


def _shown(run: Run, section: Section) -> Iterator[str]:
    """A table and where it comes from; nothing of a run without such records."""
    by, figures = section.by.split(), section.figures.split()
    records = pl.DataFrame(run.records, infer_schema_length=None, strict=False)
    optional = section.optional.split()
    by = [key for key in by if key in records.columns or key not in optional]
    if not set(by) <= set(records.columns):
        return
    wanted = [pl.col(key).is_in(values) for key, values in section.where.items()]
    means = [
        pl.col(name).drop_nulls().first() if dtype == pl.String else pl.col(name).mean()
        for name in figures
        if (dtype := records.schema.get(name)) is not None
    ]
    table = records.filter(*wanted).drop_nulls(by).group_by(by, maintain_order=True).agg(means)
    if table.is_empty():
        return
    meta = run.meta
    commit = f"`{meta['commit'][:10]}`" if meta["commit"] else "no commit"
    where = "" if meta["commit_in_repository"] else ", not in the repository"
    machine = f"{meta['machine']['cpus']} cores, {meta['machine']['processor']}"
    yield f"{meta['date'][:10]}, {machine}, commit {commit}{where}:\n"
    figures = [key for key in figures if key in table.columns]
    rows = [
        [*(str(row[key]) for key in by), *map(row.get, figures)]
        for row in table.iter_rows(named=True)
        if any(row[key] is not None for key in figures)
    ]
    yield markdown([key.replace("_", " ") for key in (*by, *figures)], rows) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
