"""What pages that are left open hold, minute by minute, in Chromium beside a live deployment.

    python -m benchmarks.page_memory [--minutes 60] [--json FILE]

A fake engine runs a job slowly, and a call arrives each second. Every view is a page of a context
of its own, so that its heap is its own; figures are taken after a forced collection. Charts grow
for half an hour, as long as their history. Needs Playwright and Debian's `chromium`.
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
from playwright.sync_api import Browser, sync_playwright

from benchmarks.deployment import Deployment
from benchmarks.records import Bar, Record, finish, parser

VIEWS = ("jobs", "job", "promises", "tide", "memory", "engines", "routing")
HELD = {"heap": "JSHeapUsedSize", "nodes": "Nodes", "listeners": "JSEventListeners"}
ROWS_PER_S = 4
CALL: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Why?"}]}
MAX_GROWTH = 1.05
"""Of the last sixth of the time over the sixth after half time, medians."""


def main() -> int:
    given = parser(__doc__, minutes=60).parse_args()
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        deployment = Deployment(Path(name))
        deployment.use_fake_engine(1.0, window={"requests": ROWS_PER_S})
        with deployment.running() as gateway:
            job = deployment.write_job("slow", ROWS_PER_S * 60 * (given.minutes + 5))
            shown = f"jobs/{deployment.submit(job)}"
            start, path = playwright.chromium.launch, shutil.which("chromium")
            with start(executable_path=path, args=["--no-sandbox"]) as browser:
                records = list(_watch(browser, gateway, shown, given.minutes))
    grown = [_growth(view, [each for each in records if each["view"] == view]) for view in VIEWS]
    bars = [
        Bar(f"{each['view']}: {key}", each[f"{key}_growth"], MAX_GROWTH, is_most=True)
        for each in grown
        for key in HELD
    ]
    return finish(given.json, [*records, *grown], bars)


def _watch(browser: Browser, gateway: str, job: str, minutes: int) -> Iterator[Record]:
    sessions = {}
    for view in VIEWS:
        page = browser.new_context().new_page()
        page.goto(f"{gateway}/dashboard/{job if view == 'job' else view}")
        sessions[view] = page.context.new_cdp_session(page)
        sessions[view].send("Performance.enable")
    began_s = time.monotonic()
    for minute in range(1, minutes + 1):
        while time.monotonic() < began_s + 60.0 * minute:
            page.wait_for_timeout(1e3)
            requests.post(f"{gateway}/v1/chat/completions", json=CALL, timeout=60)
        for view, session in sessions.items():
            session.send("HeapProfiler.collectGarbage")
            told = session.send("Performance.getMetrics")["metrics"]
            found = {each["name"]: int(each["value"]) for each in told}
            held = {key: found[name] for key, name in HELD.items()}
            yield {"kind": "sample", "view": view, "minute": minute, **held}


def _growth(view: str, samples: Sequence[Record]) -> Record:
    half, sixth = len(samples) // 2, max(1, len(samples) // 6)
    grown = {}
    for key in HELD:
        first, last = samples[half : half + sixth], samples[-sixth:]
        medians = [statistics.median(each[key] for each in part) for part in (first, last)]
        grown[f"{key}_growth"] = medians[1] / medians[0]
    end = {"heap_mib": samples[-1]["heap"] / 2**20, "nodes": samples[-1]["nodes"]}
    return {"kind": "growth", "view": view, "minutes": len(samples), **end, **grown}


if __name__ == "__main__":
    raise SystemExit(main())
