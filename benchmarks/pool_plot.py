"""How the pool's time and memory grow with a job, from the results of `benchmarks.pool`.

python -m benchmarks.pool_plot [--results FILE] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plots import STYLE

RESULTS = Path("benchmarks/results/pool.json")
OUT = Path("docs/figures/pool-growth.svg")
STAGES = {"key_s": "hash the prompts", "sort_s": "sort", "nodes_s": "find the tree"}
COLORS = {"toolbench": "#2e7d4f", "short": "#5b9bd5"}
NAMES = {"toolbench": "2,000 tokens a row", "short": "200 tokens a row"}
MARKERS = ("o", "s", "^")

Records = Sequence[dict[str, Any]]


def main() -> int:
    """Draw one figure of two panels."""
    options = _parser().parse_args()
    records: Records = json.loads(options.results.read_text())["records"]
    with rc_context(STYLE):
        figure = Figure(figsize=(8.2, 3.4), layout="constrained")
        times, memory = figure.subplots(1, 2)
        for shape in NAMES:
            of_shape = [record for record in records if record["shape"] == shape]
            _draw(times, memory, shape, of_shape)
        _label(times, "seconds")
        times.set_ylim(5e-4, 1e4)  # room for the legend
        _label(memory, "peak resident memory, MiB")
        figure.savefig(options.out, metadata={"Date": None})
    return 0


def _draw(times: Axes, memory: Axes, shape: str, records: Records) -> None:
    rows = [record["rows"] for record in records]
    for (stage, title), marker in zip(STAGES.items(), MARKERS, strict=True):
        seconds = [max(record[stage], 1e-3) for record in records]
        label = f"{title}, {NAMES[shape]}"
        times.plot(rows, seconds, color=COLORS[shape], marker=marker, markersize=4, label=label)
    peak_mib = [record["peak_bytes"] / 2**20 for record in records]
    memory.plot(rows, peak_mib, color=COLORS[shape], marker="o", markersize=4, label=NAMES[shape])


def _label(axes: Axes, title: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rows")
    axes.set_ylabel(title)
    axes.legend(fontsize=7)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
