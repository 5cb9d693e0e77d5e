"""Figures in the manner of Echo's 6 to 11, from the results of `benchmarks.ablation`.

    python -m benchmarks.plots [--results FOLDER] [--out FOLDER]

Reads `ablation-SCENARIO.json` and `ablation-SCENARIO-series.json`; a figure whose results are not
there is left out, and said so. `docs/figures.md` says what each one shows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import RcKeyType

from benchmarks.ablation_configs import LADDER
from benchmarks.results_files import Results, ResultsMissingError

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
STYLE: dict[RcKeyType, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "batchrun",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def main() -> int:
    """Draw what can be drawn."""
    options = _parser().parse_args()
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


def _curve(config: str) -> dict[str, Any]:
    return {"color": COLORS[config], "linewidth": WIDTHS[config], "label": config}


def _over_time() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes: Axes = figure.subplots()
    axes.set_xlabel("virtual s")
    axes.margins(x=0)
    return figure, axes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    return parser


FIGURES: dict[str, Callable[[Results], Figure]] = {
    "06-ladder": ladder,
    "07-latencies": latencies,
    "08-activity": activity,
    "09-hit-ratio": hit_ratio,
    "10-memory": memory,
    "11-forecast": forecast,
}


if __name__ == "__main__":
    raise SystemExit(main())
