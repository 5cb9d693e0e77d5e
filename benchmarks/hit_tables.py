"""What is shown of the records of `benchmarks.hit_rates`: tables with a column for each order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from benchmarks.hit_cases import SHIPPED, Record
from benchmarks.orders import BASELINES, OURS
from benchmarks.records import Bar

ALONE_BAR, ONLINE_BAR = 0.97, 0.95
"""Shares of the optimum."""


def tables(records: Sequence[Record]) -> Iterator[str]:
    """For each eviction and load: hits as shares of the optimum, then how long the jobs took."""
    by_setting = sorted(records, key=itemgetter("online", "eviction"))
    for (online, eviction), group in groupby(by_setting, key=itemgetter("online", "eviction")):
        found = list(group)
        where = f"eviction {eviction}{', beside online calls' if online else ''}"
        yield f"\nShare of the optimum, {where}\n"
        yield from _table(found, "share_of_optimum", ".4f")
        yield f"\nSeconds until the last row ended, {where}\n"
        yield from _table(found, "job_s", ".1f")


def _table(records: Sequence[Record], key: str, form: str) -> Iterator[str]:
    """A line for each job and KV size. A run that stalled has a star."""
    orders = list(dict.fromkeys(record["order"] for record in records))
    yield f"| job | blocks | optimum | {' | '.join(orders)} |"
    yield f"|---|---:|---:|{'---:|' * len(orders)}"
    by_job = sorted(records, key=itemgetter("job", "blocks"))
    for (job, blocks), group in groupby(by_job, key=itemgetter("job", "blocks")):
        rows = {record["order"]: record for record in group}
        cells = [
            f"{row[key]:{form}}{'' if row['offline_rows'] == row['rows'] else '*'}"
            for row in (rows[order] for order in orders)
        ]
        optimum = rows[OURS]["prefix_hit_optimum"]
        yield f"| {job} | {blocks:,} | {optimum:.4f} | {' | '.join(cells)} |"


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """What our order must reach, alone and beside online calls."""
    for record in records:
        if record["order"] == OURS and record["eviction"] == SHIPPED:
            yield from _bars_of(record, records)


def _bars_of(ours: Record, records: Sequence[Record]) -> Iterator[Bar]:
    """Its share of the optimum, and how far its hit rate is above that of every other order."""
    where = f"{ours['job']}, {ours['blocks']} blocks{', online' if ours['online'] else ''}"
    bound = ONLINE_BAR if ours["online"] else ALONE_BAR
    yield Bar(f"{where}, by the optimum", ours["share_of_optimum"], bound)
    same = ("job", "blocks", "online", "seed")
    for other in records:
        if other["order"] in BASELINES and all(other[key] == ours[key] for key in same):
            name = f"{other['order']}, {other['eviction']}"
            points = 100 * (ours["prefix_hit_rate"] - other["prefix_hit_rate"])
            yield Bar(f"{where}, percentage points above {name}", points, 0.0)
