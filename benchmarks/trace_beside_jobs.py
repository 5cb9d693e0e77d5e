"""A recorded trace's calls beside three jobs without `max_tokens`, on one real CPU engine.

    python -m benchmarks.trace_beside_jobs [--minutes 120] [--data FOLDER] [--json FILE]

Everything goes through the `batchrun` command and the gateway, as a user would. Calls arrive as in
Azure's hour of conversations, slowed until one CPU engine with the tiny model serves them alone,
with real prompts. First they come alone: the bounds are fixed multiples of the medians of that
window. Then they come for `--minutes` beside rounds of three jobs of real texts: documents with
questions, short rows, and rows behind one system prompt. As a round of a kind ends, its output is
joined with its input by id, its hit rate is held against what `inspect` said before it was
submitted, and the next one begins. The folder is temporary, and files of a round go when it ends.
Nothing else may run on the machine: the record has the cores that each process and others took.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from batchrun.errors import EngineError
from batchrun.simulator.replay import OnlineResult, ReplayTarget, percentile, replay
from benchmarks.cpu_meter import CpuMeter
from benchmarks.deployment import Deployment, brought_down, scratch
from benchmarks.forecast import DATA
from benchmarks.records import Bar, Record, finish, parser, shown
from benchmarks.replay import callers_first, summarize
from benchmarks.text_jobs import MODEL
from benchmarks.trace_beside_jobs_rows import JOBS, RealTexts, Round

CALLS_PER_S = 1.0
TIMES_ALONE = 12.0
"""The bounds are so many times the medians of calls alone."""
LEAST_ALONE_S, MOST_ALONE_S = 45.0, 300.0
WARM_UP_S = 20.0
"""Calls of so long after the first of the jobs are made and not judged, as in `cpu_colocation`: the
scheduler of a deployment without a calibration learns what steps take."""
MINUTES_A_SIZE, MOST_SIZE = 6.0, 8
"""Rounds are larger in longer runs: a job of a user is no matter of seconds."""
KV_BLOCKS, BLOCK_TOKENS, KV_BYTES_PER_TOKEN = 400, 128, 1_024
ENGINE_ARGUMENTS = (
    f"--kv-cache-memory-bytes={KV_BLOCKS * BLOCK_TOKENS * KV_BYTES_PER_TOKEN}",
    f"--block-size={BLOCK_TOKENS}",
    "--max-model-len=8192",
)
CALL_LIMIT_S = 60.0
POLL_S = 2.0
LAST_ROUNDS_S = 1_800.0
"""Rounds that run when the calls are over may take so long; a job that has not ended has failed."""
MOST_FOLDER_BYTES = 2 * 2**30
ENDED = ("completed", "failed", "cancelled")
LEAST_ATTAINMENT, MOST_HIT_ERROR = 0.97, 0.03


@dataclass(slots=True)
class Rounds:
    """Runs rounds of each kind, one after the other, until the calls are over.

    `records` has one for each round that ended.
    """

    deployment: Deployment
    texts: RealTexts
    size: int
    records: list[Record] = field(default_factory=list)
    over: Event = field(default_factory=Event)
    _is_stopped: Event = field(default_factory=Event)

    def stop(self) -> None:
        """Wait for no job any more."""
        self.over.set()
        self._is_stopped.set()

    def run(self, kind: str) -> None:
        """All rounds of a kind. Raises BatchrunError."""
        number = 0
        while not self.over.is_set():
            each = Round(
                self.deployment.folder.absolute(), kind, number, JOBS[kind].num_rows * self.size
            )
            each.write(self.texts)
            self.records.append(self._run(each))
            print(" ", *(f"{key} {value}" for key, value in self.records[-1].items()), flush=True)
            each.remove()
            number += 1

    def _run(self, each: Round) -> Record:
        forecast = self.deployment.batchrun("inspect", each.job_file.name)
        began_s = time.monotonic()
        job_id = str(self.deployment.batchrun("submit", each.job_file.name)["id"])
        view, longest_s = self._wait(job_id)
        if view["state"] != "completed":
            raise EngineError(f"{each.name}: the job is {view['state']}")
        prompt_tokens = max(1, view["num_prompt_tokens"])
        return {
            "kind": each.kind,
            "round": each.number,
            "rows": view["num_rows"],
            "job_s": time.monotonic() - began_s,
            "ended_beside_calls": not self.over.is_set(),
            "prompt_tokens": view["num_prompt_tokens"],
            "cached_tokens": view["num_cached_tokens"],
            "output_tokens": view["num_output_tokens"],
            "hit_rate": view["num_cached_tokens"] / prompt_tokens,
            "expected_hit_rate": forecast["expected_hit_rate"],
            "longest_wait_for_a_row_s": longest_s,
            **each.account(),
        }

    def _wait(self, job_id: str) -> tuple[dict[str, Any], float]:
        """The ended job, and the longest time in which none of its rows came back."""
        num_done, at_s = 0, time.monotonic()
        longest_s = over_s = 0.0
        while True:
            view = self.deployment.job(job_id)
            now_s = time.monotonic()
            longest_s = max(longest_s, now_s - at_s)
            if (done := view["num_completed"] + view["num_failed"]) > num_done:
                num_done, at_s = done, now_s
            if view["state"] in ENDED:
                return view, longest_s
            over_s = over_s + POLL_S if self.over.is_set() else 0.0
            if over_s > LAST_ROUNDS_S:
                raise EngineError(f"job {job_id} has not ended {LAST_ROUNDS_S:g} s after the calls")
            if folder_bytes(self.deployment.folder) > MOST_FOLDER_BYTES:
                raise EngineError(f"{self.deployment.folder} has more than {MOST_FOLDER_BYTES:,} B")
            if self._is_stopped.wait(POLL_S):
                raise EngineError("stopped")


def folder_bytes(folder: Path) -> int:
    """What all files below it have."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def main() -> int:
    """Measure, print, save; exit code 1 when a bar is missed, 4 when an engine or a job is lost."""
    options = parser(__doc__, minutes=120.0, data=DATA).parse_args()
    texts = RealTexts(options.data)
    with scratch("trace_beside_jobs") as folder, brought_down(Deployment(folder)) as deployment:
        records = shown(measure(deployment, texts, 60 * options.minutes))
    return finish(options.json, records, bars(records[-1]))


def measure(deployment: Deployment, texts: RealTexts, seconds: float) -> Iterator[Record]:
    """A record of the calls alone, one for each round, and one of the whole."""
    deployment.configure(_engine(deployment), model=MODEL)
    deployment.batchrun("models", MODEL, f"home/models/{MODEL}")
    alone_s = min(MOST_ALONE_S, max(LEAST_ALONE_S, seconds / 10))
    with deployment.running() as gateway:
        calls = texts.calls(CALLS_PER_S, 0.0, alone_s)
        with callers_first() as is_first:
            alone = asyncio.run(replay(calls, _target(gateway)))
    bounds = bounds_of(alone)
    yield {
        "part": "calls alone",
        "seconds": alone_s,
        "callers_first": is_first,
        **summarize(alone, **bounds),
    }
    slo = {name.removeprefix("slo_"): bound for name, bound in bounds.items()}
    deployment.configure(_engine(deployment), model=MODEL, slo=slo)
    with deployment.running() as gateway:
        meter = CpuMeter()
        size = max(1, min(MOST_SIZE, round(seconds / 60 / MINUTES_A_SIZE)))
        rounds = Rounds(deployment, texts, size)
        with callers_first() as is_first:
            results = asyncio.run(_together(rounds, texts, gateway, alone_s, seconds))
        cores = {f"cpu_{name}": share for name, share in meter.cores().items()}
        used_bytes = folder_bytes(deployment.folder)
    yield from ({"part": "round", **each} for each in rounds.records)
    whole = {"part": "calls beside jobs", "seconds": seconds, "callers_first": is_first}
    sums = {"folder_bytes": used_bytes, **_of_jobs(rounds.records), **cores}
    yield {**whole, **summarize(results, **bounds), **sums}


def _engine(deployment: Deployment) -> dict[str, object]:
    return {"port": deployment.engine_port, "vllm_args": list(ENGINE_ARGUMENTS)}


def _target(gateway: str) -> ReplayTarget:
    extra_body = {"ignore_eos": True}
    return ReplayTarget(f"{gateway}/v1", MODEL, timeout_s=CALL_LIMIT_S, extra_body=extra_body)


def bounds_of(alone: Sequence[OnlineResult]) -> dict[str, float]:
    """`TIMES_ALONE` the median TTFT and TPOT of calls alone. Raises EngineError without any."""
    ttft_s = percentile([call.ttft_s for call in alone if call.ttft_s is not None], 0.5)
    tpot_s = percentile([call.tpot_s for call in alone if call.tpot_s is not None], 0.5)
    if ttft_s is None or tpot_s is None:
        raise EngineError("no call was answered alone")
    return {"slo_ttft_s": TIMES_ALONE * ttft_s, "slo_tpot_s": TIMES_ALONE * tpot_s}


async def _together(
    rounds: Rounds, texts: RealTexts, gateway: str, from_s: float, seconds: float
) -> list[OnlineResult]:
    """The calls that are judged, and rounds of all kinds beside them. Raises BatchrunError."""
    calls = texts.calls(CALLS_PER_S, from_s, WARM_UP_S + seconds)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(len(JOBS)) as threads:
        running = [loop.run_in_executor(threads, rounds.run, kind) for kind in JOBS]
        calling = asyncio.create_task(replay(calls, _target(gateway)))
        calling.add_done_callback(lambda _: rounds.over.set())
        try:
            await asyncio.gather(calling, *running)
        except BaseException:
            rounds.stop()
            calling.cancel()
            raise
    return [result for result in calling.result() if result.arrived_at_s >= WARM_UP_S]


def _of_jobs(rounds: Sequence[Record]) -> Record:
    """Of all rounds together; the hit rate is held against the forecast for each kind."""
    found: dict[str, Any] = {
        key: sum(each[key] for each in rounds)
        for key in ("rows", "rows_missing", "rows_repeated", "rows_unknown", "rows_failed")
    }
    found["rows_longest_wait_s"] = max(each["longest_wait_for_a_row_s"] for each in rounds)
    for kind in JOBS:
        of = [each for each in rounds if each["kind"] == kind]
        tokens = sum(each["prompt_tokens"] for each in of)
        expected = sum(each["expected_hit_rate"] * each["prompt_tokens"] for each in of)
        found[f"{kind}_hit_rate"] = sum(each["cached_tokens"] for each in of) / tokens
        found[f"{kind}_expected_hit_rate"] = expected / tokens
        rows = sum(each["rows"] for each in of)
        found[f"{kind}_rows_per_s"] = rows / sum(each["job_s"] for each in of)
        found[f"{kind}_output_tokens_a_row"] = sum(each["output_tokens"] for each in of) / rows
    return found


def bars(whole: Record) -> Iterator[Bar]:
    """What must hold."""
    yield Bar("calls that kept both bounds", whole["slo_attainment"], LEAST_ATTAINMENT)
    wrong = sum(whole[key] for key in ("rows_missing", "rows_repeated", "rows_unknown"))
    yield Bar("rows too few or too many in the outputs", wrong, 0, is_most=True)
    yield Bar("rows with an error", whole["rows_failed"], 0, is_most=True)
    for kind in JOBS:
        error = abs(whole[f"{kind}_hit_rate"] - whole[f"{kind}_expected_hit_rate"])
        yield Bar(f"{kind}: hit rate off inspect's", error, MOST_HIT_ERROR, is_most=True)


if __name__ == "__main__":
    raise SystemExit(main())
