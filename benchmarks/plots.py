"""The manual's figures, from results: Echo's 6 to 11 of the ablation, and the growth of the pool.

    python -m benchmarks.plots [--results FOLDER] [--out FOLDER]

Reads `ablation.jsonl`, `ablation-series.jsonl` and `pool.jsonl`; a figure whose results are not
there is left out, and said so. `docs/figures.md` says what each one shows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import RcKeyType

from benchmarks.ablation_bars import Means, means_of
from benchmarks.ablation_configs import LADDER
from benchmarks.records import RESULTS, parser, read_records

COLORS = {"bs": "#8c8c8c", "bs+e": "#d98c3f", "bs+e+s": "#5b9bd5", "echo": "#2e7d4f"}
FIGURE_6_JOBS = {
    "echo-sharegpt": "ShareGPT",
    "echo-qa-short": "QA_Short",
    "echo-qa-long": "QA_Long",
    "loogle-azure": "LooGLE,\nQMSum",
}
MEMORY_CLASSES = {
    "online_running_blocks": ("online, running", "#c0504d"),
    "offline_running_blocks": ("offline, running", "#2e7d4f"),
    "online_cached_blocks": ("online, cached", "#e6b0aa"),
    "offline_cached_blocks": ("offline, cached", "#a9d5b5"),
}
TRACE, PEAK, SHORT = "loogle-azure", "echo-hit-rate", "echo-qa-short"
AMPLE_BLOCKS, SCARCE_BLOCKS = 8600, 4300
HIT_WINDOW_S = 10
WIDTHS = {"bs": 1.5, "bs+e": 4.5, "bs+e+s": 3.0, "echo": 1.5}
"""Curves often coincide: the ones drawn first are wider."""
POOL_STAGES = {"key_s": "hash the prompts", "sort_s": "sort", "nodes_s": "find the tree"}
POOL_SHAPES = {
    "toolbench": ("2,000 tokens a row", "#2e7d4f"),
    "short": ("200 tokens a row", "#5b9bd5"),
}
STYLE: dict[RcKeyType, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "batchrun",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


class ResultsMissingError(Exception):
    """No file, or no such record in it; the text says what to run."""


class Results:
    """The results in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def means(self, scenario: str, blocks: int) -> Means:
        """Means over the seeds, by configuration. Raises ResultsMissingError."""
        records = [r for r in self._of("ablation", scenario) if r["blocks"] == blocks]
        if not records:
            raise self._missing("ablation", scenario, f"nothing at {blocks} blocks")
        return means_of(records)

    def series(self, scenario: str, blocks: int, config: str) -> dict[str, Any]:
        """The columns of the watched run of a configuration. Raises ResultsMissingError."""
        for record in self._of("ablation-series", scenario):
            if record["blocks"] == blocks and record["config"] == config:
                return record
        raise self._missing("ablation-series", scenario, f"no {config} at {blocks} blocks")

    def pool(self) -> list[dict[str, Any]]:
        """The records of `benchmarks.pool`. Raises ResultsMissingError."""
        path = self._folder / "pool.jsonl"
        if not path.exists():
            raise ResultsMissingError(f"no such file; run python -m benchmarks.pool --json {path}")
        return read_records(path)

    def _of(self, name: str, scenario: str) -> list[dict[str, Any]]:
        path = self._folder / f"{name}.jsonl"
        if not path.exists():
            raise self._missing(name, scenario, "no such file")
        return [record for record in read_records(path) if record["scenario"] == scenario]

    def _missing(self, name: str, scenario: str, what: str) -> ResultsMissingError:
        command = f"python -m benchmarks.ablation --scenario {scenario} --json FILE"
        return ResultsMissingError(f"{self._folder / name}.jsonl: {what} of {scenario}; {command}")


def main() -> int:
    """Draw what can be drawn."""
    made = parser(__doc__)
    made.add_argument("--results", type=Path, default=RESULTS)
    made.add_argument("--out", type=Path, default=Path("docs/figures"))
    options = made.parse_args()
    results = Results(options.results)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        try:
            save(draw, results, options.out / f"{name}.svg")
        except ResultsMissingError as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
    return 0


def save(draw: Callable[[Results], Figure], results: Results, path: Path) -> None:
    """Draw one figure into an SVG file; the same results give the same bytes."""
    with rc_context(STYLE):
        draw(results).savefig(path, format="svg", metadata={"Date": None}, facecolor="white")


def ladder(results: Results) -> Figure:
    """Figure 6: offline tokens/s over those of `bs`, means over the seeds, by job and policy."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, 2, sharey=True)
    for axes, blocks in zip(panels, (AMPLE_BLOCKS, SCARCE_BLOCKS), strict=True):
        for number, scenario in enumerate(FIGURE_6_JOBS):
            means = results.means(scenario, blocks)
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


def latencies(results: Results) -> Figure:
    """Figure 7: how TTFT and TPOT of the online calls are distributed."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, 2, sharey=True)
    bounds = {"ttft": 1.0, "tpot": 0.05}
    for axes, (figure_name, bound_s) in zip(panels, bounds.items(), strict=True):
        for config in LADDER:
            series = results.series(TRACE, AMPLE_BLOCKS, config)
            percentiles = series[f"{figure_name}_percentiles_s"]
            axes.plot(percentiles, range(101), **_curve(config))
        axes.axvline(bound_s, color="black", linestyle=":", linewidth=1)
        axes.set_xlabel(f"{figure_name.upper()} in s")
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=6)
    panels[0].set_ylabel("% of the online calls")
    panels[1].legend(loc="lower right")
    return figure


def activity(results: Results) -> Figure:
    """Figure 8: online and offline requests that run."""
    figure, axes = _over_time()
    series = results.series(TRACE, AMPLE_BLOCKS, "echo")
    axes.plot(series["at_s"], series["offline_active"], color=COLORS["echo"], label="offline")
    axes.plot(series["at_s"], series["online_active"], color="#c0504d", label="online")
    axes.set_ylabel("running requests")
    axes.legend()
    return figure


def hit_ratio(results: Results) -> Figure:
    """Figure 9: prefix hits of the offline rows that ended in the last ten seconds."""
    figure, axes = _over_time()
    for config in ("bs+e+s", "echo"):
        series = results.series(PEAK, AMPLE_BLOCKS, config)
        at_s, ratios = windowed_hit_ratio(series)
        axes.plot(at_s, ratios, **_curve(config))
    axes.set_ylim(0, 1)
    axes.set_ylabel("prefix hit ratio")
    axes.legend(loc="lower right")
    return figure


def windowed_hit_ratio(series: Mapping[str, Sequence[float]]) -> tuple[list[float], list[float]]:
    """Hit tokens by prompt tokens of the rows that ended in each window; windows without any are
    left out."""
    at_s, ratios = [], []
    columns = ("at_s", "offline_hit_tokens", "offline_prompt_tokens")
    samples = list(zip(*(series[name] for name in columns), strict=True))
    ends = samples[HIT_WINDOW_S - 1 :: HIT_WINDOW_S]
    for before, after in pairwise([(0.0, 0.0, 0.0), *ends]):
        if after[2] > before[2]:
            at_s.append(after[0])
            ratios.append((after[1] - before[1]) / (after[2] - before[2]))
    return at_s, ratios


def memory(results: Results) -> Figure:
    """Figure 10: KV blocks by class, whenever the cached ones were counted; the rest is empty."""
    figure, axes = _over_time()
    series = results.series(SHORT, AMPLE_BLOCKS, "echo")
    seen = [i for i, blocks in enumerate(series["online_cached_blocks"]) if blocks is not None]
    shares = [
        [100 * series[name][i] / series["total_blocks"] for i in seen] for name in MEMORY_CLASSES
    ]
    labels, colors = zip(*MEMORY_CLASSES.values(), strict=True)
    axes.stackplot([series["at_s"][i] for i in seen], shares, labels=labels, colors=colors)
    axes.set_ylim(0, 100)
    axes.set_ylabel("% of the KV blocks")
    figure.legend(loc="outside upper center", ncols=4)
    return figure


def forecast(results: Results) -> Figure:
    """Figure 11: what online calls hold, and what the forecast expected of them."""
    figure, axes = _over_time()
    series = results.series(TRACE, AMPLE_BLOCKS, "echo")
    predicted = [
        blocks if blocks is not None else float("nan") for blocks in series["forecast_blocks"]
    ]
    axes.plot(series["at_s"], predicted, color="black", linestyle="--", label="forecast")
    axes.plot(series["at_s"], series["online_running_blocks"], color="#c0504d", label="held")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("KV blocks of online calls")
    axes.legend()
    return figure


def pool_growth(results: Results) -> Figure:
    """How the pool's time and memory grow with a job."""
    figure = Figure(figsize=(8.2, 3.4), layout="constrained")
    times, memory = figure.subplots(1, 2)
    for shape, (name, color) in POOL_SHAPES.items():
        records = [record for record in results.pool() if record["shape"] == shape]
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


def _over_time() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes: Axes = figure.subplots()
    axes.set_xlabel("virtual s")
    axes.margins(x=0)
    return figure, axes


FIGURES: dict[str, Callable[[Results], Figure]] = {
    "06-ladder": ladder,
    "07-latencies": latencies,
    "08-activity": activity,
    "09-hit-ratio": hit_ratio,
    "10-memory": memory,
    "11-forecast": forecast,
    "pool-growth": pool_growth,
}


if __name__ == "__main__":
    raise SystemExit(main())
