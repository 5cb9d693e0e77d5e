"""Two classes of calls in bursts on real CPU engines: the order `on-time` against stock vLLM.

    python -m benchmarks.cpu_online_queue [--pairs N] [--by-priority N] [--json FILE]

Two engines with the tiny model, driven one at a time with the same calls, each with its worker on
one core of its own:

- `vllm`: vLLM's own server and scheduler, called without anything between. It knows calls, not
  their classes, and serves them as they come.
- `on-time`: a deployment of batchrun, called at its gateway. Each call names its class in
  `x-batchrun-class`, so the scheduler knows the bounds of the class. No offline work.
- `vllm-priority`, in the first windows only: the engine of `vllm`, told that interactive calls go
  first, by `priority` in each call.

All know of each call how many tokens it may generate, which is what it does. Bounds and capacity
are measured in the same run from `vllm` (`benchmarks.cpu_online_queue_calls`): calls of each class
alone, then many of both at once. In a window calls come 1.3 times as fast as that for 8 s, a fifth
as fast for 5 s, and both again; nothing is begun before all calls have ended. Within a pair both
get the same calls; who is first changes. Seven and a half minutes on two cores with nothing beside.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from batchrun.daemon.plugin import NUM_RENDERERS
from batchrun.engine.command import ManagedSettings
from batchrun.engine.engine import ManagedEngine
from batchrun.engine.tiny_model import build_tiny_model
from benchmarks.cpu_colocation import SCENARIO
from benchmarks.cpu_colocation_servers import (
    WORKER_CORE,
    leave_worker_alone,
    move_off_worker_core,
    off_worker_core,
)
from benchmarks.cpu_meter import KINDS
from benchmarks.cpu_online_queue_calls import (
    Address,
    Bounds,
    Bursts,
    Results,
    alone_calls,
    bounds_of,
    capacity_per_s,
    judge,
    num_different,
    saturating_calls,
)
from benchmarks.deployment import Deployment, free_port, scratch
from benchmarks.records import Bar, Record, describe, finish, parser
from benchmarks.text_jobs import MODEL

STOCK, RANKED, OURS = "vllm", "vllm-priority", "on-time"
LEAST_RATIO, MOST_WAIT = 1.3, 2.0
MOST_WORKER_WAIT = 0.15
"""A worker that waited for its core for a larger share of the time in which it could have run was
disturbed: its pair does not count."""
PRACTICE_SEED = 1_000
ENGINE_ARGS = ("--kv-cache-memory-bytes=536870912", f"--renderer-num-workers={NUM_RENDERERS}")
ENGINE_ENV = {"VLLM_CPU_OMP_THREADS_BIND": str(WORKER_CORE)}
PRINTED = (
    *("server", "seed", "goodput_per_s", "slo_met", "interactive_slo_attainment"),
    *("documents_slo_attainment", "longest_wait_bounds", "worker_wait_share"),
)


@dataclass(frozen=True, slots=True)
class Side:
    """One that calls are sent to, and the processes of its engine."""

    address: Address
    processes: Sequence[psutil.Process]


def main() -> int:
    """Run, print the bars. Exit code 4 and one line when an engine is lost."""
    made = parser(__doc__, pairs=5, by_priority=2, bursts=2, burst_s=8.0, quiet_s=5.0)
    options = made.parse_args()
    with scratch("cpu_online_queue") as folder:
        records = asyncio.run(_run(options, folder))
    return finish(options.json, records, bars(records))


async def _run(options: Namespace, folder: Path) -> list[Record]:
    """Stock vLLM says what the machine can do, then the pairs."""
    await asyncio.to_thread(build_tiny_model, folder / MODEL)
    bursts = Bursts(options.bursts, options.burst_s, options.quiet_s)
    engine = ManagedEngine(_stock_settings(folder))
    with ExitStack() as exits:
        try:
            await engine.start()
            stock = _stock_sides(engine.settings)
            bounds, capacity = await _measure(stock[STOCK].address)
            records: list[Record] = [_machine(bounds, capacity)]
            print(describe(records[0]), flush=True)
            sides = stock | {OURS: await asyncio.to_thread(_start_ours, folder, bounds, exits)}
            windows = Windows(bursts, bounds, capacity, sides)
            await windows.run(OURS, PRACTICE_SEED)
            for seed in range(options.pairs):
                records += await windows.pair(seed, is_ranked=seed < options.by_priority)
        finally:
            await engine.stop()
    return records


def _stock_settings(folder: Path) -> ManagedSettings:
    return ManagedSettings(
        name=STOCK,
        model=str(folder / MODEL),
        served_model_name=MODEL,
        port=free_port(),
        run_dir=folder / "run",
        log_dir=folder / "log",
        vllm_args=ENGINE_ARGS,
        env=ENGINE_ENV,
    )


def _stock_sides(settings: ManagedSettings) -> dict[str, Side]:
    """One engine: with equal priorities vLLM goes by arrival, as it does without any."""
    processes, url = leave_worker_alone(settings.record_path), f"{settings.base_url}/v1"
    return {
        STOCK: Side(Address(url), processes),
        RANKED: Side(Address(url, tells_priority=True), processes),
    }


def _start_ours(folder: Path, bounds: Bounds, exits: ExitStack) -> Side:
    """A deployment whose classes are those bounds; it ends with `exits`."""
    deployment = Deployment(folder / "deployment")
    promises = {name: slo.model_dump(exclude_none=True) for name, slo in bounds.items()}
    deployment.configure(
        {"port": deployment.engine_port, "vllm_args": ENGINE_ARGS, "env": ENGINE_ENV},
        model=str(folder / MODEL),
        served_model_name=MODEL,
        online_queue=OURS,
        slo=min(promises.values(), key=lambda slo: float(slo["ttft_s"])),
        slo_classes=promises,
    )
    exits.callback(deployment.close)
    deployment.start()
    for part in ("daemon", "gateway"):
        root = psutil.Process(deployment.pid_of(part))
        for each in (root, *root.children(recursive=True)):
            if KINDS["worker"] not in each.name():
                move_off_worker_core(each)
    processes = leave_worker_alone(deployment.home.run / "engine-0.json")
    return Side(Address(f"{deployment.url}/v1", tells_class=True), processes)


async def _measure(stock: Address) -> tuple[Bounds, float]:
    """What each class is promised, and how many calls a second vLLM can serve."""
    with off_worker_core():
        await stock.send(saturating_calls(8), "first")
        alone = await stock.send(alone_calls(), "alone")
        saturated = await stock.send(saturating_calls(), "full")
    return bounds_of(alone, saturated), capacity_per_s(saturated)


def _machine(bounds: Bounds, capacity: float) -> Record:
    return {
        "kind": "machine",
        "scenario": SCENARIO,
        "capacity_per_s": capacity,
        **{
            f"{name}_{key}_bound_s": getattr(slo, f"{key}_s")
            for name, slo in bounds.items()
            for key in ("ttft", "tpot")
        },
    }


@dataclass(frozen=True, slots=True)
class Windows:
    """Sends the calls of a seed to one side after the other."""

    bursts: Bursts
    bounds: Bounds
    capacity_per_s: float
    sides: Mapping[str, Side]

    async def run(self, name: str, seed: int) -> tuple[Record, Results]:
        """One window, until its last call has ended."""
        side = self.sides[name]
        calls = self.bursts.draw(self.capacity_per_s, seed)
        before = _worker_times_s(side.processes)
        with off_worker_core() as is_first:
            results = await side.address.send(calls, f"{name}-{seed}")
        ran_s, waited_s = (
            after - begun
            for after, begun in zip(_worker_times_s(side.processes), before, strict=True)
        )
        record = {
            "kind": "window",
            "scenario": SCENARIO,
            "server": name,
            "seed": seed,
            "callers_first": is_first,
            **judge(results, self.bounds, self.bursts.span_s),
            "worker_wait_share": waited_s / (ran_s + waited_s),
        }
        print(describe({key: record[key] for key in PRINTED}), flush=True)
        return record, results

    async def pair(self, seed: int, *, is_ranked: bool) -> list[Record]:
        """A window of each, and one record of how they compare."""
        names = [*((STOCK, OURS) if seed % 2 == 0 else (OURS, STOCK)), *([RANKED] * is_ranked)]
        found = {name: await self.run(name, seed) for name in names}
        records = {name: record for name, (record, _) in found.items()}
        worst = max(records[name]["worker_wait_share"] for name in (STOCK, OURS))
        pair = {
            "kind": "pair",
            "scenario": SCENARIO,
            "seed": seed,
            "is_kept": worst <= MOST_WORKER_WAIT,
            "goodput_ratio": _ratio(records, OURS, STOCK),
            "different_answers": num_different(found[OURS][1], found[STOCK][1]),
        }
        if is_ranked:
            pair |= {"goodput_ratio_priority": _ratio(records, OURS, RANKED)}
        print(describe(pair), flush=True)
        return [*records.values(), pair]


def _ratio(records: Mapping[str, Record], ours: str, other: str) -> float:
    return float(records[ours]["goodput_per_s"] / max(records[other]["goodput_per_s"], 1e-9))


def _worker_times_s(processes: Sequence[psutil.Process]) -> tuple[float, float]:
    """Seconds for which the worker's threads ran, and for which they could have but waited for
    their core."""
    ran_ns = waited_ns = 0
    for each in processes:
        if KINDS["worker"] not in each.name():
            continue
        for thread in each.threads():
            text = Path(f"/proc/{each.pid}/task/{thread.id}/schedstat").read_text("ascii")
            ran, waited, _ = map(int, text.split())
            ran_ns, waited_ns = ran_ns + ran, waited_ns + waited
    return ran_ns / 1e9, waited_ns / 1e9


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """The figures that must hold: ratios over the pairs that count, the rest over all windows."""
    windows = {
        name: [each for each in records if each.get("server") == name] for name in (STOCK, OURS)
    }
    pairs = [each for each in records if each["kind"] == "pair"]
    kept = [each for each in pairs if each["is_kept"]]
    yield Bar("pairs that count", len(kept))
    if kept:
        ratios = [each["goodput_ratio"] for each in kept]
        yield Bar("goodput of on-time over vLLM's, median", median(ratios), LEAST_RATIO)
        yield Bar("the lowest pair", min(ratios))
    ranked = [each["goodput_ratio_priority"] for each in kept if "goodput_ratio_priority" in each]
    if ranked:
        yield Bar("over vLLM's with priorities by class, median", median(ranked))
    failed = sum(each["failed"] for each in windows[OURS])
    yield Bar("calls that on-time did not end", failed, 0.0, is_most=True)
    different = sum(each["different_answers"] for each in pairs)
    yield Bar("answers with other tokens than vLLM's", different, 0.0, is_most=True)
    ours_s, stock_s = (max(w["longest_wait_s"] for w in windows[name]) for name in (OURS, STOCK))
    yield Bar("longest wait of on-time over vLLM's", ours_s / stock_s, MOST_WAIT, is_most=True)
    longest = max(each["longest_wait_bounds"] for each in windows[OURS])
    yield Bar("longest wait of on-time, in bounds of its class", longest)


if __name__ == "__main__":
    raise SystemExit(main())
