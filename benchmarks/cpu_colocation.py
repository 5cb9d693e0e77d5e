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
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchrun.engine.tiny_model import build_tiny_model
from batchrun.errors import BatchrunError, ConfigError
from batchrun.store.database import open_store
from benchmarks.colocation_figures import Promise
from benchmarks.cpu_colocation_job import RowOrder, RowStream, SetShape, SetWriter
from benchmarks.cpu_colocation_pairs import Window, bars, number, pair_records, pairs_of
from benchmarks.cpu_colocation_servers import MODEL, Server, ServerPlan, start_all
from benchmarks.cpu_colocation_window import Record, Timing, run_window
from benchmarks.records import write_records

SCENARIO = f"cpu-{len(os.sched_getaffinity(0))}-cores"
NUM_BLOCKS = 400
"""5.7 of the trial's documents, in blocks of 128 tokens."""
GROUPED_BUDGET = 128
ONLINE_ONLY_SEED = 1_000
ORDERS = {"bs": RowOrder.SHUFFLED, "echo": RowOrder.PLANNED, "grouped": RowOrder.GROUPED}
COLUMNS = {
    "offline_tokens_per_s": "served/s",
    "computed_tokens_per_s": "computed/s",
    "prefix_hit_rate": "hits",
    "ttft_p50_s": "ttft p50",
    "ttft_p99_s": "p99",
    "tpot_p50_s": "tpot p50",
    "slo_attainment": "both met",
    "slo_attainment_tight": "at 3 x",
    "worker_cpu_share": "core",
}


@dataclass(slots=True)
class Session:
    """What a run has so far: the windows, and where they are written."""

    path: Path | None
    windows: list[Record]

    def promise(self) -> Promise | None:
        """The bounds that the online-only window fixed; None before it."""
        alone = next((w for w in self.windows if w["server"] == "online-only"), None)
        if alone is None:
            return None
        return Promise(number(alone, "slo_ttft_bound_s"), number(alone, "slo_tpot_bound_s"))

    def missing(self, num_pairs: int, num_grouped: int) -> list[tuple[str, int]]:
        """(server, seed) of the windows to measure, in order: A B A B, with C for the first."""
        measured = {(window["server"], window["seed"]) for window in self.windows}
        wanted = [
            (server, seed)
            for seed in range(num_pairs)
            for server in ("bs", "echo", "grouped")
            if server != "grouped" or seed < num_grouped
        ]
        return [window for window in wanted if window not in measured]

    def add(self, server: str, window: Record) -> None:
        """Keep a window: print its line, write the file."""
        entry: Record = {"kind": "window", "scenario": SCENARIO, "server": server}
        self.windows.append({**entry, "blocks": NUM_BLOCKS, **window})
        shown = "  ".join(f"{title} {_text(window.get(key))}" for key, title in COLUMNS.items())
        print(f"seed {window['seed']:<5}{server:<12}{shown}", flush=True)
        self.write()

    def write(self) -> None:
        """Write every window and every pair, the dropped ones included."""
        if self.path is not None:
            pairs = [r for other in ("bs", "grouped") for r in _pair_records(self.windows, other)]
            write_records(self.path, [*self.windows, *pairs])


def main() -> int:
    """Run what is missing, print the bars. Exit code 4 and one line when a server is lost."""
    options = _parser().parse_args()
    # Ended by `kill` or `timeout` it must not leave servers behind either.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="batchrun-colocation-"))
    try:
        session = Session(options.json, _earlier(options.json) if options.resume else [])
        asyncio.run(_run(options, session, folder))
    except BatchrunError as error:
        sys.stderr.write(f"cpu_colocation: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("cpu_colocation: interrupted; --resume goes on from the file\n")
        return 130
    shutil.rmtree(folder, ignore_errors=True)
    _report(session.windows)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="measure only what FILE lacks")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--grouped", type=int, default=3, help="seeds that also run grouped rows")
    parser.add_argument("--warm-up-s", type=float, default=15.0)
    parser.add_argument("--window-s", type=float, default=60.0)
    return parser


async def _run(options: argparse.Namespace, session: Session, folder: Path) -> None:
    """`bs` fixes the promise alone, then `echo` and `grouped` start, then the pairs A B A B."""
    missing = session.missing(options.pairs, options.grouped)
    if not missing:
        return
    timing = Timing(options.warm_up_s, options.window_s)
    model = folder / "tiny"
    await asyncio.to_thread(build_tiny_model, model)
    store = open_store(folder / "store.db")
    writer = SetWriter(folder / "sets", store, model / "tokenizer.json", SetShape())
    servers = {"bs": Server(ServerPlan("bs", "bs"), folder, model, NUM_BLOCKS)}
    try:
        await start_all([servers["bs"]])
        if session.promise() is None:
            window = await run_window(servers["bs"], timing, ONLINE_ONLY_SEED, None, None)
            session.add("online-only", {"order": None, **window})
        promise = session.promise()
        assert promise is not None
        for plan in _later_plans(promise, {server for server, _ in missing}):
            servers[plan.name] = Server(plan, folder, model, NUM_BLOCKS)
        await start_all([server for name, server in servers.items() if name != "bs"])
        for name, seed in missing:
            server, order = servers[name], ORDERS[name]
            nonce = server.nonce if order is RowOrder.PLANNED else None
            rows = RowStream(writer, seed, order, MODEL, nonce)
            window = await run_window(server, timing, seed, promise, rows)
            session.add(name, {"order": str(order), **window})
    finally:
        await asyncio.gather(*(server.stop() for server in servers.values()))


def _later_plans(promise: Promise, names: set[str]) -> Iterator[ServerPlan]:
    """The servers that start once the promise is known."""
    slo = {"ttft_s": promise.ttft_s, "tpot_s": promise.tpot_s}
    plans = (ServerPlan("echo", "echo", slo=slo), ServerPlan("grouped", "bs", GROUPED_BUDGET))
    return (plan for plan in plans if plan.name in names)


def _earlier(path: Path | None) -> list[Record]:
    if path is None:
        raise ConfigError("--resume needs --json FILE, the file to go on from")
    try:
        records = json.loads(path.read_text())["records"] if path.exists() else []
        return [record for record in records if record["kind"] == "window"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is not a file of this benchmark ({error!r})") from error


def _pair_records(windows: Sequence[Window], other: str) -> list[Record]:
    return pair_records(pairs_of(windows, other), other)


def _report(windows: Sequence[Window]) -> None:
    for other in ("bs", "grouped"):
        for pair in pairs_of(windows, other):
            note = "" if pair.is_kept else "  dropped: a worker got too little of its core"
            print(
                f"seed {pair.seed}: echo / {other} {pair.ratio:.2f}, "
                f"per second of worker CPU {pair.ratio_per_cpu_s:.2f}{note}"
            )
    found = bars(windows)
    print("\n".join(map(str, found)) or "no pair counts")


def _text(value: object) -> str:
    if not isinstance(value, int | float):
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}"


if __name__ == "__main__":
    raise SystemExit(main())
