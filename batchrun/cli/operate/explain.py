"""`batchrun engine explain`: why calls went to the engines that they went to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from batchrun.cli.console import HomeOption, JsonOption, answer, columns, figure
from batchrun.control.client import DaemonClient
from batchrun.routing.decisions import NUM_KEPT

SHOWN = 20


def explain(
    most: Annotated[
        int, typer.Option("--last", min=1, max=NUM_KEPT, help="So many calls, the newest first.")
    ] = SHOWN,
    *,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Show why the last online calls went where they went.

    Seconds of the chosen engine beside those of the best other one: prefills before the call's own,
    its own, what that delays others, those of what it pushes out and others will want again, its
    decodes, its wait for a slot. Cached tokens as they were foretold, and as the reply told.
    """
    told = DaemonClient(home).get(f"/routing?most={most}")
    answer(told, *_shown(told), as_json=as_json)


def _shown(told: Mapping[str, Any]) -> Iterator[RenderableType]:
    imbalance = figure(told["imbalance"], "{:.2f}")
    yield f"router {told['router']}; the busiest engine has {imbalance} times the mean of the calls"
    yield columns(
        "engine", "calls", "hit rate", "as foretold", "pieces held",
        rows=(
            (
                each["engine"],
                f"{each['num_calls']:,}",
                figure(each["hit_rate"], "{:.0%}"),
                figure(each["agreement"], "{:.0%}"),
                f"{each['num_pieces']:,}",
            )
            for each in told["engines"]
        ),
    )  # fmt: skip
    if not told["decisions"]:
        yield "no call has passed the gateway yet"
        return
    yield ""
    yield columns(
        "ago", "tokens", "engine", "cached", "told", "price", "queue", "prefill", "delays",
        "evicted", "decodes", "slot",
        rows=(line for each in told["decisions"] for line in _lines(each)),
    )  # fmt: skip


def _lines(decision: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The chosen engine, and below it the runner-up."""
    yield (
        f"{decision['age_s']:.1f} s",
        f"{decision['prompt_tokens']:,.0f}",
        *_side(decision["chosen"], figure(decision["told_cached_tokens"], "{:,.0f}")),
    )
    if decision["runner_up"] is not None:
        yield "", "  before" if decision["rank"] else "  not", *_side(decision["runner_up"], "")


def _side(side: Mapping[str, Any], told: str) -> tuple[str, ...]:
    names = ("price_s", "queue_s", "prefill_s", "delays_s", "evicted_s", "decodes_s", "slot_s")
    return (
        side["engine"] or "-",
        figure(side["cached_tokens"], "{:,.0f}"),
        told,
        *(figure(side[name], "{:.3f}") for name in names),
    )
