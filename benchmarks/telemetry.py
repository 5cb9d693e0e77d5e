"""What counting and reporting cost a scheduler with 256 running and 512 waiting requests."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from batchrun.simulator.virtual.engine import Arrival, VirtualEngine
from batchrun.simulator.virtual.laws import A100Law
from batchrun.simulator.virtual.setup import EngineShape
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from batchrun.vllm_plugin.telemetry import ONLINE
from batchrun.wire import encode
from benchmarks.records import Record, write_records

NUM_RUNNING, NUM_WAITING = 256, 512
PROMPT_TOKENS = 64


def busy_engine() -> tuple[VirtualEngine, ColocatedScheduler]:
    """An engine whose 256 places are taken by decodes, online and nothing else."""
    engine = VirtualEngine(ColocatedScheduler, EngineShape(), A100Law())
    for i in range(NUM_RUNNING + NUM_WAITING):
        prompt = [5 + (7 * i + j) % 1_900 for j in range(PROMPT_TOKENS)]
        engine.add(Arrival(f"call-{i}", True, 0.0, prompt, 10_000, None))
    scheduler = engine.scheduler
    assert isinstance(scheduler, ColocatedScheduler)
    while len(scheduler.running) < NUM_RUNNING or engine.now_s < 5.0:
        engine.step()
    return engine, scheduler


def measure(rounds: int) -> list[Record]:
    """Median times of one step's counting, of one online token's, and of a whole picture."""
    engine, scheduler = busy_engine()
    meter = scheduler.daemon_link.meter
    output = scheduler.schedule()
    assert len(output.num_scheduled_tokens) == NUM_RUNNING
    view = next(view for view in scheduler.state.views.values() if view.request_class is ONLINE)
    picture = partial(scheduler.daemon_link.telemetry, engine.now_s)
    parts: dict[str, Callable[[], object]] = {
        "step": partial(meter.scheduled, output, scheduler.state.views),
        "orders, none": scheduler.obey,
        "online token": partial(meter.token, view, engine.now_s),
        "picture": picture,
        "encoding": partial(encode, picture()),
    }
    return [
        {
            "part": name,
            "running": NUM_RUNNING,
            "waiting": NUM_WAITING,
            "us": _median_us(call, rounds),
        }
        for name, call in parts.items()
    ]


def _median_us(call: Callable[[], object], rounds: int) -> float:
    spent_s = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        call()
        spent_s.append(time.perf_counter() - start_s)
    return statistics.median(spent_s) * 1e6


def main() -> None:
    """Print the table; write the records where `--json` says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    records = measure(arguments.rounds)
    for record in records:
        print(json.dumps(record))
    if arguments.json:
        write_records(arguments.json, records)


if __name__ == "__main__":
    main()
