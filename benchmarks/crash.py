"""Kill everything and count: nothing lost, nothing doubled, nothing stuck.

    python -m benchmarks.crash [--seed N] [--kills N] [--lanes N] [--only PART ...] [--json FILE]

Real daemons, gateways, engines and commands are killed at random instants and inside commits and
renames (`kills`), a real vLLM too (`vllm`). After each, every promise of `docs/reliability.md` is
checked. Exits 1 when one was broken, and then keeps the folder. The faults of `docs/faults.md` are
tests: `tests/integration/test_crash.py`.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.crash_kills import KillEpisode, KillRun, VllmEpisode, plan_targets
from benchmarks.records import Bar, finish, parser

PARTS = ("kills", "vllm")
VLLM_TARGETS = ("engine", "daemon", "engine", "all", "engine", "engine")
KILLS_PER_DEPLOYMENT = 30
MIN_VLLM_KILLS = 5
MIN_FOR_SHARES = 40
"""Of fewer kills than this, the shares say nothing."""

Record = dict[str, object]


def main() -> int:
    """Run what was asked for, print and save. Exits 1 when a promise was broken or a bar missed."""
    made = parser(__doc__)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--kills", type=int, default=300)
    made.add_argument("--lanes", type=int, default=2, help="deployments at once")
    made.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    made.add_argument("--folder", type=Path, help="where to work; a disk, not memory")
    options = made.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="crash-", dir=options.folder))
    began_s = time.monotonic()
    plans = list(_plans(options.only, options.kills, options.seed))
    with ThreadPoolExecutor(options.lanes) as pool:
        done = pool.map(lambda plan: _run(folder, *plan), plans)
        records = [record for found in done for record in found]
    code = finish(options.json, records, bars(records))
    print(f"{time.monotonic() - began_s:,.0f} s")
    if code:
        print(f"seed {options.seed}; kept for study: {folder}")
    else:
        shutil.rmtree(folder)
    return code


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """What the kills must keep."""
    kills = [record for record in records if record["kind"] == "kill"]
    if not kills:
        return
    yield Bar("kills", len(kills))
    is_enough = sum(not kill["is_vllm"] for kill in kills) >= MIN_FOR_SHARES
    flight = sum(int(str(kill["num_in_flight"])) > 0 for kill in kills) / len(kills)
    yield Bar("share of kills with rows in flight", flight, 0.8 if is_enough else None)
    inside = sum(bool(kill["is_inside"]) for kill in kills) / len(kills)
    yield Bar("share of kills inside a commit or a rename", inside, 0.3 if is_enough else None)
    totals = {
        name: sum(int(str(r[name])) for r in records if r["kind"] == "deployment")
        for name in ("num_rows", "num_executions", "num_explained", "num_problems")
    }
    yield Bar("rows", totals["num_rows"])
    again = totals["num_executions"] - totals["num_rows"]
    yield Bar("executions beyond one a row", again, totals["num_explained"], is_most=True)
    yield Bar("broken promises", totals["num_problems"], 0, is_most=True)
    if any(kill["is_vllm"] for kill in kills):
        real = sum(bool(kill["is_vllm"]) and kill["target"] != "daemon" for kill in kills)
        yield Bar("kills of a real vLLM", real, MIN_VLLM_KILLS)


def _plans(only: Sequence[str], num_kills: int, seed: int) -> Iterator[tuple[int, int, int | None]]:
    """(number, kills, seed) of each deployment; no seed: of the real engine."""
    if "vllm" in only:
        yield 0, len(VLLM_TARGETS), None
        num_kills -= len(VLLM_TARGETS)
    if "kills" in only:
        num_deployments = max(1, round(num_kills / KILLS_PER_DEPLOYMENT))
        for index in range(num_deployments):
            share = num_kills // num_deployments + (index < num_kills % num_deployments)
            yield index + 1, share, seed


def _run(folder: Path, number: int, num_kills: int, seed: int | None) -> list[Record]:
    place = folder / f"{number:02}"
    if seed is None:
        name, run = "vllm", VllmEpisode(place).run(VLLM_TARGETS)
    else:
        name, rng = f"deployment {number - 1}", random.Random(f"{seed}/{number - 1}")
        run = KillEpisode(place, rng).run(plan_targets(rng, num_kills))
    print(f"{name}: {len(run.kills)} kills, {run.num_rows} rows", *run.problems[:5], flush=True)
    return _records(run, name)


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
    deployment: Record = {
        "kind": "deployment",
        "deployment": name,
        "num_kills": len(kills),
        "num_jobs": run.num_jobs,
        "num_rows": run.num_rows,
        "num_executions": run.num_executions,
        "num_explained": sum(reach.num_uncommitted for kill, reach in pairs if kill.cuts),
        "num_status_looks": run.num_looks,
        "num_problems": len(run.problems),
        "problems": "; ".join(run.problems[:5]),
    }
    return [*kills, deployment]


if __name__ == "__main__":
    sys.exit(main())
