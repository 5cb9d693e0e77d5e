"""What the gateway adds to an answer, while the daemon is idle and while it is busy.

    python -m benchmarks.gateway_cost [--rows N] [--engine] [--folder PATH] [--json FILE]

32 streams go through the gateway of a whole deployment to an engine in a process of its own that
sends a chunk each 20 ms (`benchmarks.paced`), and 16 go to that engine directly at the
same time, from one process of callers (`benchmarks.paced`). A call's added TTFT is its TTFT
less the median of the direct ones in the same phase, and a chunk's added delay is the same with the
time from its sending to its arrival: what callers, engine and machine take beyond their median is
counted against the gateway. Phases: an idle daemon; the submission of a million rows; a file of
200 MiB and 50,000 lines uploaded, downloaded and validated; a million results written by the daemon
and by `batchrun results` at once; and `kill -9` of the daemon. Offline work is off, so that the
engine has no other calls. A phase's figures are of calls and chunks that began within it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.gateway_phases import (
    Record,
    export,
    kill_daemon,
    submit,
    transfer_and_validate,
    write_finished_rows,
    write_short_rows,
)
from benchmarks.gateway_rig import GatewayRig, Window, measure_on_engine
from benchmarks.paced import GATEWAY_STREAMS, Floats, load
from benchmarks.records import Bar, describe, finish, in_own_process, parser

FULL_ROWS = 1_000_000
IDLE_S = 30.0
MEDIAN_MS, P99_MS = 3.0, 15.0
BUSY_FACTOR = 2.0
VALIDATE_S, GROWTH_MB = 10.0, 60.0
QUIET_CORES = 0.2
"""Where programs that are not of the benchmark took more, figures say as much about them."""
BUSY = frozenset({"submit", "upload", "validate", "download", "export"})
JUDGED = frozenset({"idle", "submit", "validate", "export"})


def main() -> int:
    """Measure every phase, print and save. Exits 1 when a bar is missed."""
    made = parser(__doc__)
    made.add_argument("--rows", type=int, default=FULL_ROWS)
    made.add_argument("--folder", type=Path, help="where to put all files; a disk, not memory")
    made.add_argument("--engine", action="store_true", help="only the row of a real vLLM")
    options = made.parse_args()
    with tempfile.TemporaryDirectory(prefix="batchrun-gateway-", dir=options.folder) as scratch:
        if options.engine:
            records = [in_own_process(measure_on_engine, Path(scratch))]
        else:
            records = measure(Path(scratch), options.rows)
    print(*map(describe, records), sep="\n")
    return finish(options.json, records, [bar for record in records for bar in bars(record)])


def bars(record: Record) -> Iterator[Bar]:
    """What a phase must keep."""
    value = {key: float(found) for key, found in record.items() if isinstance(found, int | float)}
    phase = str(record["phase"])
    if phase in JUDGED:
        factor = BUSY_FACTOR if phase in BUSY else 1.0
        median, p99 = value["added_ttft_p50_ms"], value["added_ttft_p99_ms"]
        yield Bar(f"{phase}: median added TTFT, ms", median, factor * MEDIAN_MS, is_most=True)
        yield Bar(f"{phase}: p99 added TTFT, ms", p99, factor * P99_MS, is_most=True)
    if phase == "killed":
        yield Bar("streams that a kill met", value["calls_met"], GATEWAY_STREAMS)
    yield Bar(f"{phase}: calls that broke or came in disorder", value["broken"], 0, is_most=True)
    if "longest_s" in value:
        yield Bar("50,000 lines validated, s", value["longest_s"], VALIDATE_S, is_most=True)
    if "daemon_growth_bytes" in value:
        growth_mb = value["daemon_growth_bytes"] / 1e6
        yield Bar(f"{phase}: memory of the daemon, MB", growth_mb, GROWTH_MB, is_most=True)


def measure(folder: Path, num_rows: int) -> list[Record]:
    """All phases on a deployment in `folder`."""
    _say("writing the job, and a job with its results")
    in_own_process(write_short_rows, folder, num_rows)
    finished = in_own_process(write_finished_rows, folder, num_rows)
    measured: list[tuple[Window, Record]] = []
    rig = GatewayRig(folder)
    with rig.calling():
        time.sleep(IDLE_S / 10)
        for phases in (_idle(rig), submit(rig), transfer_and_validate(rig), export(rig, finished)):
            for window, more in phases:
                _say(_what_was_measured(window))
                measured.append((window, more))
        _say("kill -9 of the daemon")
        killed_s = kill_daemon(rig)
        rig.stop_calling()
    calls, chunks = load(rig.calls_path)
    records = [_record(window, calls, chunks) | more for window, more in measured]
    return [*records, _met_by_kill(calls, killed_s)]


def _what_was_measured(window: Window) -> str:
    others = window.cores["others"]
    text = f"{window.name}: {window.seconds:.1f} s, load {window.load_1min:.1f}"
    return f"{text}, other programs took {others:.2f} cores" if others > QUIET_CORES else text


def _idle(rig: GatewayRig) -> Iterator[tuple[Window, Record]]:
    window = Window("idle")
    with rig.watched(window):
        time.sleep(IDLE_S)
    yield window, {}


def _record(window: Window, calls: Floats, chunks: Floats) -> Record:
    """Columns of `calls` and `chunks`: see `paced.Calls`."""
    calls = calls[_within(window, calls[:, 1])]
    chunks = chunks[_within(window, chunks[:, 1])]
    through, direct = calls[calls[:, 0] == 1], calls[calls[:, 0] == 0]
    return {
        "phase": window.name,
        "seconds": window.seconds,
        "load_1min": window.load_1min,
        "calls": len(through),
        "direct_calls": len(direct),
        "broken": int((through[:, 4] == 0).sum()),
        **_quantiles("ttft", through[:, 2], direct[:, 2]),
        **_quantiles("chunk", chunks[chunks[:, 0] == 1, 2], chunks[chunks[:, 0] == 0, 2]),
        **{f"cores_{name}": cores for name, cores in window.cores.items()},
    }


def _within(window: Window, instants: Floats) -> np.ndarray:
    found = np.zeros(len(instants), dtype=bool)
    for begin, end in window.spans:
        found |= (instants >= begin) & (instants <= end)
    return found


def _quantiles(what: str, through_s: Floats, direct_s: Floats) -> Record:
    """In milliseconds; a call without a first chunk counts as endless."""
    through_ms = np.where(np.isnan(through_s), np.inf, through_s) * 1e3
    direct_ms = direct_s[~np.isnan(direct_s)] * 1e3
    median_ms = float(np.quantile(direct_ms, 0.5))
    return {
        f"direct_{what}_p50_ms": median_ms,
        f"direct_{what}_p99_ms": float(np.quantile(direct_ms, 0.99)),
        f"added_{what}_p50_ms": float(np.quantile(through_ms, 0.5)) - median_ms,
        f"added_{what}_p99_ms": float(np.quantile(through_ms, 0.99)) - median_ms,
    }


def _met_by_kill(calls: Floats, killed_s: float) -> Record:
    met = calls[(calls[:, 0] == 1) & (calls[:, 1] < killed_s) & (calls[:, 3] > killed_s)]
    after = calls[(calls[:, 0] == 1) & (calls[:, 1] >= killed_s)]
    return {
        "phase": "killed",
        "calls_met": len(met),
        "calls_after": len(after),
        "broken": int((met[:, 4] == 0).sum() + (after[:, 4] == 0).sum()),
    }


def _say(text: str) -> None:
    print(f"gateway_cost: {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
