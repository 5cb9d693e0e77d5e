"""The main job, shown: the same chat calls alone, beside rows on vLLM, and beside them on batchrun.

    python -m benchmarks.demo [--json FILE] [--rows N]

The calls alone say what this machine can promise (`bounds_of`), and how many rows last as long as
they do (`rows_for`). Everything goes through the `batchrun` command and the OpenAI endpoint, as a
user would; state, output and the picture stay in the folder `demo/`. What vLLM gets is its best
public form: `--scheduling-policy priority`, and the same rows with a later priority, sent by the
same daemon in the same order.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from batchrun.config import STOCK_POLICY, SloConfig
from batchrun.errors import BatchrunError, EngineError
from batchrun.simulator.plots import OFFLINE, ONLINE, STYLE, round_ticks
from batchrun.simulator.replay import (
    CallArrival,
    OnlineResult,
    ReplayTarget,
    TokenRange,
    percentile,
    replay,
)
from batchrun.types import JobState
from benchmarks.deployment import Deployment, wait_until
from benchmarks.records import Bar, finish, parser
from benchmarks.replay import TraceShape, generate_trace, summarize

START_S = time.monotonic()

FOLDER = Path("demo")
PICTURE = FOLDER / "demo.svg"
JOB_FILE = Path("jobs/loogle.yaml")
MODEL_FOLDER = "models/tiny"
LEAST_CALLS = 30
PATIENCE = 12.0
"""A call is in time that takes at most so many times what calls alone take at the median."""
ROWS_PER_CALL_TOKEN = 0.5
"""Rows for a second that an engine takes for a token of a call alone, divided by that time: twice
as many as end in the window on 1 to 2 cores."""
ROWS_OF_A_DOCUMENT = 8
FEWEST_ROWS, MOST_ROWS = 48, 480
WARM_UP_S = 8.0
"""The second engine has the calls so long alone before rows come; what they take there is not
looked at."""
POLL_S = 0.5
END_WAIT_S = 1_200.0
MANY_CORES = 0.3
"""Figures move where other programs take more."""
TRACE = TraceShape(
    duration_s=20.0,
    rate_per_s=1.6,
    burst_factor=4.0,
    burst_period_s=10.0,
    burst_length_s=2.0,
    prompt=TokenRange(mu=4.0, sigma=0.8, min_tokens=8, max_tokens=300),
    output=TokenRange(mu=2.8, sigma=0.5, min_tokens=4, max_tokens=40),
)
FIRST_CALLS = [CallArrival(0.5 * i, f"Warm up, please: {i}", 8) for i in range(4)]
COLORS = {"alone": "#8c8c8c", "vLLM's priorities": ONLINE, "batchrun": OFFLINE}
ALONE, VLLM, BATCHRUN = COLORS


@dataclass(frozen=True, slots=True)
class Window:
    """The calls of the trace, how many rows were done at which second beside them, and the cores
    that programs of others took meanwhile."""

    calls: Sequence[OnlineResult]
    rows_done: Sequence[tuple[float, int]] = ()
    others_cores: float = 0.0

    @property
    def rows_per_s(self) -> float:
        """Rows that ended in the window, by its length; by the job's where that was shorter."""
        if not self.rows_done:
            return 0.0
        (first_s, first), (last_s, last) = self.rows_done[0], self.rows_done[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


@dataclass(frozen=True, slots=True)
class Side:
    """The calls alone on this machine, and beside rows on one engine."""

    name: str
    alone: Window
    beside: Window

    def kept_share(self, slo: SloConfig) -> float:
        """Of the calls that were in time alone, those that were so beside rows; calls that came
        when the rows had ended do not count."""
        until_s = self.beside.rows_done[-1][0] if self.beside.rows_done else math.inf
        pairs = zip(self.alone.calls, self.beside.calls, strict=True)
        wanted = [b for a, b in pairs if a.arrived_at_s < until_s and lateness(a, slo) <= 1]
        return sum(lateness(call, slo) <= 1 for call in wanted) / len(wanted) if wanted else 0.0


def say(text: str) -> None:
    """A line on how far the demo is, with the seconds since its start."""
    print(f"{time.monotonic() - START_S:4.0f} s  {text}", flush=True)


def main() -> int:
    """Run the demo; 0 when every row is in the output and enough calls were answered."""
    options = parser(__doc__, rows=0).parse_args()
    deployment = Deployment(FOLDER)
    try:
        _prepare(deployment)
        sides, slo, view = _measure(deployment, options.rows)
    except (BatchrunError, TimeoutError) as error:
        print(f"demo failed: {error}")
        return 1
    save_picture(sides, slo, PICTURE)
    rows_in_output = pq.read_metadata(view["output_path"]).num_rows
    record = {
        **record_of(sides, slo),
        "rows": view["num_rows"],
        "rows_failed": view["num_failed"],
        "rows_in_output": rows_in_output,
        "output_path": view["output_path"],
        "demo_s": time.monotonic() - START_S,
    }
    num_rows = view["num_rows"]
    wrong_rows = max(abs(num - num_rows) for num in (view["num_completed"], rows_in_output))
    calls = [sides[0].alone.calls, *(side.beside.calls for side in sides)]
    answered = min(sum(call.error is None for call in each) for each in calls)
    bars = [
        Bar("rows too few or too many, or failed", wrong_rows, 0, is_most=True),
        Bar("calls answered", answered, LEAST_CALLS),
    ]
    code = finish(options.json, [record], bars)
    say(f"{PICTURE}: every call, and the rows done beside them")
    if (cores := others_cores(sides)) > MANY_CORES:
        say(f"other programs took up to {cores:.1f} cores of this machine: figures move with them")
    said = f"{num_rows} rows, {view['num_failed']} failed; {sentence(sides, slo)}"
    print(f"demo {'failed' if code else 'ok'}: {said}")
    return code


def _prepare(deployment: Deployment) -> None:
    """A fresh folder with the job file and the model."""
    if FOLDER.exists():
        deployment.batchrun("down")
        shutil.rmtree(FOLDER)
    (FOLDER / "jobs").mkdir(parents=True)
    shutil.copy(JOB_FILE, FOLDER / "jobs" / JOB_FILE.name)
    say("building the tiny model")
    (FOLDER / "datasets").mkdir()
    deployment.batchrun("models", "tiny", MODEL_FOLDER)


def _write_rows(deployment: Deployment, num_rows: int) -> None:
    say(f"  writing {num_rows} LooGLE-shaped rows")
    data = "datasets/loogle.parquet"
    deployment.batchrun("datasets", "sample", "loogle", "--rows", str(num_rows), "-o", data)


def _measure(deployment: Deployment, num_rows: int) -> tuple[list[Side], SloConfig, dict[str, Any]]:
    """Both sides, the bounds, and the job on batchrun at its end; `num_rows` 0: `rows_for`.

    Raises BatchrunError, and TimeoutError where the job does not end.
    """
    with _engine(deployment, "1 of 2: vLLM's own scheduler", policy=STOCK_POLICY) as gateway:
        say(f"  chat calls alone, {TRACE.duration_s:.0f} s")
        alone = asyncio.run(_window(deployment, gateway))
        slo = bounds_of(alone.calls)
        say(f"  in time is here: {_in_words(slo)}")
        _write_rows(deployment, num_rows or rows_for(alone.calls))
        say("  the same calls, and rows of a later priority beside them")
        job_id = _start_rows(deployment)
        vllm = Side(VLLM, alone, asyncio.run(_window(deployment, gateway, job_id)))
        if not _has_ended(deployment, job_id):
            deployment.call("cancel", job_id)  # It may end meanwhile.
            wait_until(lambda: _has_ended(deployment, job_id), "the end of the first job")
    with _engine(deployment, "2 of 2: batchrun's scheduler", slo=slo.model_dump()) as gateway:
        say(f"  the first {WARM_UP_S:.0f} s of the calls alone")
        asyncio.run(_warm_up(gateway))
        say("  the same calls, and the same rows beside them")
        job_id = _start_rows(deployment)
        batchrun = Side(BATCHRUN, alone, asyncio.run(_window(deployment, gateway, job_id)))
        say("  the rest of the rows")
        wait_until(lambda: _has_ended(deployment, job_id), "the end of the job", END_WAIT_S)
        return [vllm, batchrun], slo, deployment.job(job_id)


@contextmanager
def _engine(deployment: Deployment, what: str, **settings: object) -> Iterator[str]:
    """The deployment, up with these settings; the gateway's URL."""
    engine = {"port": deployment.engine_port, "vllm_args": ["--max-num-batched-tokens", "512"]}
    deployment.configure(engine, model=f"./{MODEL_FOLDER}", **settings)
    say(f"starting engine {what} (about half a minute)")
    with deployment.running() as gateway:
        yield gateway


def _start_rows(deployment: Deployment) -> str:
    """Submit the job; its id, once an engine has rows of it."""
    job_id = str(deployment.batchrun("submit", f"jobs/{JOB_FILE.name}")["id"])

    def has_begun() -> bool:
        view = deployment.job(job_id)
        return bool(view["num_in_flight"] or view["num_completed"])

    wait_until(has_begun, "rows in flight", poll_s=0.2)
    return job_id


def _has_ended(deployment: Deployment, job_id: str) -> bool:
    return JobState(deployment.job(job_id)["state"]).is_terminal


async def _warm_up(gateway: str) -> None:
    """Calls alone, so that the engine is as warm as the first one when rows come."""
    calls = [call for call in generate_trace(TRACE, seed=1) if call.at_s < WARM_UP_S]
    await replay([*FIRST_CALLS, *calls], _target(gateway))


def _target(gateway: str) -> ReplayTarget:
    return ReplayTarget(f"{gateway}/v1", "tiny", extra_body={"ignore_eos": True})


async def _window(deployment: Deployment, gateway: str, job_id: str | None = None) -> Window:
    """Send the calls of the trace, and see how the rows of the job get on beside them."""
    target = _target(gateway)
    if job_id is None:
        await replay(FIRST_CALLS, target)
    start_s, busy_s, own_s = time.monotonic(), _busy_cpu_s(), _own_cpu_s(deployment)
    calling = asyncio.create_task(replay(generate_trace(TRACE, seed=1), target))
    rows_done: list[tuple[float, int]] = []
    while job_id is not None:
        view = await asyncio.to_thread(deployment.job, job_id)
        rows_done.append((time.monotonic() - start_s, view["num_completed"]))
        if calling.done() or JobState(view["state"]).is_terminal:
            break
        await asyncio.sleep(POLL_S)
    calls = await calling
    others_s = _busy_cpu_s() - busy_s - (_own_cpu_s(deployment) - own_s)
    return Window(calls, rows_done, max(0.0, others_s / (time.monotonic() - start_s)))


def _busy_cpu_s() -> float:
    """Seconds for which cores of this machine were busy."""
    times = psutil.cpu_times()
    return float(sum(times[:]) - times.idle - times.iowait)


def _own_cpu_s(deployment: Deployment) -> float:
    """CPU seconds of this process, the daemon, the gateway and the engine."""
    total_s = 0.0
    for pid in (os.getpid(), *map(deployment.pid_of, ("daemon", "gateway", "engine"))):
        with suppress(psutil.Error):
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    total_s += times.user + times.system
    return total_s


def rows_for(alone: Sequence[OnlineResult]) -> int:
    """As many rows as last through the calls on this machine, of whole documents."""
    tpot_s = percentile([call.tpot_s for call in alone if call.tpot_s is not None], 0.5)
    wanted = ROWS_PER_CALL_TOKEN / max(tpot_s or 0.0, 1e-6)
    rows = math.ceil(wanted / ROWS_OF_A_DOCUMENT) * ROWS_OF_A_DOCUMENT
    return min(MOST_ROWS, max(FEWEST_ROWS, rows))


def bounds_of(alone: Sequence[OnlineResult]) -> SloConfig:
    """`PATIENCE` times the medians of calls that had the engine alone.

    Raises EngineError when none was answered with two tokens.
    """
    ttft_s = percentile([call.ttft_s for call in alone if call.ttft_s is not None], 0.5)
    tpot_s = percentile([call.tpot_s for call in alone if call.tpot_s is not None], 0.5)
    if not ttft_s or not tpot_s:
        raise EngineError("no call was answered alone")
    return SloConfig(ttft_s=round(PATIENCE * ttft_s, 3), tpot_s=round(PATIENCE * tpot_s, 4))


def lateness(call: OnlineResult, slo: SloConfig) -> float:
    """How much of its bounds a call took, of the tighter one: above 1 it was late."""
    if call.error is not None or call.ttft_s is None:
        return math.inf
    return max(call.ttft_s / slo.ttft_s, (call.tpot_s or 0.0) / slo.tpot_s)


def _in_words(slo: SloConfig) -> str:
    return (
        f"a first token within {slo.ttft_s:.2f} s, then {1e3 * slo.tpot_s:.0f} ms a token, "
        f"{PATIENCE:g} times the medians alone"
    )


def sentence(sides: Sequence[Side], slo: SloConfig) -> str:
    """What the demo has shown."""
    kept = (
        f"{side.name} kept {side.kept_share(slo):.0%} beside {side.beside.rows_per_s:.1f} rows/s"
        for side in sides
    )
    return f"of the calls that this machine keeps in time alone, {' and '.join(kept)}"


def others_cores(sides: Sequence[Side]) -> float:
    """The most cores that programs of others took in a window."""
    return max(each.others_cores for side in sides for each in (side.alone, side.beside))


def record_of(sides: Sequence[Side], slo: SloConfig) -> dict[str, Any]:
    """All figures of the three windows, flat."""
    record: dict[str, Any] = {"scenario": "cpu-demo"}
    vllm, batchrun = sides
    for key, window in (
        ("alone", vllm.alone),
        ("vllm_beside", vllm.beside),
        ("batchrun_beside", batchrun.beside),
    ):
        figures = summarize(window.calls, slo_ttft_s=slo.ttft_s, slo_tpot_s=slo.tpot_s)
        figures |= {"rows_per_s": window.rows_per_s, "others_cores": window.others_cores}
        record |= {f"{key}_{name}": value for name, value in figures.items()}
    return record | {
        "vllm_kept_share": vllm.kept_share(slo),
        "batchrun_kept_share": batchrun.kept_share(slo),
    }


def save_picture(sides: Sequence[Side], slo: SloConfig, path: Path) -> None:
    """Each call by its arrival and how late it was, and the rows done, as an SVG file."""
    seen = [(ALONE, sides[0].alone), *((side.name, side.beside) for side in sides)]
    late = [lateness(call, slo) for _, window in seen for call in window.calls]
    top = 1.5 * max([2.0, *(value for value in late if math.isfinite(value))])
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 5.6), layout="constrained")
        calls, rows = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for name, window in seen:
            taken = [min(lateness(call, slo), top) for call in window.calls]
            arrived_s = [call.arrived_at_s for call in window.calls]
            calls.scatter(arrived_s, taken, s=14, color=COLORS[name], label=name)
            if window.rows_done:
                rows.plot(*zip(*window.rows_done, strict=True), color=COLORS[name])
        calls.axhline(1, color="black", linestyle=":", linewidth=1)
        calls.set(yscale="log", ylabel="a call's time, bound = 1", xlim=(0, TRACE.duration_s))
        calls.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        calls.yaxis.set_minor_formatter(NullFormatter())
        rows.set(ylabel="rows done", xlabel="s", ylim=(0, None))
        round_ticks(rows)
        figure.legend(loc="outside lower center", ncols=len(COLORS))
        figure.suptitle(_title(sides, slo), fontsize=9, x=0.02, ha="left")
        figure.savefig(path, format="svg", metadata={"Date": None}, facecolor="white")


def _title(sides: Sequence[Side], slo: SloConfig) -> str:
    """The sentence in two lines, and the bounds."""
    said = sentence(sides, slo).replace(f", {VLLM}", f",\n{VLLM}")
    return f"{said[:1].upper()}{said[1:]}\nin time: {_in_words(slo)}"


if __name__ == "__main__":
    raise SystemExit(main())
