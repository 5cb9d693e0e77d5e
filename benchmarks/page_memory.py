"""What pages that are left open hold, minute by minute, in Chromium beside a live deployment.

    python -m benchmarks.page_memory [--minutes 60] [--json FILE]

A fake engine runs a job slowly, and a call arrives each second. Every view is a page of a browser
context of its own, so that its heap is its own. After a forced collection each minute: bytes that
its JavaScript uses, nodes and event listeners of its document. Charts grow for half an hour, as
long as their history; from then on nothing may. Needs Playwright and Debian's `chromium`.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import requests
from playwright.sync_api import Browser, CDPSession, sync_playwright

from benchmarks.deployment import Deployment
from benchmarks.records import Bar, Record, finish, parser

VIEWS = ("jobs", "job", "promises", "tide", "memory", "engines", "routing")
HELD = ("heap_bytes", "nodes", "listeners")
LATENCY_S = 1.0
ROWS_PER_S = 4
MINUTE_S = 60.0
MESSAGE = {"role": "user", "content": "A question."}
CALL: dict[str, Any] = {"model": "fake", "messages": [MESSAGE], "stream": True}
MAX_GROWTH = 1.05
"""Of the last sixth of the time over the sixth after half time, medians."""


def main() -> int:
    given = parser(__doc__, minutes=60).parse_args()
    with tempfile.TemporaryDirectory() as name:
        records = list(measure(Path(name), given.minutes))
    return finish(given.json, records, bars(records))


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """How much each view grew in the second half."""
    for record in records:
        if record["kind"] == "growth":
            for figure in ("heap_growth", "nodes_growth", "listeners_growth"):
                name = f"{record['view']}: {figure.replace('_', ' ')}"
                yield Bar(name, record[figure], MAX_GROWTH, is_most=True)


def measure(folder: Path, minutes: int) -> Iterator[Record]:
    """A record a minute of each view, then how each grew."""
    deployment = Deployment(folder)
    deployment.use_fake_engine(LATENCY_S, window={"requests": round(ROWS_PER_S * LATENCY_S)})
    with deployment.running() as gateway:
        rows = round(ROWS_PER_S * MINUTE_S * (minutes + 5))
        job_id = deployment.submit(deployment.write_job("slow", rows))
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"),
                args=["--no-sandbox", "--disable-dev-shm-usage"],
            )
            samples = list(_watch(browser, gateway, job_id, minutes))
            browser.close()
    yield from samples
    for view in VIEWS:
        own = [each for each in samples if each.get("view") == view]
        figures = {f"{key.partition('_')[0]}_growth": key for key in HELD}
        last = {"heap_mib": own[-1]["heap_bytes"] / 2**20, "nodes": own[-1]["nodes"]}
        grown = {name: _growth([each[key] for each in own]) for name, key in figures.items()}
        yield {"kind": "growth", "view": view, "minutes": minutes, **last, **grown}


def _growth(values: Sequence[float]) -> float:
    sixth = max(1, len(values) // 6)
    half = len(values) // 2
    return statistics.median(values[-sixth:]) / statistics.median(values[half : half + sixth])


def _watch(browser: Browser, gateway: str, job_id: str, minutes: int) -> Iterator[Record]:
    sessions = {}
    for view in VIEWS:
        page = browser.new_context().new_page()
        page.goto(f"{gateway}/dashboard/{f'jobs/{job_id}' if view == 'job' else view}")
        sessions[view] = page.context.new_cdp_session(page)
        sessions[view].send("Performance.enable")
    began_s = time.monotonic()
    for minute in range(1, minutes + 1):
        while time.monotonic() < began_s + minute * MINUTE_S:
            page.wait_for_timeout(1e3)
            requests.post(f"{gateway}/v1/chat/completions", json=CALL, timeout=60)
        for view, session in sessions.items():
            yield {"kind": "sample", "view": view, "minute": minute, **_held(session)}


def _held(session: CDPSession) -> dict[str, Any]:
    session.send("HeapProfiler.collectGarbage")
    told = session.send("Performance.getMetrics")["metrics"]
    found = {each["name"]: int(each["value"]) for each in told}
    names = ("JSHeapUsedSize", "Nodes", "JSEventListeners")
    return dict(zip(HELD, map(found.__getitem__, names), strict=True))


if __name__ == "__main__":
    raise SystemExit(main())
