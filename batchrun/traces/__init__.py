"""Traces of online calls: read, change, look at and keep them."""

from batchrun.traces.parquet_file import load_parquet, save_trace
from batchrun.traces.rates import (
    CallLengths,
    GapFamily,
    LogNormalTokens,
    RateSeries,
    draw_trace,
    splice_day,
)
from batchrun.traces.reading import Drawing, TraceFormat, detect_format, read_rates, read_trace
from batchrun.traces.scaling import scale_lengths, scale_rate, scale_time, superpose
from batchrun.traces.slo_search import Fitted, RateSearch, fit_rate
from batchrun.traces.summary import Peak, Spread, TraceSummary, prefix_hit_rate, summarize_trace
from batchrun.traces.trace import PrefixBlocks, Trace
from batchrun.traces.windows import (
    Load,
    Window,
    counts_by_window,
    find_peak,
    stratified_windows,
)

__all__ = [
    "CallLengths",
    "Drawing",
    "Fitted",
    "GapFamily",
    "Load",
    "LogNormalTokens",
    "Peak",
    "PrefixBlocks",
    "RateSearch",
    "RateSeries",
    "Spread",
    "Trace",
    "TraceFormat",
    "TraceSummary",
    "Window",
    "counts_by_window",
    "detect_format",
    "draw_trace",
    "find_peak",
    "fit_rate",
    "load_parquet",
    "prefix_hit_rate",
    "read_rates",
    "read_trace",
    "save_trace",
    "scale_lengths",
    "scale_rate",
    "scale_time",
    "splice_day",
    "stratified_windows",
    "summarize_trace",
    "superpose",
]
