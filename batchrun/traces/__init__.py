"""Traces of online calls: read, change, look at and keep them."""

from batchrun.traces.parquet_file import load_parquet, save_trace
from batchrun.traces.trace import PrefixBlocks, Trace

__all__ = ["PrefixBlocks", "Trace", "load_parquet", "save_trace"]
