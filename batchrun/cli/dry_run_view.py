"""What `submit --dry-run` prints for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from batchrun.cli.dry_run_figures import EngineTime, Eta, Foretold, Price
from batchrun.durations import duration


def rendered(found: Foretold) -> Table:
    """The whole answer."""
    table = Table(box=None, show_header=False)
    for key, value in _lines(found):
        table.add_row(key, Text(value, overflow="fold"))
    return table


def _lines(found: Foretold) -> Iterator[tuple[str, str]]:
    study, forecast = found.study, found.forecast
    yield "job", f"{study['name']}, {study['endpoint']}; it was not submitted"
    yield "rows", f"{study['rows']:,}; prefix groups: {study['prefix_groups']:,}"
    if num_errors := study["rows_that_cannot_run"]:
        failing = f"rows that cannot be rendered and will fail: {num_errors:,}"
        yield "errors", f"{failing}; first: {study['first_error']}"
    yield "tokens", _tokens(study)
    yield "hit rate", _hit_rates(study)
    yield "ETA", _eta(forecast.eta)
    if found.deadline_s is not None:
        yield "deadline", _deadline(forecast.eta, found.deadline_s)
    yield "cost", _cost(forecast.engine_time, found.price)
    yield "output", study["output_path"]


def _tokens(study: Mapping[str, Any]) -> str:
    mean, limit = study["output_tokens_a_row"], study["max_output_tokens_a_row"]
    bound = f"; at most {limit:,}" if limit is not None and limit > mean else ""
    return (
        f"{study['prompt_tokens']:,} in prompts, {study['output_tokens']:,} in answers "
        f"({mean:,.3g} a row, from {study['output_tokens_source']}{bound}); "
        f"{study['computed_tokens']:,} to compute"
    )


def _hit_rates(study: Mapping[str, Any]) -> str:
    best = f"{study['best_hit_rate']:.1%} at best"
    if study["kv_tokens"] is None:
        return f"{best}; the KV size is not known before an engine runs or was calibrated"
    kv = f"{study['kv_tokens']:,} KV tokens ({study['kv_tokens_source']})"
    if study["expected_hit_rate"] is None:
        return f"{best}; no row fits {kv}"
    expected = f"{study['expected_hit_rate']:.1%} expected with {kv}, {best}"
    if study["rows_larger_than_kv"]:
        expected += f"; {study['rows_larger_than_kv']:,} rows need more KV than there is"
    return expected


def _eta(eta: Eta) -> str:
    if eta.expected_s is None or eta.low_s is None or eta.high_s is None:
        return f"unknown: {eta.rests_on}"
    if math.isinf(eta.expected_s):
        return f"never: {eta.rests_on}"
    spread = f"{duration(eta.low_s)} to {duration(eta.high_s)}"
    if eta.source == "daemon":
        beside = f"in 9 of 10 cases {spread}, beside today's load"
    else:
        beside = f"{spread} by when in the trace it comes"
    return f"{duration(eta.expected_s)}; {beside}: {eta.rests_on}"


def _deadline(eta: Eta, deadline_s: float) -> str:
    length = duration(deadline_s)
    if eta.expected_s is None or eta.low_s is None or eta.high_s is None:
        return f"{length}: whether it is kept is unknown"
    if math.isinf(eta.expected_s):
        return f"{length}: missed"
    if eta.keeps(deadline_s):
        doubt = "" if eta.high_s <= deadline_s else ", but not if all goes slowly"
        return f"{length}: kept{doubt}"
    doubt = "" if eta.low_s > deadline_s else ", but kept if all goes well"
    return f"{length}: missed by {duration(eta.expected_s - deadline_s)}{doubt}"


def _cost(spent: EngineTime, price: Price) -> str:
    beside = "beside online calls no GPU-hour more"
    gpu_hours, cost = spent.gpu_hours(price), spent.cost(price)
    if spent.hours is None or gpu_hours is None:
        return f"{beside}; on engines of its own unknown: {spent.rests_on}"
    most = "at most " if spent.source == "daemon" else ""
    hours = f"{most}{_figure(gpu_hours)} GPU-hours"
    if price.gpus > 1:
        hours += f" ({_figure(spent.hours)} engine-hours of {price.gpus} GPUs)"
    money = "" if cost is None else f", which cost {_figure(cost)}"
    return f"{beside}; on engines of its own {hours}{money} ({spent.rests_on})"


def _figure(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.1 or not value else f"{value:.2g}"
