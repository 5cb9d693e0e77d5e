"""The manual's figures, from results: Echo's 6 to 11 of the ablation, and the growth of the pool.

    python -m benchmarks.plots [--results FOLDER] [--out FOLDER]

Reads `ablation.jsonl`, `ablation-series.jsonl` and `pool.jsonl`; a figure whose results are not
there is left out, with a line that says so. `docs/performance.md` and `docs/pool.md` show them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from batchrun.simulator import plots
from batchrun.simulator.plots import OFFLINE, STYLE, over_time
from benchmarks.ablation import SERIES
from benchmarks.ablation_configs import LADDER, means_of
from benchmarks.records import RESULTS, parser, read_records

COLORS = {"bs": "#8c8c8c", "bs+e": "#d98c3f", "bs+e+s": "#5b9bd5", "echo": OFFLINE}
FIGURE_6_JOBS = {
    "echo-sharegpt": "ShareGPT",
    "echo-qa-short": "QA_Short",
    "echo-qa-long": "QA_Long",
    "loogle-azure": "LooGLE,\nQMSum",
}
TRACE, PEAK, SHORT = "loogle-azure", "echo-hit-rate", "echo-qa-short"
AMPLE_BLOCKS, SCARCE_BLOCKS = 8600, 4300
HIT_WINDOW_S = 10
WIDTHS = {"bs": 1.5, "bs+e": 4.5, "bs+e+s": 3.0, "echo": 1.5}
"""Curves often coincide: the ones drawn first are wider."""
POOL_STAGES = {"key_s": "hash the prompts", "sort_s": "sort", "nodes_s": "find the tree"}
POOL_SHAPES = {
    "toolbench": ("2,000 tokens a row", OFFLINE),
    "short": ("200 tokens a row", "#5b9bd5"),
}


class ResultsMissingError(Exception):
    """No file, or no such record in it."""


def main() -> int:
    """Draw what can be drawn."""
    options = parser(__doc__, results=RESULTS, out=Path("docs/figures")).parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        try:
            save(draw, options.results, options.out / f"{name}.svg")
        except ResultsMissingError as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
    return 0


def save(draw: Callable[[Path], Figure], results: Path, path: Path) -> None:
    """Draw one figure into an SVG file; the same results give the same bytes."""
    with rc_context(STYLE):
        draw(results).savefig(path, format="svg", metadata={"Date": None}, facecolor="white")


def ladder(results: Path) -> Figure:
    """Figure 6: offline tokens/s over those of `bs`, means over the seeds, by job and policy."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, 2, sharey=True)
    for axes, blocks in zip(panels, (AMPLE_BLOCKS, SCARCE_BLOCKS), strict=True):
        for number, scenario in enumerate(FIGURE_6_JOBS):
            means = means_of(_found(results, "ablation", scenario=scenario, blocks=blocks))
            base = means["bs"]["offline_tokens_per_s"]
            for place, config in enumerate(LADDER):
                ratio = means[config]["offline_tokens_per_s"] / base
                label = config if number == 0 else None
                x = number + 0.2 * (place - 1.5)
                bar = axes.bar(x, ratio, 0.19, color=COLORS[config], label=label)
                axes.bar_label(bar, fmt="%.2g", fontsize=7)
        axes.set_xticks(range(len(FIGURE_6_JOBS)), list(FIGURE_6_JOBS.values()))
        axes.set_title(f"{blocks:,} KV blocks")
        axes.set_yscale("log")
    panels[0].set_ylabel("offline tokens/s, bs = 1")
    panels[0].legend()
    return figure


def latencies(results: Path) -> Figure:
    """Figure 7: how TTFT and TPOT of the online calls are distributed."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, 2, sharey=True)
    bounds = {"ttft": 1.0, "tpot": 0.05}
    for axes, (figure_name, bound_s) in zip(panels, bounds.items(), strict=True):
        for config in LADDER:
            series = _series(results, TRACE, config)
            percentiles = series[f"{figure_name}_percentiles_s"]
            axes.plot(percentiles, range(101), **_curve(config))
        axes.axvline(bound_s, color="black", linestyle=":", linewidth=1)
        axes.set_xlabel(f"{figure_name.upper()} in s")
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=6)
    panels[0].set_ylabel("% of the online calls")
    panels[1].legend(loc="lower right")
    return figure


def hit_ratio(results: Path) -> Figure:
    """Figure 9: prefix hits of the offline rows that ended in the last ten seconds."""
    figure, axes = over_time("prefix hit ratio")
    for config in ("bs+e+s", "echo"):
        series = _series(results, PEAK, config)
        axes.plot(*windowed_hit_ratio(series), **_curve(config))
    axes.set_ylim(0, 1)
    axes.legend(loc="lower right")
    return figure


def windowed_hit_ratio(series: Mapping[str, Sequence[float]]) -> tuple[list[float], list[float]]:
    """Hit tokens by prompt tokens of the rows that ended in each window; windows without any are
    left out."""
    columns = ("at_s", "offline_hit_tokens", "offline_prompt_tokens")
    samples = list(zip(*(series[name] for name in columns), strict=True))
    windows = pairwise([(0.0, 0.0, 0.0), *samples[HIT_WINDOW_S - 1 :: HIT_WINDOW_S]])
    ended = [(before, after) for before, after in windows if after[2] > before[2]]
    ratios = [(after[1] - before[1]) / (after[2] - before[2]) for before, after in ended]
    return [after[0] for _, after in ended], ratios


def pool_growth(results: Path) -> Figure:
    """How the pool's time and memory grow with a job."""
    figure = Figure(figsize=(8.2, 3.4), layout="constrained")
    times, memory = figure.subplots(1, 2)
    for shape, (name, color) in POOL_SHAPES.items():
        records = _found(results, "pool", shape=shape)
        rows = [record["rows"] for record in records]
        style: dict[str, Any] = {"color": color, "markersize": 4}
        for (stage, title), marker in zip(POOL_STAGES.items(), ("o", "s", "^"), strict=True):
            seconds = [max(record[stage], 1e-3) for record in records]
            times.plot(rows, seconds, marker=marker, label=f"{title}, {name}", **style)
        peak_mib = [record["peak_bytes"] / 2**20 for record in records]
        memory.plot(rows, peak_mib, marker="o", label=name, **style)
    for axes, title in ((times, "seconds"), (memory, "peak resident memory, MiB")):
        axes.set(xscale="log", yscale="log", xlabel="rows", ylabel=title)
        axes.legend(fontsize=7)
    times.set_ylim(5e-4, 1e4)  # room for the legend
    return figure


def _curve(config: str) -> dict[str, Any]:
    return {"color": COLORS[config], "linewidth": WIDTHS[config], "label": config}


def _series(results: Path, scenario: str, config: str) -> dict[str, Any]:
    """The columns of the watched run of a configuration."""
    wanted = {"scenario": scenario, "blocks": AMPLE_BLOCKS, "config": config}
    return _found(results, "ablation-series", **wanted)[0]


def _seconds(results: Path, scenario: str) -> pl.DataFrame:
    """The records of the watched run of `echo`, by second, as a simulation keeps them."""
    series = _series(results, scenario, "echo")
    return pl.DataFrame({name: series[name] for name in SERIES}).with_columns(engine=0)


def _found(results: Path, name: str, **wanted: object) -> list[dict[str, Any]]:
    """The records of a file with these values. Raises ResultsMissingError without any."""
    path = results / f"{name}.jsonl"
    records = read_records(path) if path.exists() else []
    found = [record for record in records if wanted.items() <= record.items()]
    if not found:
        module = name.removesuffix("-series")
        command = f"python -m benchmarks.{module} --json {results / module}.jsonl"
        raise ResultsMissingError(f"{path} has nothing with {wanted}; {command} makes it")
    return found


FIGURES: dict[str, Callable[[Path], Figure]] = {
    "06-ladder": ladder,
    "07-latencies": latencies,
    "08-activity": lambda results: plots.activity(_seconds(results, TRACE)),
    "09-hit-ratio": hit_ratio,
    "10-memory": lambda results: plots.memory(_seconds(results, SHORT), AMPLE_BLOCKS - 1),
    "11-forecast": lambda results: plots.forecast(_seconds(results, TRACE)),
    "pool-growth": pool_growth,
}


if __name__ == "__main__":
    raise SystemExit(main())
