"""Kill everything, break everything, and count: nothing lost, nothing doubled, nothing stuck.

    python -m benchmarks.crash [--seed N] [--kills N] [--lanes N] [--only PART ...] [--json FILE]

Real daemons, gateways, engines and commands are killed at random instants and inside commits and
renames (`kills`), a real vLLM too (`vllm`), and every fault of `docs/faults.md` is made once
(`faults`, or one by its name). After each, every promise of `docs/reliability.md` is checked.
Exits 1 when one was broken, and then keeps the folder.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.crash_engine_faults import ENGINE_FAULTS
from benchmarks.crash_job_faults import JOB_FAULTS
from benchmarks.crash_kills import KillEpisode
from benchmarks.crash_plan import KillRun, plan_targets
from benchmarks.crash_rig import FAILURES
from benchmarks.crash_store_faults import STORE_FAULTS
from benchmarks.crash_trial import Fault, SkippedFaultError
from benchmarks.crash_vllm import TARGETS, VllmEpisode
from benchmarks.records import Bar, write_records

FAULTS = (*STORE_FAULTS, *ENGINE_FAULTS, *JOB_FAULTS)
PARTS = ("kills", "vllm", "faults")
KILLS_PER_DEPLOYMENT = 30
MIN_VLLM_KILLS = 5
MIN_FOR_SHARES = 40
"""Of fewer kills than this, the shares say nothing."""

Record = dict[str, object]


@dataclass(frozen=True, slots=True)
class Task:
    """Something that is done in a folder of its own; returns its records."""

    name: str
    run: Callable[[Path], list[Record]]


def main() -> int:
    """Run what was asked for, print and save. Exits 1 when a promise was broken or a bar missed."""
    options = _parser().parse_args()
    folder = Path(tempfile.mkdtemp(prefix="crash-", dir=options.folder))
    tasks = list(_tasks(options.only or PARTS, options.kills, options.seed))
    began_s = time.monotonic()
    with ThreadPoolExecutor(options.lanes) as pool:
        done = pool.map(lambda pair: _run(pair[1], folder / f"{pair[0]:02}"), enumerate(tasks))
        records = [record for found in done for record in found]
    if options.json is not None:
        write_records(options.json, records)
    is_met = True
    for bar in bars(records):
        is_met &= bar.is_met
        print(f"- {bar}")
    print(f"{time.monotonic() - began_s:,.0f} s")
    if is_met:
        shutil.rmtree(folder)
        return 0
    print(f"seed {options.seed}; kept for study: {folder}")
    return 1


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """What the kills and the faults must keep."""
    kills = [record for record in records if record["kind"] == "kill"]
    deployments = [record for record in records if record["kind"] == "deployment"]
    faults = [record for record in records if record["kind"] == "fault"]
    if kills:
        yield Bar("kills", len(kills))
        is_enough = sum(not kill["is_vllm"] for kill in kills) >= MIN_FOR_SHARES
        flight = sum(int(str(kill["num_in_flight"])) > 0 for kill in kills) / len(kills)
        yield Bar("share of kills with rows in flight", flight, 0.8 if is_enough else None)
        inside = sum(bool(kill["is_inside"]) for kill in kills) / len(kills)
        bound = 0.3 if is_enough else None
        yield Bar("share of kills inside a commit or a rename", inside, bound)
        yield from _deployment_bars(deployments)
    if any(kill["is_vllm"] for kill in kills):
        real = sum(bool(kill["is_vllm"]) and kill["target"] != "daemon" for kill in kills)
        yield Bar("kills of a real vLLM", real, MIN_VLLM_KILLS)
    if faults:
        skipped = sum(record["outcome"] == "skipped" for record in faults)
        yield Bar("faults made", len(faults) - skipped)
        yield Bar("faults skipped", skipped)
        broken = sum(record["outcome"] == "broken" for record in faults)
        yield Bar("faults with a broken promise", broken, 0, is_most=True)


def _deployment_bars(deployments: Sequence[Record]) -> Iterator[Bar]:
    def total(name: str) -> int:
        return sum(int(str(record[name])) for record in deployments)

    yield Bar("rows", total("num_rows"))
    again = total("num_executions") - total("num_rows")
    yield Bar("executions beyond one a row", again, total("num_explained"), is_most=True)
    yield Bar("broken promises", total("num_problems"), 0, is_most=True)


def _tasks(only: Sequence[str], num_kills: int, seed: int) -> Iterator[Task]:
    if "vllm" in only:
        yield Task("vllm", lambda folder: _records(VllmEpisode(folder).run(), "vllm"))
        num_kills -= len(TARGETS)
    for fault in FAULTS:
        if "faults" in only or fault.name in only:
            yield _fault_task(fault)
    if "kills" in only:
        num_deployments = max(1, round(num_kills / KILLS_PER_DEPLOYMENT))
        for index in range(num_deployments):
            share = num_kills // num_deployments + (index < num_kills % num_deployments)
            yield _kill_task(index, share, seed)


def _kill_task(index: int, num_kills: int, seed: int) -> Task:
    name = f"deployment {index}"

    def run(folder: Path) -> list[Record]:
        rng = random.Random(f"{seed}/{index}")
        return _records(KillEpisode(folder, rng).run(plan_targets(rng, num_kills)), name)

    return Task(name, run)


def _fault_task(fault: Fault) -> Task:
    def run(folder: Path) -> list[Record]:
        began_s = time.monotonic()
        outcome, detail = "as promised", ""
        try:
            fault.run(folder)
        except SkippedFaultError as error:
            outcome, detail = "skipped", str(error)
        except FAILURES as error:
            outcome, detail = "broken", f"{type(error).__name__}: {error}"
        took_s = round(time.monotonic() - began_s, 1)
        names: Record = {"kind": "fault", "fault": fault.name, "made": fault.made}
        return [names | {"outcome": outcome, "detail": detail, "took_s": took_s}]

    return Task(fault.name, run)


def _records(run: KillRun, name: str) -> list[Record]:
    """A record for each kill, and one for the deployment that lived through them."""
    kills: list[Record] = [
        {
            "kind": "kill",
            "deployment": name,
            "is_vllm": name == "vllm",
            "target": kill.target,
            "place": kill.place or "random",
            "is_inside": kill.is_inside,
            "num_in_flight": reach.num_in_flight,
            "num_uncommitted": reach.num_uncommitted,
            "down_s": round(kill.ended_at - kill.at, 3),
        }
        for kill, reach in zip(run.kills, run.reaches, strict=True)
    ]
    pairs = zip(run.kills, run.reaches, strict=True)
    explained = sum(reach.num_uncommitted for kill, reach in pairs if kill.cuts)
    deployment: Record = {
        "kind": "deployment",
        "deployment": name,
        "num_kills": len(kills),
        "num_jobs": run.num_jobs,
        "num_rows": run.num_rows,
        "num_executions": run.num_executions,
        "num_explained": explained,
        "num_status_looks": run.num_looks,
        "num_problems": len(run.problems),
        "problems": "; ".join(run.problems[:5]),
    }
    return [*kills, deployment]


def _run(task: Task, folder: Path) -> list[Record]:
    records = task.run(folder)
    last = records[-1]
    detail = last.get("problems") or last.get("detail")
    outcome = last.get("outcome", f"{last.get('num_kills')} kills, {last.get('num_rows')} rows")
    print(f"{task.name}: {outcome}{f': {detail}' if detail else ''}", flush=True)
    return records


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--lanes", type=int, default=2, help="deployments at once")
    names = [*PARTS, *(fault.name for fault in FAULTS)]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART")
    parser.add_argument("--folder", type=Path, help="where to work; a disk, not memory")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
