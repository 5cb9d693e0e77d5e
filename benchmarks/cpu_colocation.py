"""Online calls and an offline job on real vLLM servers: `echo` against vLLM's own priorities.

    python -m benchmarks.cpu_colocation [--json FILE] [--resume] [--pairs N]

Three servers on the CPU, driven one at a time: `bs` on shuffled rows, `echo` on the same rows as
batchrun's daemon sends them, and for some seeds `bs` with a token budget of 128 on rows that
somebody grouped by hand. The defaults are the protocol (docs/performance.md): 20 to 25 minutes on
two cores with nothing beside it. Every window is written to FILE as soon as it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from batchrun.config import SloConfig
from batchrun.engine.tiny_model import build_tiny_model
from batchrun.errors import BatchrunError
from batchrun.store.database import open_store
from benchmarks.cpu_colocation_rows import RowStream
from benchmarks.cpu_colocation_servers import NUM_BLOCKS, Server, run_window
from benchmarks.records import Bar, Record, describe, parser, read_records, shown, write_records
from benchmarks.text_jobs import MODEL

LEAST_WORKER_SHARE = 0.85
"""A worker that got less of its core was disturbed: its pair does not count."""
BROKEN_ATTAINMENT = 0.4
"""Hand-grouped vLLM is held against where it keeps its SLO for fewer calls than this."""
SCENARIO = f"cpu-{len(os.sched_getaffinity(0))}-cores"
GROUPED_BUDGET = 128
ONLINE_ONLY_SEED = 1_000
ORDERS = {"bs": "shuffled", "echo": "planned", "grouped": "grouped"}
RIVALS = ("bs", "grouped")
PRINTED = (
    *("server", "seed", "offline_tokens_per_s", "computed_tokens_per_s", "prefix_hit_rate"),
    *("ttft_p50_s", "ttft_p99_s", "slo_attainment", "worker_cpu_share"),
)


def pairs_of(windows: Sequence[Record], rival: str) -> pl.DataFrame:
    """`echo` beside each window of the server `rival` with the same seed.

    `ratio` is of offline tokens/s, `ratio_per_cpu_s` of those for each second of worker CPU. Pairs
    in which a worker did not get its core are not `is_kept`. The rival's columns end in `_rival`.
    """
    figures = ("offline_tokens_per_s", "worker_cpu_share", "slo_attainment", "prefix_hit_rate")
    schema = {"server": pl.String, "seed": pl.Int64, **dict.fromkeys(figures, pl.Float64)}
    frame = pl.DataFrame([{key: window.get(key) for key in schema} for window in windows], schema)
    echo, other = (frame.filter(pl.col("server") == name) for name in ("echo", rival))
    pairs = echo.join(other, on="seed", suffix="_rival").sort("seed")
    served, core = (pl.col(figure) / pl.col(f"{figure}_rival") for figure in figures[:2])
    least_core = pl.min_horizontal("worker_cpu_share", "worker_cpu_share_rival")
    return pairs.with_columns(
        is_kept=least_core >= LEAST_WORKER_SHARE, ratio=served, ratio_per_cpu_s=served / core
    )


def pair_records(windows: Sequence[Record]) -> list[Record]:
    """One flat record a pair, the dropped ones included."""
    figures = ("seed", "is_kept", "ratio", "ratio_per_cpu_s")
    return [
        {"kind": "pair", "against": rival, **{key: pair[key] for key in figures}}
        for rival in RIVALS
        for pair in pairs_of(windows, rival).iter_rows(named=True)
    ]


def bars(windows: Sequence[Record]) -> list[Bar]:
    """The figures that must hold, over the pairs that count; none when none does."""

    def medians(rival: str) -> dict[str, float]:
        kept = pairs_of(windows, rival).filter("is_kept")
        if kept.is_empty():
            return {}
        lowest = {"lowest": kept["ratio"].min(), "num_pairs": len(kept)}
        return kept.select(pl.selectors.numeric().median()).row(0, named=True) | lowest

    found: list[Bar] = []
    if bs := medians("bs"):
        found += [
            Bar("pairs that count", bs["num_pairs"]),
            Bar("echo / bs, median", bs["ratio"], 2.0),
            Bar("the same per second of worker CPU", bs["ratio_per_cpu_s"], 2.5),
            Bar("the lowest pair", bs["lowest"], 1.5),
            Bar("attainment of echo", bs["slo_attainment"], 0.95),
            Bar("hit rate of echo", bs["prefix_hit_rate"], 0.80),
        ]
    if bs and (grouped := medians("grouped")):
        attainment = grouped["slo_attainment_rival"]
        bound = 0.75 if attainment < BROKEN_ATTAINMENT else None
        found += [
            Bar("attainment of bs on grouped rows", attainment),
            Bar("echo / bs on grouped rows", grouped["ratio"], bound),
        ]
    return found


@dataclass(slots=True)
class Session:
    """What a run has so far: the windows, and where they are written."""

    path: Path | None
    windows: list[Record]

    def slo(self) -> SloConfig | None:
        """The bounds that the online-only window fixed; None before it."""
        for window in self.windows:
            if window["server"] == "online-only":
                bounds = {name: window[f"slo_{name}_bound_s"] for name in ("ttft", "tpot")}
                return SloConfig.model_validate({f"{k}_s": bound for k, bound in bounds.items()})
        return None

    def missing(self, num_pairs: int, num_grouped: int) -> list[tuple[str, int]]:
        """(server, seed) of the windows to measure, in order: A B A B, with C for the first."""
        measured = {(window["server"], window["seed"]) for window in self.windows}
        wanted = [
            (server, seed)
            for seed in range(num_pairs)
            for server in ORDERS
            if server != "grouped" or seed < num_grouped
        ]
        return [window for window in wanted if window not in measured]

    def add(self, server: str, window: Record) -> None:
        """Keep a window: print its line, write the file with every pair so far."""
        entry: Record = {"kind": "window", "scenario": SCENARIO, "server": server}
        self.windows.append({**entry, "blocks": NUM_BLOCKS, **window})
        print(describe({key: self.windows[-1][key] for key in PRINTED}), flush=True)
        if self.path is not None:
            write_records(self.path, [*self.windows, *pair_records(self.windows)])


def main() -> int:
    """Run what is missing, print the bars. Exit code 4 and one line when a server is lost."""
    made = parser(__doc__, pairs=5, grouped=3, warm_up_s=15.0, window_s=60.0, resume=False)
    options = made.parse_args()
    windows: list[Record] = []
    if options.resume:
        if options.json is None:
            made.error("--resume needs --json FILE, the file to go on from")
        earlier = read_records(options.json) if options.json.exists() else []
        windows += [record for record in earlier if record["kind"] == "window"]
    session = Session(options.json, windows)
    # Ended by `kill` or `timeout` it must not leave servers behind either.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="batchrun-colocation-"))
    try:
        asyncio.run(_run(options, session, folder))
    except BatchrunError as error:
        sys.stderr.write(f"cpu_colocation: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("cpu_colocation: interrupted; --resume goes on from the file\n")
        return 130
    shutil.rmtree(folder, ignore_errors=True)
    shown(pair_records(session.windows))
    print("\n".join(map(str, bars(session.windows))) or "no pair counts")
    return 0


async def _run(options: argparse.Namespace, session: Session, folder: Path) -> None:
    """`bs` fixes the SLO alone, then `echo` and `grouped` start, then the pairs A B A B."""
    missing = session.missing(options.pairs, options.grouped)
    if not missing:
        return
    spans_s = options.warm_up_s, options.window_s
    await asyncio.to_thread(build_tiny_model, folder / MODEL)
    (folder / "sets").mkdir()
    store = open_store(folder / "store.db")
    servers = {"bs": Server("bs", folder)}
    try:
        await servers["bs"].start()
        if session.slo() is None:
            window = await run_window(servers["bs"], spans_s, ONLINE_ONLY_SEED)
            session.add("online-only", {"order": None, **window})
        slo = session.slo()
        servers["echo"] = Server("echo", folder, policy="echo", slo=slo)
        if ("grouped", 0) in missing:
            servers["grouped"] = Server("grouped", folder, budget=GROUPED_BUDGET)
        await asyncio.gather(*(servers[name].start() for name in servers if name != "bs"))
        for name, seed in missing:
            nonce = servers[name].nonce if name == "echo" else None
            rows = RowStream(folder / "sets", store, seed, name == "bs", nonce)
            window = await run_window(servers[name], spans_s, seed, slo, rows)
            session.add(name, {"order": ORDERS[name], **window})
    finally:
        await asyncio.gather(*(server.engine.stop() for server in servers.values()))


if __name__ == "__main__":
    raise SystemExit(main())
