"""What `inspect` prints for people: the figures in words, small distributions, the order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from batchrun.cli.inspect_figures import Distribution, Values

BLOCKS = " ▁▂▃▄▅▆▇█"
NUM_BINS = 24
SHOWN_STRETCHES = 5
LOG_RATIO = 20.0
"""From where on the largest value over the median makes the axis a logarithm."""


def rendered(figures: Mapping[str, Any], shown: Mapping[str, Distribution]) -> RenderableType:
    """The whole answer."""
    table = Table(box=None, show_header=False)
    for key, value in _lines(figures):
        table.add_row(key, Text(value, overflow="fold"))
    parts: list[RenderableType] = [table]
    if shown:
        parts += [Text(), _distributions(shown)]
    if figures["order"]:
        parts += [Text(), _order(figures["order"])]
    return Group(*parts)


def histogram(values: Values) -> tuple[str, bool]:
    """(bars from the smallest to the largest value, whether their bins are logarithmic)."""
    scaled, is_log = values.astype(np.float64), is_spread(values)
    if is_log:
        scaled = np.log(scaled)
    counts, _ = np.histogram(scaled, bins=NUM_BINS)
    heights = np.ceil(counts / max(counts.max(), 1) * (len(BLOCKS) - 1)).astype(int)
    return "".join(BLOCKS[height] for height in heights), is_log


def is_spread(values: Values) -> bool:
    """Whether a few values are so much larger than most that an axis should be logarithmic."""
    return bool(values.min() > 0 and values.max() > LOG_RATIO * np.median(values))


def in_words(value: float, *, is_share: bool = False) -> str:
    """A figure as it is printed: shares in per cent, large ones without a fraction."""
    if is_share:
        return f"{value:.1%}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.3g}"


def _lines(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "job", f"{figures['name']}, {figures['endpoint']}"
    yield "rows", f"{figures['rows']:,}"
    if num_errors := figures["rows_with_template_errors"]:
        failing = f"rows that cannot be rendered and will fail: {num_errors:,}"
        yield "errors", f"{failing}; first: {figures['first_error']}"
    yield "prompt", f"{_pair(figures, 'prompt_tokens')} tokens a row, {_total(figures)}"
    shared = _pair(figures, "shared_share", is_share=True)
    of_tokens = f"{figures['shared_share_of_tokens']:.1%} of all tokens"
    groups = f"groups of rows: {figures['prefix_groups']:,}"
    yield "shared", f"{shared} of a prompt is a prefix of an earlier row; {of_tokens}; {groups}"
    key = _pair(figures, "key_portion_share", is_share=True)
    rows_per_key = _pair(figures, "rows_per_key_portion")
    yield (
        "key portion",
        (f"{key} of a prompt; {figures['key_portions']:,} of them, with {rows_per_key} rows"),
    )
    yield "answers", _answers(figures)
    yield "hit rate", _hit_rates(figures)
    computed = f"computes about {figures['prompt_tokens_computed']:,.0f} prompt tokens"
    yield "a run", f"{computed}, writes {figures['output_path']}"


def _total(figures: Mapping[str, Any]) -> str:
    how = "no tokenizer here, so estimated"
    if figures["rows_tokenised"]:
        how = f"{figures['rows_tokenised']:,} rows tokenised"
    total, ratio = figures["prompt_tokens_total"], figures["bytes_per_token"]
    return f"{total:,.0f} in all ({how} at {ratio:.2f} bytes a token)"


def _answers(figures: Mapping[str, Any]) -> str:
    limit = figures["max_output_tokens"]
    bound = "" if limit is None else f", at most {limit:,}"
    if figures["output_tokens_mean"] is None:
        return "of unknown length: the job sets no max_tokens"
    ratio = figures["prompt_to_output_ratio_mean"]
    times = "" if ratio is None else f"; prompts are {in_words(ratio)} times as long"
    source = figures["output_tokens_source"]
    return f"{_pair(figures, 'output_tokens')} tokens (from {source}{bound}){times}"


def _hit_rates(figures: Mapping[str, Any]) -> str:
    best = f"at best {figures['best_hit_rate']:.1%} (blocks of {figures['block_tokens']} tokens)"
    kv_tokens = figures["kv_tokens"]
    if kv_tokens is None:
        return f"{best}; the KV size is unknown, --kv-tokens N gives it"
    kv = f"{kv_tokens:,} KV tokens ({figures['kv_tokens_source']})"
    if figures["expected_hit_rate"] is None:
        return f"{best}; no row fits {kv}"
    expected = (
        f"{best}; {figures['expected_hit_rate']:.1%} expected with {kv}, "
        f"{figures['expected_hit_rate_as_written']:.1%} in the input's order"
    )
    if figures["rows_larger_than_kv"]:
        expected += f"; {figures['rows_larger_than_kv']:,} rows need more KV than there is"
    return expected


def _distributions(shown: Mapping[str, Distribution]) -> Table:
    table = Table("distribution", "least", "", "most", "median", box=None)
    for each in shown.values():
        bars, is_log = histogram(each.values)
        least, median, most = (
            in_words(value, is_share=each.is_share)
            for value in (each.values.min(), float(np.median(each.values)), each.values.max())
        )
        table.add_row(f"{each.title}{' (log)' if is_log else ''}", least, bars, most, median)
    return table


def _order(stretches: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("runs", "rows", "tokens", "shared", "begins", box=None)
    for place, stretch in enumerate(stretches[:SHOWN_STRETCHES], start=1):
        begins = stretch["begins"] if stretch["is_shared"] else f"each its own: {stretch['begins']}"
        table.add_row(
            str(place),
            f"{stretch['num_rows']:,}",
            f"{stretch['prompt_tokens']:,.0f}",
            f"{stretch['shared_tokens']:,.0f}",
            Text(begins),
        )
    return table


def _pair(figures: Mapping[str, Any], name: str, *, is_share: bool = False) -> str:
    """Mean and deviation."""
    mean, std = (figures[f"{name}_{part}"] for part in ("mean", "std"))
    text = in_words(mean, is_share=is_share)
    return text if std is None else f"{text} ± {in_words(std, is_share=is_share)}"
