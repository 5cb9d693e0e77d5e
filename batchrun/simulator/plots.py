"""Figures in the manner of Echo's 2 and 7 to 11, from the records of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import RcKeyType

from batchrun.simulator.records import Slo

ONLINE, OFFLINE = "#c0504d", "#2e7d4f"
MEMORY = {
    "online_running_blocks": ("online, running", ONLINE),
    "offline_running_blocks": ("offline, running", OFFLINE),
    "online_cached_blocks": ("online, cached", "#e6b0aa"),
    "offline_cached_blocks": ("offline, cached", "#a9d5b5"),
}
MAX_POINTS = 600
STYLE: dict[RcKeyType, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "batchrun",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def draw_all(folder: Path, slo: Slo, total_blocks: int) -> list[Path]:
    """Draw the records in `folder` as SVG files beside them; a figure without data is left out.

    `total_blocks` is what all engines have together.
    """
    requests = pq.read_table(folder / "requests.parquet", filters=[("is_online", "==", True)])
    seconds = pq.read_table(folder / "seconds.parquet")
    figures: dict[str, Callable[[], Figure | None]] = {
        "02-tide": lambda: _tide(seconds),
        "07-latencies": lambda: _latencies(requests, slo),
        "08-activity": lambda: _activity(seconds),
        "09-hit-rate": lambda: _hit_rate(seconds),
        "10-memory": lambda: _memory(seconds, total_blocks),
        "11-forecast": lambda: _forecast(seconds),
    }
    written: list[Path] = []
    with rc_context(STYLE):
        for name, draw in figures.items():
            figure = draw()
            if figure is not None:
                path = folder / f"{name}.svg"
                figure.savefig(path, format="svg", metadata={"Date": None}, facecolor="white")
                written.append(path)
    return written


def binned(seconds: pa.Table, names: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Bins of whole seconds, at most `MAX_POINTS`: their starts, and per bin and column the sum
    over the engines of each engine's mean (NaN where there is no value)."""
    at_s = seconds["at_s"].to_numpy()
    width_s = max(1.0, np.ceil((at_s.max(initial=0.0) + 1) / MAX_POINTS))
    num = int(at_s.max(initial=0.0) // width_s) + 1
    bins = (at_s // width_s).astype(np.int64)
    engines = seconds["engine"].to_numpy().astype(np.int64)
    columns: dict[str, np.ndarray] = {}
    for name in names:
        values = seconds[name].to_numpy(zero_copy_only=False).astype(np.float64)
        known = ~np.isnan(values)
        cells = bins[known] + num * engines[known]
        size = num * (int(engines.max(initial=0)) + 1)
        counts = np.bincount(cells, minlength=size)
        sums = np.bincount(cells, values[known], minlength=size)
        with np.errstate(invalid="ignore", divide="ignore"):
            columns[name] = (sums / counts).reshape(-1, num).sum(axis=0)
    return np.arange(num) * width_s, columns


def _tide(seconds: pa.Table) -> Figure | None:
    """Figure 2: online calls a second."""
    if not pc.sum(seconds["online_arrivals"]).as_py():
        return None
    figure, axes = _over_time()
    first = seconds.filter(pc.equal(seconds["engine"], 0))
    at_s, columns = binned(first, ["online_arrivals"])
    axes.plot(at_s, columns["online_arrivals"], color=ONLINE, linewidth=1)
    axes.set_ylabel("online calls a second")
    axes.set_ylim(bottom=0)
    return figure


def _latencies(requests: pa.Table, slo: Slo) -> Figure | None:
    """Figure 7: how TTFT and TPOT of the online calls are distributed."""
    arrival, first, last = (
        requests[name].to_numpy(zero_copy_only=False)
        for name in ("arrival_s", "first_token_s", "last_token_s")
    )
    num_tokens = requests["num_output_tokens"].to_numpy()
    ttft = (first - arrival)[num_tokens > 0]
    several = num_tokens > 1
    tpot = (last - first)[several] / (num_tokens[several] - 1)
    if not ttft.size or not tpot.size:
        return None
    figure = Figure(figsize=(8, 3), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, 2, sharey=True)
    shown = (("TTFT", ttft, slo.ttft_s), ("TPOT", tpot, slo.tpot_s))
    for axes, (name, values, bound_s) in zip(panels, shown, strict=True):
        axes.plot(np.percentile(values, np.arange(101)), range(101), color=ONLINE)
        axes.axvline(bound_s, color="black", linestyle=":", linewidth=1)
        axes.set_xlabel(f"{name} in s")
        axes.set_xlim(left=0)
    panels[0].set_ylabel("% of the online calls")
    return figure


def _activity(seconds: pa.Table) -> Figure | None:
    """Figure 8: online and offline requests that run."""
    figure, axes = _over_time()
    at_s, columns = binned(seconds, ["online_active", "offline_active"])
    axes.plot(at_s, columns["offline_active"], color=OFFLINE, label="offline")
    axes.plot(at_s, columns["online_active"], color=ONLINE, label="online")
    axes.set_ylabel("running requests")
    axes.legend()
    return figure


def _hit_rate(seconds: pa.Table) -> Figure | None:
    """Figure 9: prefix hits of the offline rows that ended."""
    if not pc.sum(seconds["offline_prompt_tokens"]).as_py():
        return None
    figure, axes = _over_time()
    at_s, columns = binned(seconds, ["offline_prompt_tokens", "offline_hit_tokens"])
    with np.errstate(invalid="ignore"):
        rate = columns["offline_hit_tokens"] / columns["offline_prompt_tokens"]
    known = ~np.isnan(rate)
    axes.plot(at_s[known], rate[known], color=OFFLINE, linewidth=1)
    axes.set_ylim(0, 1)
    axes.set_ylabel("prefix hit rate")
    return figure


def _memory(seconds: pa.Table, total_blocks: int) -> Figure | None:
    """Figure 10: KV blocks by class; what is left is empty."""
    looked = seconds.filter(pc.is_valid(seconds["online_cached_blocks"]))
    at_s, columns = binned(looked, list(MEMORY))
    known = ~np.isnan(columns["online_cached_blocks"])
    figure, axes = _over_time()
    shares = [100 * columns[name][known] / total_blocks for name in MEMORY]
    labels, colors = zip(*MEMORY.values(), strict=True)
    axes.stackplot(at_s[known], shares, labels=labels, colors=colors)
    axes.set_ylim(0, 100)
    axes.set_ylabel("% of the KV blocks")
    figure.legend(loc="outside upper center", ncols=4)
    return figure


def _forecast(seconds: pa.Table) -> Figure | None:
    """Figure 11: what online calls hold, and what the scheduler expected of them."""
    if pc.all(pc.is_null(seconds["forecast_blocks"])).as_py():
        return None
    figure, axes = _over_time()
    at_s, columns = binned(seconds, ["forecast_blocks", "online_running_blocks"])
    axes.plot(at_s, columns["forecast_blocks"], color="black", linestyle="--", label="forecast")
    axes.plot(at_s, columns["online_running_blocks"], color=ONLINE, label="held")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("KV blocks of online calls")
    axes.legend()
    return figure


def _over_time() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes: Axes = figure.subplots()
    axes.set_xlabel("virtual s")
    axes.margins(x=0)
    return figure, axes
