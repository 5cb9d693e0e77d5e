"""The page in a real Chromium against a deployment with two engines.

Needs Debian's `chromium`; skipped without it. `SCREENSHOTS=docs/figures` writes the manual's
pictures.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deployment_rig import DeploymentRig

from benchmarks.deployment import free_port

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="this machine has no chromium"),
]
VIEWS = ("jobs", "submit", "promises", "tide", "memory", "engines", "routing", "plan", "keys")
NUM_ROWS = 30_000
UPDATE_S = 2.0
SLACK_S = 8.0
"""For a busy machine: how soon exactly is for a benchmark."""
PATIENCE_MS = 120_000
SEVERE = {"serious", "critical"}
SIZES = {"light": (1200, 760), "dark": (1200, 760), "phone": (390, 800)}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentRig]:
    """Two engines that take their time, and a job that runs."""
    made = DeploymentRig(tmp_path_factory.mktemp("browser"))
    engines = []
    for name in ("left", "right"):
        port = free_port()
        fake = [sys.executable, "-m", "batchrun.engine.fake", f"--port={port}", "--model=fake"]
        engines.append({"name": name, "command": [*fake, "--latency-s=1"], "port": port})
    made.configure(engines[0], engines=engines)
    made.ask("up", "-d")
    yield made
    made.close()


@pytest.fixture(scope="module")
def job(rig: DeploymentRig) -> str:
    job_id = rig.submit_rows(*(f"Shelf {i // 3000}. Question {i}" for i in range(NUM_ROWS)))
    rig.wait_for(job_id, lambda view: view["num_completed"] > 0)
    return job_id


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Browser, rig: DeploymentRig) -> Iterator[Page]:
    """A page that must log no error, and ask nobody but the gateway."""
    context = browser.new_context(base_url=f"http://127.0.0.1:{rig.port}")
    context.set_default_timeout(PATIENCE_MS)
    opened = context.new_page()
    faults: list[str] = []
    opened.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    opened.on("pageerror", lambda error: faults.append(str(error)))
    own = f"http://127.0.0.1:{rig.port}/dashboard"

    def note_foreign(request: Any) -> None:
        if not request.url.startswith(own):
            faults.append(f"asked {request.url}")

    opened.on("request", note_foreign)
    opened.on("dialog", lambda dialog: dialog.accept())
    yield opened
    context.close()
    assert faults == []


def until(seen: Callable[[], bool], *, within_s: float = SLACK_S) -> float:
    """Wait for it; the seconds that it took."""
    began_s = time.monotonic()
    while not seen():
        assert time.monotonic() - began_s < within_s, "waited in vain"
        time.sleep(0.05)
    return time.monotonic() - began_s


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_has_no_serious_fault_for_anybody(page: Page, job: str, view: str) -> None:
    page.goto(f"/dashboard/{view}")
    page.wait_for_selector("#view h1")
    until(lambda: page.locator("#fleet dt").count() > 0)

    found = axe.Axe().run(page)

    serious = [
        (each["id"], [node["html"][:200] for node in each["nodes"]])
        for each in found.response["violations"]
        if each["impact"] in SEVERE
    ]
    assert serious == []


def test_a_job_s_page_has_no_serious_fault_either(page: Page, job: str) -> None:
    page.goto(f"/dashboard/jobs/{job}")
    found = axe.Axe().run(page)
    assert [v["id"] for v in found.response["violations"] if v["impact"] in SEVERE] == []
    assert "Shape of the prefix tree" in page.inner_text("#view")


def test_progress_comes_by_itself(page: Page, job: str) -> None:
    page.goto(f"/dashboard/jobs/{job}")
    progress = page.locator("#view progress").first

    before = progress.get_attribute("value")

    until(lambda: progress.get_attribute("value") != before)


def test_charts_are_drawn_and_follow(page: Page, job: str) -> None:
    page.goto("/dashboard/tide")
    page.wait_for_selector(".chart canvas")
    first = page.get_attribute(".chart", "data-columns")

    until(lambda: page.get_attribute(".chart", "data-columns") != first)

    assert page.locator(".chart canvas").count() == 1


@pytest.mark.parametrize("look", SIZES)
def test_it_looks_right_in_light_in_dark_and_on_a_phone(
    browser: Browser, rig: DeploymentRig, job: str, tmp_path: Path, look: str
) -> None:
    width, height = SIZES[look]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if look == "dark" else "light",
        base_url=f"http://127.0.0.1:{rig.port}",
    )
    page = context.new_page()
    page.goto("/dashboard/tide" if look == "dark" else "/dashboard/jobs")
    if look == "dark":
        page.wait_for_selector(".chart canvas")
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    page.screenshot(path=folder / f"dashboard-{look}.png")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    is_dark = sum(map(int, re.findall(r"\d+", light))) < 3 * 128
    assert is_dark is (look == "dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    context.close()


def says(page: Page, selector: str, text: str) -> bool:
    """Whether a part of the page has this text."""
    return text in page.inner_text(selector)


def test_buttons_pause_resume_switch_and_cancel(page: Page, rig: DeploymentRig, job: str) -> None:
    page.goto(f"/dashboard/jobs/{job}")
    for action, state in (("pause", "paused"), ("resume", "running")):
        page.click(f"#{action}-{job}")
        page.wait_for_selector(f"#notice :text('{job} is {state}')")
        until(partial(says, page, "#view .state", state))
    for switch in ("off", "on"):
        page.click("#switch")
        page.wait_for_selector(f"#notice :text('Offline work is {switch}')")
        assert rig.ask("status")["offline"] is (switch == "on")
        until(partial(says, page, "#fleet", f"\n{switch}"))


def test_an_upload_is_checked_and_started(page: Page, rig: DeploymentRig, job: str) -> None:
    page.goto("/dashboard/submit")
    rows = rig.folder / "reviews.csv"
    rows.write_text("id,text\n1,Good\n2,Bad\n")
    page.set_input_files("#file", rows)
    page.fill("#prompt", "Praise? {{ txt }}")
    page.click("#check")
    page.wait_for_selector("#draft .bad:has-text('no column')", timeout=PATIENCE_MS)
    page.fill("#prompt", "Praise? {{ text }}")
    page.fill("#name", "from the page")
    time.sleep(UPDATE_S)
    assert page.input_value("#name") == "from the page"
    page.click("#check")
    page.wait_for_selector("#start", timeout=PATIENCE_MS)
    assert "2; prefix groups: 0" in page.inner_text("#draft")
    found = axe.Axe().run(page)
    assert [v["id"] for v in found.response["violations"] if v["impact"] in SEVERE] == []

    page.click("#start")

    page.wait_for_url("**/dashboard/jobs/job_*", timeout=PATIENCE_MS)
    rig.wait_until_ended(page.url.rpartition("/")[2])
    page.wait_for_selector("#download", timeout=PATIENCE_MS)
    with page.expect_download() as download:
        page.click("#download")
    assert download.value.suggested_filename == "answers.parquet"


def test_a_keyboard_is_enough(page: Page, rig: DeploymentRig, job: str) -> None:
    page.goto("/dashboard/jobs")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.focus(f"#pause-{job}")
    time.sleep(UPDATE_S)
    assert page.evaluate("document.activeElement.id") == f"pause-{job}"
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#notice :text('{job} is paused')")
    page.focus(f"#resume-{job}")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#notice :text('{job} is running')")


def test_an_update_leaves_scroll_and_focus_as_they_were(page: Page, job: str) -> None:
    page.goto("/dashboard/engines")
    # In one turn of the page's loop: a real update would take these two away.
    found = page.evaluate("""() => {
        const view = document.getElementById("view");
        const log = document.createElement("pre");
        log.textContent = "line\\n".repeat(100);
        const link = document.createElement("a");
        link.href = "#";
        view.append(log, link);
        log.scrollTop = 77;
        link.focus();
        show(view, view.innerHTML);
        const logs = [...view.querySelectorAll("pre")];
        const { activeElement: focused } = document;
        return [logs.pop().scrollTop, focused.tagName, log.isConnected, view.contains(focused)];
    }""")
    assert found == [77, "A", False, True]


def test_a_page_that_nobody_sees_leaves_its_connection(page: Page) -> None:
    page.goto("/dashboard/jobs")
    until(lambda: page.evaluate("source?.readyState") == 1)
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    assert page.evaluate("source") is None
    page.evaluate("Object.defineProperty(document, 'hidden', {value: false, configurable: true})")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    until(lambda: page.evaluate("source?.readyState") == 1)


def test_the_page_comes_back_after_the_daemon(browser: Browser, rig: DeploymentRig) -> None:
    page = browser.new_context(base_url=f"http://127.0.0.1:{rig.port}").new_page()
    page.goto("/dashboard/jobs")
    token = page.get_attribute("#token", "data-token")
    rig.kill("daemon")
    page.wait_for_selector("#lost:not([hidden])", timeout=30_000)
    rig.ask("up", "-d")
    page.wait_for_selector("#lost[hidden]", state="attached", timeout=90_000)
    until(lambda: page.get_attribute("#token", "data-token") != token)
    page.context.close()


def test_a_person_logs_in_and_out(browser: Browser, tmp_path: Path) -> None:
    keyed = DeploymentRig(tmp_path)
    try:
        keyed.use_fake_engine()
        key = str(keyed.ask("keys", "create", "ops", "--role", "admin")["key"])
        keyed.ask("up", "-d")
        page = browser.new_context(base_url=f"http://127.0.0.1:{keyed.port}").new_page()
        page.goto("/dashboard")
        page.fill("#key", key)
        page.click("button")
        page.wait_for_selector("#view h1", timeout=PATIENCE_MS)
        page.click("#log-out")
        page.wait_for_selector("#key", timeout=PATIENCE_MS)
        page.context.close()
    finally:
        keyed.close()


def test_cancel_ends_the_job(page: Page, rig: DeploymentRig, job: str) -> None:
    page.goto("/dashboard/jobs")
    page.click(f"#cancel-{job}")
    page.wait_for_selector(f"#notice :text('{job} is cancelling')")
    page.goto(f"/dashboard/jobs/{job}")
    page.wait_for_selector("#view .state:text('cancelled')", timeout=PATIENCE_MS)
