"""Figures in the manner of Echo's 2 and 7 to 11, from the records of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
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
    requests = pl.scan_parquet(folder / "requests.parquet", glob=False)
    seconds = pl.read_parquet(folder / "seconds.parquet", glob=False)
    written: list[Path] = []
    with rc_context(STYLE):
        figures: dict[str, Figure | None] = {
            "02-tide": _tide(seconds),
            "07-latencies": _latencies(requests.filter("is_online").collect(), slo),
            "08-activity": activity(seconds),
            "09-hit-rate": _hit_rate(seconds),
            "10-memory": memory(seconds, total_blocks),
            "11-forecast": forecast(seconds) if seconds["forecast_blocks"].count() else None,
        }
        for name, figure in figures.items():
            if figure is not None:
                path = folder / f"{name}.svg"
                figure.savefig(path, format="svg", metadata={"Date": None}, facecolor="white")
                written.append(path)
    return written


def binned(seconds: pl.DataFrame, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Bins of whole seconds, at most `MAX_POINTS`: their starts `at_s`, and per bin and column the
    sum over the engines of each engine's mean (NaN where an engine has no value)."""
    last_s = float(seconds.select(pl.col("at_s").max().fill_null(0.0)).item())
    width_s = max(1.0, np.ceil((last_s + 1) / MAX_POINTS))
    bins = pl.DataFrame({"bin": np.arange(int(last_s // width_s) + 1)})
    engines = seconds.select(pl.col("engine").unique())
    means = seconds.group_by("engine", (pl.col("at_s") // width_s).cast(pl.Int64).alias("bin")).agg(
        pl.col(names).cast(pl.Float64).mean()
    )
    # An engine without a value makes the whole bin NaN: part of a sum would be drawn as all of it.
    every = bins.join(engines, how="cross").join(means, on=["bin", "engine"], how="left")
    sums = every.group_by("bin").agg(pl.col(names).fill_null(float("nan")).sum()).sort("bin")
    return {"at_s": sums["bin"].to_numpy() * width_s, **{n: sums[n].to_numpy() for n in names}}


def _tide(seconds: pl.DataFrame) -> Figure | None:
    """Figure 2: online calls a second."""
    if not seconds["online_arrivals"].sum():
        return None
    figure, axes = over_time("online calls a second")
    columns = binned(seconds.filter(engine=0), ["online_arrivals"])
    axes.plot(columns["at_s"], columns["online_arrivals"], color=ONLINE, linewidth=1)
    axes.set_ylim(bottom=0)
    return figure


def _latencies(requests: pl.DataFrame, slo: Slo) -> Figure | None:
    """Figure 7: how TTFT and TPOT of the online calls are distributed."""
    calls = requests.filter(pl.col("num_output_tokens") > 0)
    ttft = (calls["first_token_s"] - calls["arrival_s"]).to_numpy()
    calls = calls.filter(pl.col("num_output_tokens") > 1)
    spans_s = calls["last_token_s"] - calls["first_token_s"]
    tpot = (spans_s / (calls["num_output_tokens"] - 1)).to_numpy()
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
    round_ticks(*panels)
    panels[0].set_ylabel("% of the online calls")
    return figure


def activity(seconds: pl.DataFrame) -> Figure:
    """Figure 8: online and offline requests that run."""
    figure, axes = over_time("running requests")
    columns = binned(seconds, ["online_active", "offline_active"])
    for name, color in (("offline", OFFLINE), ("online", ONLINE)):
        axes.plot(columns["at_s"], columns[f"{name}_active"], color=color, label=name)
    axes.legend()
    return figure


def _hit_rate(seconds: pl.DataFrame) -> Figure | None:
    """Figure 9: prefix hits of the offline rows that ended."""
    if not seconds["offline_prompt_tokens"].sum():
        return None
    figure, axes = over_time("prefix hit rate")
    columns = binned(seconds, ["offline_prompt_tokens", "offline_hit_tokens"])
    with np.errstate(invalid="ignore"):
        rate = columns["offline_hit_tokens"] / columns["offline_prompt_tokens"]
    known = ~np.isnan(rate)
    axes.plot(columns["at_s"][known], rate[known], color=OFFLINE, linewidth=1)
    axes.set_ylim(0, 1)
    return figure


def memory(seconds: pl.DataFrame, total_blocks: int) -> Figure:
    """Figure 10: KV blocks by class; what is left is empty."""
    columns = binned(seconds.drop_nulls("online_cached_blocks"), list(MEMORY))
    known = ~np.isnan(columns["online_cached_blocks"])
    figure, axes = over_time("% of the KV blocks")
    shares = [100 * columns[name][known] / total_blocks for name in MEMORY]
    labels, colors = zip(*MEMORY.values(), strict=True)
    axes.stackplot(columns["at_s"][known], shares, labels=labels, colors=colors)
    axes.set_ylim(0, 100)
    figure.legend(loc="outside upper center", ncols=4)
    return figure


def forecast(seconds: pl.DataFrame) -> Figure:
    """Figure 11: what online calls hold, and what the scheduler expected of them, in the engines
    whose scheduler does."""
    figure, axes = over_time("KV blocks of online calls")
    forecasting = seconds.drop_nulls("forecast_blocks").select(pl.col("engine").unique())
    of_those = seconds.join(forecasting, on="engine", how="semi")
    columns = binned(of_those, ["forecast_blocks", "online_running_blocks"])
    at_s, held = columns["at_s"], columns["online_running_blocks"]
    axes.plot(at_s, columns["forecast_blocks"], color="black", linestyle="--", label="forecast")
    axes.plot(at_s, held, color=ONLINE, label="held")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def round_ticks(*panels: Axes) -> None:
    """Whole, round numbers of few digits at linear axes, with commas between thousands."""
    for axes in panels:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
            axis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def over_time(what: str) -> tuple[Figure, Axes]:
    """An empty figure of `what` over virtual seconds."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes: Axes = figure.subplots()
    axes.set_xlabel("virtual s")
    axes.set_ylabel(what)
    axes.margins(x=0)
    round_ticks(axes)
    return figure, axes
