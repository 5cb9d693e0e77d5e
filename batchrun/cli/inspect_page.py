"""Figure 4's distributions as one HTML page with nothing outside it, for light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from batchrun.cli.inspect_figures import Distribution
from batchrun.cli.inspect_view import in_words, is_spread
from batchrun.errors import InputError
from batchrun.files import write_atomically

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 44, 348, 12, 176
STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --line: #2e7d4f; --grid: #d8d8d8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --line: #7fcf9f; --grid: #444; }
}
body { font: 14px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 76rem;
  margin: 2rem auto; padding: 0 1rem; }
main { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { width: 22.5rem; max-width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 11px; }
.grid { stroke: var(--grid); } .curve { stroke: var(--line); stroke-width: 2; fill: none; }
"""


def write_page(path: Path, figures: Mapping[str, Any], shown: Mapping[str, Distribution]) -> None:
    """Write the page. Raises InputError when the file cannot be written."""
    title = f"Prompts of {figures['name']}: {figures['rows']:,} rows"
    plots = "".join(_figure(name, each) for name, each in shown.items())
    page = (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n<p>Each curve shows how many per cent of the rows (of "
        f"the key portions in the last case) lie at or below a value.</p>\n"
        f"<main>{plots}</main></body>\n</html>\n"
    )
    try:
        write_atomically(path, page.encode())
    except OSError as error:
        raise InputError(f"--html {path}: cannot be written: {error.strerror}") from error


def _figure(name: str, each: Distribution) -> str:
    percentiles = each.percentiles
    is_log = is_spread(each.values)
    scale = _Scale(percentiles[0], percentiles[-1], is_log=is_log, is_share=each.is_share)
    points = " ".join(f"{scale.x(value):.1f},{_y(i):.1f}" for i, value in enumerate(percentiles))
    median = in_words(percentiles[50], is_share=each.is_share)
    about = (
        f"Median {median}, from {in_words(percentiles[0], is_share=each.is_share)} to "
        f"{in_words(percentiles[-1], is_share=each.is_share)}."
    )
    label = each.title + (", logarithmic" if is_log else "")
    return (
        f"<figure><figcaption>{escape(each.title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">Distribution: {escape(each.title)}</title>'
        f'<desc id="{name}-d">{escape(about)}</desc>{"".join(_axes(scale, label))}'
        f'<polyline class="curve" points="{points}"/></svg></figure>\n'
    )


class _Scale:
    """Where values stand on the horizontal axis."""

    def __init__(self, least: float, most: float, *, is_log: bool, is_share: bool) -> None:
        self._is_log = is_log
        self._is_share = is_share
        self._first = math.log(least) if is_log else 0.0
        self._last = 1.0 if is_share else (math.log(most) if is_log else most)

    def x(self, value: float) -> float:
        """The place of a value."""
        place = math.log(value) if self._is_log else value
        span = self._last - self._first
        return LEFT + (RIGHT - LEFT) * ((place - self._first) / span if span > 0 else 1.0)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """(place, label) of five values."""
        for quarter in range(5):
            place = self._first + (self._last - self._first) * quarter / 4
            value = math.exp(place) if self._is_log else place
            yield self.x(value), in_words(value, is_share=self._is_share).replace(".0%", "%")


def _axes(scale: _Scale, label: str) -> Iterator[str]:
    for percent in (0, 25, 50, 75, 100):
        y = _y(percent)
        yield f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{percent}%</text>'
    for x, text in scale.ticks():
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}"/>'
        yield f'<text x="{x:.1f}" y="{BOTTOM + 16}" text-anchor="middle">{escape(text)}</text>'
    middle = (LEFT + RIGHT) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(label)}</text>'


def _y(percent: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * percent / 100
