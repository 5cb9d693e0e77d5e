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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from batchrun.engine.tiny_model import build_tiny_model
from batchrun.errors import BatchrunError, ConfigError
from batchrun.store.database import open_store
from benchmarks.cpu_colocation_job import RowOrder, RowStream, SetShape, SetWriter
from benchmarks.cpu_colocation_servers import MODEL, Server, ServerPlan, start_all
from benchmarks.cpu_colocation_window import Record, Timing, run_window
from benchmarks.records import Bar, cell, parser, read_records, write_records
from benchmarks.replay import Promise

Window = Mapping[str, object]

LEAST_WORKER_SHARE = 0.85
"""A worker that got less of its core was disturbed: its pair does not count."""
BROKEN_ATTAINMENT = 0.4
"""Hand-grouped vLLM is held against where it keeps its promises to fewer calls than this."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two windows of one seed: `echo` and what it is held against."""

    seed: int
    echo: Window
    other: Window

    @property
    def is_kept(self) -> bool:
        """Whether both workers got their core; decided by that alone."""
        shares = (number(w, "worker_cpu_share") for w in (self.echo, self.other))
        return all(share >= LEAST_WORKER_SHARE for share in shares)

    @property
    def ratio(self) -> float:
        """Offline tokens/s of `echo` by the other's."""
        return _by(number(self.echo, SERVED), number(self.other, SERVED))

    @property
    def ratio_per_cpu_s(self) -> float:
        """The same for each second of worker CPU."""
        return _by(_served_per_cpu_s(self.echo), _served_per_cpu_s(self.other))


SERVED = "offline_tokens_per_s"


def pairs_of(windows: Sequence[Window], other: str) -> list[Pair]:
    """`echo` beside each window of server `other` (`bs` or `grouped`) with the same seed."""
    by_key = {(window["server"], window["seed"]): window for window in windows}
    pairs = []
    for (server, seed), window in by_key.items():
        if server == other and ("echo", seed) in by_key:
            assert isinstance(seed, int)
            pairs.append(Pair(seed, by_key["echo", seed], window))
    return sorted(pairs, key=lambda pair: pair.seed)


def pair_records(pairs: Sequence[Pair], other: str) -> list[dict[str, object]]:
    """One flat record a pair, the dropped ones included."""
    return [
        {
            "kind": "pair",
            "against": other,
            "seed": pair.seed,
            "is_kept": pair.is_kept,
            "ratio": pair.ratio,
            "ratio_per_cpu_s": pair.ratio_per_cpu_s,
        }
        for pair in pairs
    ]


def bars(windows: Sequence[Window]) -> list[Bar]:
    """The figures that must hold, over the pairs that count; none when none does."""
    kept = [pair for pair in pairs_of(windows, "bs") if pair.is_kept]
    if not kept:
        return []
    echo = [pair.echo for pair in kept]
    found = [
        Bar("pairs that count", len(kept)),
        Bar("echo / bs, median", median(pair.ratio for pair in kept), 2.0),
        Bar("the same per second of worker CPU", median(p.ratio_per_cpu_s for p in kept), 2.5),
        Bar("the lowest pair", min(pair.ratio for pair in kept), 1.5),
        Bar("attainment of echo", median(number(w, "slo_attainment") for w in echo), 0.95),
        Bar("hit rate of echo", median(number(w, "prefix_hit_rate") for w in echo), 0.80),
    ]
    return found + list(_grouped_bars(windows))


def _grouped_bars(windows: Sequence[Window]) -> list[Bar]:
    kept = [pair for pair in pairs_of(windows, "grouped") if pair.is_kept]
    if not kept:
        return []
    attainment = median(number(pair.other, "slo_attainment") for pair in kept)
    bound = 0.75 if attainment < BROKEN_ATTAINMENT else None
    return [
        Bar("attainment of bs on grouped rows", attainment),
        Bar("echo / bs on grouped rows", median(pair.ratio for pair in kept), bound),
    ]


def number(window: Window, key: str) -> float:
    """A figure of a window; 0 where it has none."""
    value = window.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _served_per_cpu_s(window: Window) -> float:
    return _by(number(window, SERVED), number(window, "worker_cpu_share"))


def _by(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


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
        shown = "  ".join(f"{title} {cell(window.get(key))}" for key, title in COLUMNS.items())
        print(f"seed {window['seed']:<5}{server:<12}{shown}", flush=True)
        self.write()

    def write(self) -> None:
        """Write every window and every pair, the dropped ones included."""
        if self.path is not None:
            pairs = [r for other in ("bs", "grouped") for r in _pair_records(self.windows, other)]
            write_records(self.path, [*self.windows, *pairs])


def main() -> int:
    """Run what is missing, print the bars. Exit code 4 and one line when a server is lost."""
    made = parser(__doc__)
    made.add_argument("--resume", action="store_true", help="measure only what FILE lacks")
    made.add_argument("--pairs", type=int, default=5)
    made.add_argument("--grouped", type=int, default=3, help="seeds that also run grouped rows")
    made.add_argument("--warm-up-s", type=float, default=15.0)
    made.add_argument("--window-s", type=float, default=60.0)
    options = made.parse_args()
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
        records = read_records(path) if path.exists() else []
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


if __name__ == "__main__":
    raise SystemExit(main())
