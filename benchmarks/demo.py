"""The main job, shown: the same chat calls alone, beside rows on vLLM, and beside them on batchrun.

    python -m benchmarks.demo [--json FILE] [--rows N]

The calls alone say what this machine can promise (`bounds_of`). Everything goes through the
`batchrun` command and the OpenAI endpoint, as a user would; state, output and the picture stay in
the folder `demo/`. What vLLM gets is its best public form: `--scheduling-policy priority`, and the
same rows with a later priority, sent by the same daemon in the same order.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from matplotlib import rc_context
from matplotlib.figure import Figure

from batchrun.config import STOCK_POLICY, SloConfig
from batchrun.errors import BatchrunError, EngineError
from batchrun.simulator.plots import OFFLINE, ONLINE, STYLE
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

say = partial(print, flush=True)

FOLDER = Path("demo")
PICTURE = FOLDER / "demo.svg"
JOB_FILE = Path("jobs/loogle.yaml")
MODEL_FOLDER = "models/tiny"
LEAST_CALLS = 30
PATIENCE = 12.0
"""A call is in time that takes at most so many times what calls alone take at the median."""
POLL_S = 0.5
END_WAIT_S = 1_200.0
TRACE = TraceShape(
    duration_s=30.0,
    rate_per_s=1.2,
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
    """The calls of the trace, and how many rows were done at which second beside them."""

    name: str
    calls: Sequence[OnlineResult]
    rows_done: Sequence[tuple[float, int]] = ()

    @property
    def rows_per_s(self) -> float:
        """Rows that ended in the window, by its length; by the job's where that was shorter."""
        if not self.rows_done:
            return 0.0
        at_s, done = self.rows_done[-1]
        return done / at_s


def main() -> int:
    """Run the demo; 0 when every row is in the output and enough calls were answered."""
    options = parser(__doc__, rows=160).parse_args()
    start_s = time.monotonic()
    deployment = Deployment(FOLDER)
    try:
        _prepare(deployment, options.rows)
        windows, slo, view = _measure(deployment)
    except BatchrunError as error:
        say(f"demo failed: {error}")
        return 1
    save_picture(windows, slo, PICTURE)
    rows_in_output = pq.read_metadata(view["output_path"]).num_rows
    record = {
        **record_of(windows, slo),
        "rows": view["num_rows"],
        "rows_failed": view["num_failed"],
        "rows_in_output": rows_in_output,
        "output_path": view["output_path"],
        "demo_s": time.monotonic() - start_s,
    }
    wrong_rows = max(abs(num - options.rows) for num in (view["num_completed"], rows_in_output))
    answered = min(sum(call.error is None for call in window.calls) for window in windows)
    bars = [
        Bar("rows too few or too many, or failed", wrong_rows, 0, is_most=True),
        Bar("calls answered", answered, LEAST_CALLS),
    ]
    code = finish(options.json, [record], bars)
    say(f"{PICTURE}: every call, and the rows done beside them")
    said = f"{options.rows} rows, {view['num_failed']} failed; {sentence(windows, slo)}"
    say(f"demo {'failed' if code else 'ok'}: {said}")
    return code


def _prepare(deployment: Deployment, num_rows: int) -> None:
    """A fresh folder with the job file, its data and the model."""
    if FOLDER.exists():
        deployment.batchrun("down")
        shutil.rmtree(FOLDER)
    (FOLDER / "jobs").mkdir(parents=True)
    shutil.copy(JOB_FILE, FOLDER / "jobs" / JOB_FILE.name)
    say(f"writing {num_rows} LooGLE-shaped rows and building the tiny model")
    (FOLDER / "datasets").mkdir()
    data = "datasets/loogle.parquet"
    deployment.batchrun("datasets", "sample", "loogle", "--rows", str(num_rows), "-o", data)
    deployment.batchrun("models", "tiny", MODEL_FOLDER)


def _measure(deployment: Deployment) -> tuple[list[Window], SloConfig, dict[str, Any]]:
    """The three windows, the bounds, and the job on batchrun at its end.

    Raises BatchrunError, and TimeoutError where the job does not end.
    """
    with _engine(deployment, "1 of 2: vLLM's own scheduler", policy=STOCK_POLICY) as gateway:
        say(f"  the calls alone, {TRACE.duration_s:.0f} s")
        alone, _ = asyncio.run(_window(deployment, gateway, ALONE))
        slo = bounds_of(alone.calls)
        say(f"  in time is here: {_in_words(slo)}")
        say("  the same calls, and the rows beside them with a later priority")
        vllm, job_id = asyncio.run(_window(deployment, gateway, VLLM, with_rows=True))
        if not _has_ended(deployment, job_id):
            deployment.call("cancel", job_id)  # It may end meanwhile.
            wait_until(lambda: _has_ended(deployment, job_id), "the end of the first job")
    with _engine(deployment, "2 of 2: batchrun's scheduler", slo=slo.model_dump()) as gateway:
        say("  the same calls, and the rows beside them")
        batchrun, job_id = asyncio.run(_window(deployment, gateway, BATCHRUN, with_rows=True))
        say("  the rest of the rows")
        wait_until(lambda: _has_ended(deployment, job_id), "the end of the job", END_WAIT_S)
        return [alone, vllm, batchrun], slo, deployment.job(job_id)


@contextmanager
def _engine(deployment: Deployment, what: str, **settings: object) -> Iterator[str]:
    """The deployment, up with these settings; the gateway's URL."""
    engine = {"port": deployment.engine_port, "vllm_args": ["--max-num-batched-tokens", "512"]}
    deployment.configure(engine, model=f"./{MODEL_FOLDER}", **settings)
    say(f"starting engine {what} (about half a minute)")
    with deployment.running() as gateway:
        yield gateway


def _has_ended(deployment: Deployment, job_id: str) -> bool:
    return JobState(deployment.job(job_id)["state"]).is_terminal


async def _window(
    deployment: Deployment, gateway: str, name: str, *, with_rows: bool = False
) -> tuple[Window, str]:
    """Send the calls of the trace, and with them the job; its id, if there is one."""
    target = ReplayTarget(f"{gateway}/v1", "tiny", extra_body={"ignore_eos": True})
    await replay(FIRST_CALLS, target)
    calling = asyncio.create_task(replay(generate_trace(TRACE, seed=1), target))
    rows_done: list[tuple[float, int]] = []
    job_id = ""
    if with_rows:
        start_s = time.monotonic()
        submitted = await asyncio.to_thread(deployment.batchrun, "submit", f"jobs/{JOB_FILE.name}")
        job_id = submitted["id"]
        while True:
            view = await asyncio.to_thread(deployment.job, job_id)
            rows_done.append((time.monotonic() - start_s, view["num_completed"]))
            if calling.done() or JobState(view["state"]).is_terminal:
                break
            await asyncio.sleep(POLL_S)
    return Window(name, await calling, rows_done), job_id


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


def kept_share(beside: Window, alone: Window, slo: SloConfig) -> float:
    """Of the calls that are in time alone, those that are so beside rows; calls that came when the
    rows had ended do not count."""
    until_s = beside.rows_done[-1][0] if beside.rows_done else math.inf
    pairs = zip(alone.calls, beside.calls, strict=True)
    wanted = [b for a, b in pairs if a.arrived_at_s < until_s and lateness(a, slo) <= 1]
    return sum(lateness(call, slo) <= 1 for call in wanted) / len(wanted) if wanted else 0.0


def _in_words(slo: SloConfig) -> str:
    return (
        f"a first token within {slo.ttft_s:.2f} s, then {1e3 * slo.tpot_s:.0f} ms a token, "
        f"{PATIENCE:g} times the medians alone"
    )


def sentence(windows: Sequence[Window], slo: SloConfig) -> str:
    """What the demo has shown."""
    alone, vllm, batchrun = windows
    return (
        f"of the calls that this machine keeps in time alone, {VLLM} kept "
        f"{kept_share(vllm, alone, slo):.0%} beside {vllm.rows_per_s:.1f} rows/s, "
        f"batchrun {kept_share(batchrun, alone, slo):.0%} beside {batchrun.rows_per_s:.1f} rows/s"
    )


def record_of(windows: Sequence[Window], slo: SloConfig) -> dict[str, Any]:
    """All figures of the three windows, flat."""
    record: dict[str, Any] = {"scenario": "cpu-demo"}
    for key, window in zip(("alone", "vllm", "batchrun"), windows, strict=True):
        figures = summarize(window.calls, slo_ttft_s=slo.ttft_s, slo_tpot_s=slo.tpot_s)
        figures["kept_share"] = kept_share(window, windows[0], slo)
        figures["rows_per_s"] = window.rows_per_s
        record |= {f"{key}_{name}": value for name, value in figures.items()}
    return record


def save_picture(windows: Sequence[Window], slo: SloConfig, path: Path) -> None:
    """Each call by its arrival and how late it was, and the rows done, as an SVG file."""
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 5.6), layout="constrained")
        calls, rows = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        worst = [lateness(call, slo) for window in windows for call in window.calls]
        top = 1.5 * max([2.0, *(value for value in worst if math.isfinite(value))])
        for window in windows:
            taken = [min(lateness(call, slo), top) for call in window.calls]
            arrived_s = [call.arrived_at_s for call in window.calls]
            calls.scatter(arrived_s, taken, s=14, color=COLORS[window.name], label=window.name)
            if window.rows_done:
                rows.plot(*zip(*window.rows_done, strict=True), color=COLORS[window.name])
        calls.axhline(1, color="black", linestyle=":", linewidth=1)
        calls.set(yscale="log", ylabel="a call's time, bound = 1", xlim=(0, TRACE.duration_s))
        calls.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        rows.set(ylabel="rows done", xlabel="s", ylim=(0, None))
        figure.legend(loc="outside lower center", ncols=len(windows))
        figure.suptitle(_title(windows, slo), fontsize=9, x=0.02, ha="left")
        figure.savefig(path, format="svg", metadata={"Date": None}, facecolor="white")


def _title(windows: Sequence[Window], slo: SloConfig) -> str:
    """The sentence in two lines, and the bounds."""
    said = sentence(windows, slo).replace(f", {VLLM}", f",\n{VLLM}")
    return f"{said[:1].upper()}{said[1:]}\nin time: {_in_words(slo)}"


if __name__ == "__main__":
    raise SystemExit(main())
