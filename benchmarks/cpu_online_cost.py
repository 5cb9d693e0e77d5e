"""The dial `online_cost` on real CPU engines: calls beside rows against the same calls alone.

    python -m benchmarks.cpu_online_cost [--costs X ...] [--seeds N ...] [--json FILE]

One server for each cost, driven one at a time, as `benchmarks.cpu_colocation` drives its own: for
each seed a window of calls alone, then one of the same calls beside rows. The bars are over all
seeds: what p50 and p99 of TTFT and TPOT are beside rows, over what they are alone.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from batchrun.config import SloConfig
from batchrun.engine.tiny_model import build_tiny_model
from batchrun.store.database import open_store
from benchmarks.cpu_colocation import SCENARIO
from benchmarks.cpu_colocation_rows import RowStream
from benchmarks.cpu_colocation_servers import Server, run_window
from benchmarks.deployment import scratch
from benchmarks.records import Bar, Record, describe, finish, parser
from benchmarks.text_jobs import MODEL

FIGURES = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")
LEAST_SERVED = 0.85
"""Offline tokens at 1.3 over those at 2.0."""
ALONE_SEED = 1_000


def main() -> int:
    """Run, print the bars. Exit code 4 and one line when a server is lost."""
    options = parser(
        __doc__, costs=(1.1, 1.3, 2.0), seeds=(0, 1), warm_up_s=15.0, window_s=60.0
    ).parse_args()
    with scratch("cpu_online_cost") as folder:
        records = asyncio.run(_run(options, folder))
    return finish(options.json, records, bars(records))


async def _run(options: Namespace, folder: Path) -> list[Record]:
    spans_s = options.warm_up_s, options.window_s
    await asyncio.to_thread(build_tiny_model, folder / MODEL)
    (folder / "sets").mkdir()
    store = open_store(folder / "store.db")
    records: list[Record] = []
    slo: SloConfig | None = None
    for cost in (None, *options.costs):
        # The first server fixes the bounds, with calls alone.
        server = Server(f"cost-{cost or 'none'}", folder, policy="echo", slo=slo, online_cost=cost)
        await server.start()
        try:
            if slo is None:
                window = await run_window(server, spans_s, ALONE_SEED)
                bounds = (window[f"slo_{name}_bound_s"] for name in ("ttft", "tpot"))
                slo = SloConfig(**dict(zip(("ttft_s", "tpot_s"), bounds, strict=True)))
                continue
            for seed in options.seeds:
                for rows in (None, RowStream(folder / "sets", store, seed, False, server.nonce)):
                    window = await run_window(server, spans_s, seed, slo, rows)
                    kind = {"scenario": SCENARIO, "online_cost": cost, "alone": rows is None}
                    records.append({**kind, **window})
                    print(describe({**kind, **{key: window[key] for key in FIGURES}}), flush=True)
        finally:
            await server.engine.stop()
    return records


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """The medians over the seeds."""
    served: dict[float, float] = {}
    for cost in dict.fromkeys(record["online_cost"] for record in records):
        beside, alone = (
            [each for each in records if (each["online_cost"], each["alone"]) == (cost, is_alone)]
            for is_alone in (False, True)
        )
        for key in FIGURES:
            ratio = median(each[key] for each in beside) / median(each[key] for each in alone)
            yield Bar(f"{key[:-2]} beside rows over alone, at {cost:g}", ratio, cost, is_most=True)
        served[cost] = median(each["offline_tokens_per_s"] for each in beside)
        yield Bar(f"offline tokens/s at {cost:g}", served[cost])
    if {1.3, 2.0} <= served.keys():
        yield Bar(
            "offline tokens at 1.3 over those at 2.0", served[1.3] / served[2.0], LEAST_SERVED
        )


if __name__ == "__main__":
    raise SystemExit(main())
