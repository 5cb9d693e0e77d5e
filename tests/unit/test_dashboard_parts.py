"""Parts of the page: sessions, samples, and text that stays text in every template."""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, closing
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import aiohttp
import httpx
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from fastapi import FastAPI
from job_builders import make_tree_job
from starlette.exceptions import HTTPException
from starlette.requests import Request
from store_builders import add_batch
from test_choosing_engines import slot_of

from batchrun.config import load_deployment
from batchrun.daemon.daemon import Daemon
from batchrun.daemon.engine_link import EngineLink, Slot, choose_default
from batchrun.daemon.supervisor import Supervisor
from batchrun.daemon.view import view_engine, view_job
from batchrun.daemon.writer import Stage
from batchrun.engine.engine import AttachedEngine
from batchrun.engine.sockets import EngineSockets
from batchrun.errors import NotLeadingError, StoreUnreachableError
from batchrun.hints import SloBounds
from batchrun.home import CALLER_HEADER, GATEWAY_HEADER, Home
from batchrun.jobs.batch import new_batch_job
from batchrun.server.api.errors import (
    STANDS_BY,
    Caller,
    Callers,
    for_strangers,
    install_error_handlers,
)
from batchrun.server.api.picture import Status
from batchrun.server.api.standby import LocalServer, Standby, make_app
from batchrun.server.api.upload import Transfers
from batchrun.server.gateway.admission import ApiKey, KeyRing
from batchrun.server.gateway.dashboard import (
    SESSION_S,
    Sessions,
    check_site,
    read_or_make_secret,
)
from batchrun.server.gateway.envelope import RefusalError
from batchrun.server.gateway.shared_book import MAX_ENGINES
from batchrun.server.gateway.tally import (
    ENGINE,
    FELT,
    MAX_SERIES,
    TTFT,
    TTFT_BOUNDS_S,
    SeenReply,
    Tally,
    TallyPage,
    create_tally,
)
from batchrun.server.web import history as page_history
from batchrun.server.web import pages as page_streams
from batchrun.server.web.gateway_figures import WINDOW_S, EngineCalls, GatewayFigures
from batchrun.server.web.history import CHART_POINTS, History, KvSample, Sample
from batchrun.server.web.pages import (
    FILTERS,
    MAX_STREAMS,
    MAX_STREAMS_OF_A_KEY,
    MAX_STREAMS_OF_USERS,
    Pages,
    Tokens,
    dashboard_router,
    render,
)
from batchrun.server.web.sight import VIEWS, Sight
from batchrun.server.web.uploads import Desk
from batchrun.store import api_keys, jobs, results
from batchrun.store.api_keys import MAX_COUNT, NO_LIMITS, KeyLimits, KeyUsage, NewApiKey
from batchrun.store.batches import NewBatch
from batchrun.store.database import open_store
from batchrun.store.jobs import Counts, JobRecord
from batchrun.types import (
    DEFAULT_MODEL,
    OFFLINE_OFF,
    EnginePhase,
    JobState,
    Outcome,
    OutcomeKind,
    RowError,
)
from batchrun.wire import CostTelemetry, FeltCalls, KvTelemetry, Telemetry

NOW_S = 1_700_000_000.0
CHAT = "/v1/chat/completions"


def make_ring(*names: str) -> KeyRing:
    ring = KeyRing()
    ring.replace(
        tuple(
            ApiKey(f"key_{name}", sha256=f"{i:064x}", role="user", slo_class=None,
                   requests_per_minute=None, seq=i)
            for i, name in enumerate(names)
        )
    )  # fmt: skip
    return ring


def test_a_session_holds_until_it_expires() -> None:
    sessions = Sessions(make_ring("a", "b"), b"s" * 32)
    key = sessions._keys.find("key_a")
    assert key is not None
    text = sessions.begin(key, now_s=NOW_S)

    assert sessions.find(text, now_s=NOW_S + SESSION_S - 1) == key
    assert sessions.find(text, now_s=NOW_S + SESSION_S + 1) is None


def test_a_session_of_a_revoked_key_or_another_secret_is_none() -> None:
    ring = make_ring("a")
    key = ring.find("key_a")
    assert key is not None
    text = Sessions(ring, b"s" * 32).begin(key, now_s=NOW_S)

    assert Sessions(ring, b"t" * 32).find(text, now_s=NOW_S) is None
    assert Sessions(make_ring("b"), b"s" * 32).find(text, now_s=NOW_S) is None


@pytest.mark.parametrize(
    "text",
    ["", "..", "key_a", "key_a.99999999999999", "key_a.99999999999.", "key_b.1.x", "é.é.é",
     "key_a.9" + "9" * 5000 + ".x", "key_a.²." + "0" * 64],
)  # fmt: skip
def test_what_nobody_made_is_no_session(text: str) -> None:
    assert Sessions(make_ring("a", "b"), b"s" * 32).find(text, now_s=NOW_S) is None


def test_a_session_cannot_be_made_longer_or_another_key_s() -> None:
    sessions = Sessions(make_ring("a", "b"), b"s" * 32)
    key = sessions._keys.find("key_a")
    assert key is not None
    name, expires_at, mac = sessions.begin(key, now_s=NOW_S).split(".")

    assert sessions.find(f"{name}.{int(expires_at) + 1}.{mac}", now_s=NOW_S) is None
    assert sessions.find(f"key_b.{expires_at}.{mac}", now_s=NOW_S) is None


def test_workers_share_one_secret_that_only_the_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "api-keys.sessions"

    assert read_or_make_secret(path) == read_or_make_secret(path)
    assert len(path.read_bytes()) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_workers_replace_what_is_no_secret_by_the_same_one(tmp_path: Path) -> None:
    """Such as lost power may leave."""
    places = {tmp_path / str(len(left)): left for left in (b"", b"short", bytes(32), b"s" * 33)}
    for place, left in places.items():
        place.write_bytes(left)

    with multiprocessing.get_context("spawn").Pool(2) as pool:
        one, other = (pool.map_async(read_or_make_secret, places) for _ in range(2))
        made = one.get()
        assert made == other.get()

    assert made == [place.read_bytes() for place in places]
    for secret, left in zip(made, places.values(), strict=True):
        assert len(secret) == 32 and secret != left[:32]


def test_a_proxy_that_replaces_the_name_of_the_host_is_told_of() -> None:
    came = {"Host": "127.0.0.1:8000", "Origin": "https://batches.example"}
    with pytest.raises(RefusalError, match="a proxy in front must keep `Host`"):
        check_site(make_mocked_request("POST", "/dashboard/login", came))


def test_samples_survive_and_stay_bounded(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = History(path, most=10)
    for at in range(95):
        history.add(Sample(float(at), kv={"0": KvSample(1, 2, 3, 4, 5, None)}))

    assert len(path.read_bytes().splitlines()) <= 20
    with path.open("ab") as file:
        file.write(b'{"at": 1')
    again = History(path, most=10)
    assert [sample.at for sample in again.samples] == [float(at) for at in range(85, 95)]
    assert again.samples[0].kv["0"].reserve == 5


def test_a_file_that_earlier_daemons_left_too_long_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b"".join(page_history._line(Sample(float(at))) for at in range(25)))

    History(path, most=10).add(Sample(25.0))

    assert len(path.read_bytes().splitlines()) == 10


def test_a_disk_that_takes_nothing_costs_no_sample_in_memory(tmp_path: Path) -> None:
    history = History(tmp_path / "no folder" / "history.jsonl")
    history.add(Sample(1.0))

    assert [sample.at for sample in history.samples] == [1.0]


def test_a_chart_has_few_points_and_the_newest(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl", most=page_history.MAX_SAMPLES)
    history._samples.extend(Sample(float(at), rows_per_s=at) for at in range(850))

    times, rows = history.chart(lambda sample: [sample.rows_per_s])

    assert len(times) <= CHART_POINTS
    assert (times[-1], rows[-1]) == (849.0, 849.0)


def test_a_chart_covers_half_an_hour_breaks_at_gaps_and_only_rises(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl")
    ats = (100.0, 3_000.0, 3_002.0, 3_500.0, 3_502.0, 3_504.0, 3_501.0, 3_503.0)
    history._samples.extend(Sample(at, rows_per_s=at) for at in ats)

    times, rows = history.chart(lambda sample: [sample.rows_per_s])

    assert times == [3_000.0, 3_002.0, 3_004.0, 3_500.0, 3_501.0, 3_503.0]
    assert rows == [3_000.0, 3_002.0, None, 3_500.0, 3_501.0, 3_503.0]


@pytest_asyncio.fixture
async def sight(tmp_path: Path) -> AsyncIterator[Sight]:
    """What the page sees of a daemon with an engine that is not there."""
    config = tmp_path / "batchrun.yaml"
    config.write_text(json.dumps({"engines": [{"attach": NOWHERE}]}))
    home = Home(tmp_path / "home")
    home.create()
    supervisor = Supervisor(load_deployment(config), home, {})
    figures = GatewayFigures(NOWHERE, "secret")
    with closing(open_store(home.store_location)) as store:
        daemon = Daemon(store, supervisor.slots, home.inputs)
        status = Status(daemon, supervisor, figures)
        yield Sight(daemon, status, home, History(home.history), figures, "cost")
        await supervisor.close()


NOWHERE = "http://127.0.0.1:9"
USER = Caller("key_a", "key_a")


def add_batch_of_user(sight: Sight) -> JobRecord:
    job = new_batch_job(Path("/srv"), CHAT, deadline_s=60.0, weight=1.0)
    batch = NewBatch("file-1", CHAT, "24h", None, None, "h", owner=USER.owner)
    return add_batch(sight.daemon.store, batch, job, now_s=1.0).job


async def test_a_user_key_sees_no_place_of_the_deployment_s(sight: Sight) -> None:
    job = add_batch_of_user(sight)
    sight.daemon.stages[job.id] = Stage(f"running, waiting to upload: s3://secret: {NOWHERE}")
    error = RowError("connection_error", f"no answer from the engine at {NOWHERE}")
    failed = Outcome(job.id, 0, 1, OutcomeKind.ROW_ERROR, error=error)
    results.commit(sight.daemon.store, [(job.seq, failed)], now_s=2.0)

    seen, told = [await sight.job(caller, job.id) for caller in (USER, Caller())]

    assert "s3://secret" in str(told) and NOWHERE in str(told)
    assert seen["job"]["stage"] == "running, waiting to upload"
    assert seen["causes"][0]["message"] == "no answer from the engine"
    assert NOWHERE not in str(seen)

    async def fail() -> str:
        raise StoreUnreachableError("nothing answers at db.example:5432")

    pages = Pages(sight, cast(Desk, None), Transfers("downloads", 1))
    seen_after, told_after = [await pages.act(caller, fail) for caller in (USER, Caller())]
    assert b"db.example" in told_after.body
    assert b"database does not answer" in seen_after.body and b"db.example" not in seen_after.body


async def test_a_job_without_an_engine_says_so_or_what_it_waits_for(sight: Sight) -> None:
    small, large = slot_of("small", "small"), slot_of("large", "large")
    assert isinstance(large.engine, AttachedEngine)
    sight.daemon.slots = slots = [large, small, slot_of("unwanted", "large")]
    for slot, state in zip(slots[::2], (EnginePhase.FAILED, EnginePhase.STOPPED), strict=True):
        assert isinstance(slot.engine, AttachedEngine)
        slot.engine.state, slot.engine.stage = state, f"{state}: its log says why"
    record = add_batch_of_user(sight)
    job = replace(make_tree_job(record.id, ["a"]), record=record)
    sight.daemon.active[record.seq] = job

    async def told(model: str) -> tuple[object, object]:
        choose_default(slots)
        job.spec = job.spec.model_copy(update={"model": model})
        view = await sight.status.job(record.id)
        return view["engine_failure"], view["stage"]

    why = "engine large: failed: its log says why"
    no_engine = why, f"running, no engine is left: {why}"
    assert await told("large") == await told(DEFAULT_MODEL) == no_engine
    large.models = None
    assert await told("large") == await told(DEFAULT_MODEL) == no_engine
    assert await told("small") == (None, None)
    large.engine.state = EnginePhase.UNREACHABLE
    assert await told("large") == (None, None)
    waits = "running, waiting for engine large to tell its models"
    assert await told(DEFAULT_MODEL) == (None, waits)
    large.last_model = "small"
    assert await told(DEFAULT_MODEL) == (None, None)

    del sight.daemon.active[record.seq]
    assert (await sight.status.job(record.id))["engine_failure"] is None
    sight.daemon.slots = slots[::2]
    large.engine.state = EnginePhase.FAILED
    assert (await sight.status.job(record.id))["engine_failure"] == why


async def test_no_output_is_given_as_that_of_an_earlier_job(sight: Sight) -> None:
    store, home = sight.daemon.store, sight.home
    output = home.path / "out.jsonl"
    output.write_text('{"response": "of the last job"}\n')
    spec = json.dumps({"output": {"path": str(output)}})
    for job_id, now_s in (("job_first", 2.0), ("job_last", 3.0)):
        jobs.create(store, jobs.NewJob("n", spec, "{}", "hash", 1, id=job_id), now_s=1.0)
        jobs.start(store, job_id, now_s=now_s)
        jobs.begin_finalizing(store, job_id, JobState.COMPLETED, now_s=now_s)
        jobs.finish(store, job_id, now_s=now_s)
    app = FastAPI()
    install_error_handlers(app)
    pages = Pages(sight, cast(Desk, None), Transfers("downloads", 1))
    app.include_router(dashboard_router(pages, sight, Callers(store, "secret")))

    transport = httpx.ASGITransport(app)
    headers = {GATEWAY_HEADER: "secret"}
    async with httpx.AsyncClient(transport=transport, base_url=NOWHERE, headers=headers) as page:
        first, last = [
            await page.get(f"/dashboard/jobs/{job_id}/output")
            for job_id in ("job_first", "job_last")
        ]
        links = [
            "Download" in (await page.get(f"/dashboard/jobs/{job_id}")).text
            for job_id in ("job_first", "job_last")
        ]

    assert first.status_code == 409 and "is where job_last wrote its output later" in first.text
    assert last.text == output.read_text()
    assert links == [False, True]


async def test_a_job_that_would_run_while_offline_work_is_off_says_so(sight: Sight) -> None:
    store, stages = sight.daemon.store, []
    record = jobs.create(store, jobs.NewJob("n", "{}", "{}", "hash", 1), now_s=1.0)

    async def see(*, is_on: bool) -> None:
        sight.daemon.dispatcher.is_offline_on = is_on
        stages.append((await sight.status.job(record.id))["stage"])

    await see(is_on=False)
    jobs.start(store, record.id, now_s=2.0)
    await see(is_on=True)
    await see(is_on=False)
    jobs.request_cancel(store, record.id, now_s=3.0)
    await see(is_on=False)

    line = "waiting: offline work is off (`batchrun offline on`)"
    assert stages == [None, None, line, None]


async def test_a_user_key_is_told_whole_that_offline_work_is_off(sight: Sight) -> None:
    job = add_batch_of_user(sight)
    jobs.start(sight.daemon.store, job.id, now_s=2.0)
    sight.daemon.dispatcher.is_offline_on = False

    assert (await sight.job(USER, job.id))["job"]["stage"] == OFFLINE_OFF


class SlotsLookedAt(list[Slot]):
    num_times = 0

    def __iter__(self) -> Iterator[Slot]:
        self.num_times += 1
        return super().__iter__()


async def test_a_snapshot_looks_at_the_engines_as_often_for_many_jobs_as_for_one(
    sight: Sight,
) -> None:
    sight.daemon.slots = slots = SlotsLookedAt([slot_of("a", "model"), slot_of("b", "model")])
    nums = []
    for _ in range(3):
        record = add_batch_of_user(sight)
        sight.daemon.active[record.seq] = replace(make_tree_job(record.id, ["a"]), record=record)
        before = slots.num_times
        await sight.status.snapshot()
        nums.append(slots.num_times - before)
    assert nums == nums[:1] * 3


async def test_limits_of_keys_are_those_that_hold(sight: Sight) -> None:
    store, own = sight.daemon.store, KeyLimits(MAX_COUNT, concurrent_calls=3)
    sight.daemon.key_limits = KeyLimits(6, concurrent_batches=100)
    for name, limits in (("a", own), ("b", NO_LIMITS)):
        api_keys.add(store, NewApiKey(f"key_{name}", name, "user", "0" * 64, None, limits), now_s=1)

    page = render("keys.html", await sight.see("keys", Caller(), None))
    a, b = page.split("<tbody>")[1].split("</tr>")[:2]

    assert "3 calls at once" in a and "100 batches at once" in a and "a minute" not in a
    assert "6 requests a minute" in b and "100 batches at once" in b and "calls at once" not in b


async def test_restarts_are_counted_though_nobody_looks(
    sight: Sight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_history, "SAMPLE_S", 0.01)
    desk = Desk(sight.home, None, "model", Transfers("uploads", 1))
    watching = asyncio.create_task(Pages(sight, desk, Transfers("downloads", 1)).watch())
    engine = sight.daemon.slots[0].engine
    assert isinstance(engine, AttachedEngine)
    for started in (1, 2, 3):
        engine.started, num_seen = started, len(sight.history.samples)
        while len(sight.history.samples) < num_seen + 2:
            await asyncio.sleep(0.01)
    watching.cancel()

    (view,) = (await sight.see("engines", Caller(), None))["engines"]
    assert view["num_restarts"] == 2


async def test_who_asks_for_a_job_that_ended_long_ago_gets_it_while_others_ask(
    sight: Sight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchrun.server.api.picture.MOST_ENDED", 1)
    store, ended = sight.daemon.store, [add_batch_of_user(sight) for _ in range(2)]
    for job in ended:
        jobs.request_cancel(store, job.id, now_s=2.0)
        jobs.finish(store, job.id, now_s=3.0)

    both = asyncio.Barrier(2)

    async def answer(_: web.BaseRequest) -> web.Response:
        await both.wait()
        return web.Response(status=503)

    server = await asyncio.get_running_loop().create_server(web.Server(answer), "127.0.0.1", 0)
    async with server:
        sight.figures.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        asked = [sight.status.snapshot(job) for job in (ended[0].id, None)]
        told = [cast(Any, picture["jobs"]) for picture in await asyncio.gather(*asked)]

    ids = [job.id for job in ended]
    assert [[view["id"] for view in views] for views in told] == [ids, ids[1:]]


async def test_a_daemon_that_stands_by_says_where_the_page_is() -> None:
    server = LocalServer()
    server._listener.close()
    asgi = httpx.ASGITransport(make_app(cast(Standby, None), server))
    async with httpx.AsyncClient(transport=asgi, base_url="http://here") as client:
        reply = await client.get("/dashboard/jobs")

    assert (reply.status_code, reply.headers["content-type"][:9]) == (503, "text/html")
    assert reply.text == f"{STANDS_BY}: the page is there\n"
    assert for_strangers(NotLeadingError("machine:/srv leads")) == STANDS_BY


class Skeleton(HTMLParser):
    """The tags of a page with the names of their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[str, tuple[str, ...]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.parts.append((tag, tuple(name for name, _ in attrs)))


def skeleton_of(text: str) -> list[tuple[str, tuple[str, ...]]]:
    parser = Skeleton()
    parser.feed(text)
    return parser.parts


def make_facts() -> dict[str, Any]:
    """What all templates need, as the daemon makes it."""
    record = JobRecord(
        1, "job_0000000000", "name", JobState.PAUSED, "{}", "{}", "hash", 10, NOW_S, NOW_S + 60,
        NOW_S, None, None, "a reason",
    )  # fmt: skip
    link = EngineLink(EngineSockets(Path("/nowhere")), "engine")
    kv = KvTelemetry(100, 10, 20, 70, 10, 10, 10, 20, 20, 15, 12)
    cost = CostTelemetry(1.1, 5, 0.1, 0.2, 0.1, 0.2, 0.01, 0.02, 0.01, 0.02)
    link._latest = (
        time.monotonic(),
        Telemetry("start", NOW_S, "echo", 2048, is_offline_on=True, kv=kv, cost=cost),
    )
    job = view_job(record, Counts(3, 2, 100, 50, 20)) | {
        "stage": "reading", "deadline_outlook": "late by 3 s", "is_deadline_kept": False,
        "actions": ["resume", "cancel"], "is_terminal": False, "output_path": "/out",
        "planned_answer_tokens": 5, "mean_answer_tokens": 4.5, "eta_low_s": 3.0, "eta_high_s": 9.0,
        "engine_s": 90.0, "cost": 0.5, "num_cut": 2,
        "on_done": {"target": "webhook https://x", "state": "waiting", "num_tries": 2,
                    "next_at": NOW_S, "said": "HTTP 500"},
    }  # fmt: skip
    engine = {
        "name": "engine-0", "url": "http://x", "state": "ready", "stage": "a stage", "in_flight": 3,
        "kv": {"tokens": 100, "block_tokens": 16}, "telemetry": view_engine(link),
        "promises": {"num_first": 4, "num_late_first": 1, "num_answers": 3, "num_late_answers": 0},
        "num_restarts": 1, "log": "a line\nanother",
    }  # fmt: skip
    chart = [[1.0, 2.0], [3.0, None], [4.0, 5.0], [1.0, 1.0], [1.0, 1.0]]
    return {
        "job": job, "jobs": [job], "most": 1, "is_admin": True, "engines": [engine],
        "causes": [{"code": "code", "message": "message", "num_rows": 2, "rows": [1, 2]}],
        "most_errors": 1, "answers": None,
        "shape": {"num_groups": 1, "num_alone": 2, "largest": [4], "mean_shared_bytes": 5.0,
                  "max_shared_bytes": 6},
        "chart": chart, "charts": {"engine-0": chart}, "last": Sample(NOW_S),
        "keys": [{"id": "key_1", "name": "team", "role": "user", "slo_class": "chat",
                  "limits": ["1 requests a minute"],
                  "is_revoked": True, "batches": KeyUsage(1, Counts()),
                  "online": {"num_calls": 1, "num_prompt_tokens": 2, "num_output_tokens": 3}}],
        "felt": [{"latency": "TTFT", "slo_class": "chat", "num_calls": 3, "mean_s": 0.1,
                  "p50_s": 0.1, "p99_s": None}],
        "router": "cost", "why": "For a reason.", "num_calls": 4, "imbalance": 1.5,
        "known": {"engine-0": {"agreement": 0.9, "num_pieces": 12}},
        "decisions": [{"prompt_tokens": 900.0, "told_cached_tokens": None, "chosen": SIDE,
                       "runner_up": None},
                      {"prompt_tokens": 900.0, "told_cached_tokens": 512.0, "chosen": SIDE,
                       "runner_up": SIDE | {"engine": None, "price_s": None}}],
        "has_output": True, "models": ["fake", "other"], "default_model": "fake",
        "draft": {"id": "abc", "filename": "rows.csv", "size_bytes": 1234, "state": "checked",
                  "is_busy": False, "found": {"rows": "2", "warning": "too long"},
                  "message": None, "job_id": None},
        "message": "a message", "is_error": True,
        "token": "0" * 64, "is_offline_on": True, "num_ready": 1, "num_engines": 2,
        "num_running": 1, "rows_per_s": 1.0, "slack_s": -0.1, "stalled": "the disk is full",
    }  # fmt: skip


SIDE = {"engine": "engine-0", "cached_tokens": 512.0, "price_s": 1.0, "queue_s": 0.5,
        "prefill_s": 0.2, "delays_s": 0.1, "evicted_s": 0.0, "decodes_s": 0.2,
        "slot_s": 0.0}  # fmt: skip
KEPT = {"actions", "state"}
"""Words of ours, not of anybody else's."""


def poisoned(value: Any, text: str, *, key: str = "") -> Any:
    """The same facts with another text in every place that holds one."""
    if key in KEPT:
        return value
    if isinstance(value, str):
        return text
    if isinstance(value, list):
        return [poisoned(each, text) for each in value]
    if isinstance(value, dict):
        return {name: poisoned(each, text, key=name) for name, each in value.items()}
    return value


ATTACKS = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)", '" autofocus onfocus="alert(1)', "</td></table><h1>x</h1>",
    "javascript:alert(1)", "<iframe srcdoc='<script>1</script>'>", "{{ 7 * 7 }}", "{% raw %}",
    "</pre><b>x</b>", "</title><script>1</script>", "<!-- ", "-->", "<style>*{}</style>",
    "' hx-on:click='alert(1)", '" hx-get="https://evil.example', "</span><a href=//evil>",
    "\r\nevent: view\r\ndata: <b>x</b>", "\u2028data: <script>", "&lt;b&gt;", "<<b>>", "a\x00b<i>",
    "<math><mi//xlink:href='data:x'>", "]]><script>",
]  # fmt: skip
TEMPLATES = (*VIEWS, "draft", "job", "notice", "header")


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_of_others_stays_text(name: str) -> None:
    """25 attacks in every place of eleven templates: no tag and no attribute is added."""
    facts = make_facts()
    if name == "routing":
        facts["engines"] = [EngineCalls("engine-0", 1, 2, 1, 3)]
    plain = skeleton_of(render(f"{name}.html", facts))
    assert len(plain) > 0

    for attack in ATTACKS:
        bad = poisoned(facts, attack) | {"charts": {attack: facts["chart"]}}
        if name == "routing":
            bad["engines"] = [EngineCalls(attack, 1, 2, 1, 3)]
        assert skeleton_of(render(f"{name}.html", bad)) == plain, attack


def test_the_page_of_keys_says_who_is_let_in_where_there_are_none() -> None:
    facts = make_facts() | {"keys": []}
    pages = [render("keys.html", facts | {"asks_for_none": each}) for each in (True, False)]
    assert ["nobody is let in" in page for page in pages] == [False, True]


def test_a_token_is_a_caller_s_own() -> None:
    made = Tokens()

    tokens = {made.of(caller) for caller in (Caller(), Caller("key_a"), Caller("key_b"))}

    assert len(tokens) == 3


@pytest.mark.parametrize("at", [1e12, 1e18, 1e300, math.inf])
def test_a_deadline_may_be_beyond_all_calendars(at: float) -> None:
    assert FILTERS["instant"](at) == "after the year 9999"
    assert FILTERS["duration"](at)


async def test_pages_of_users_leave_room_for_who_runs_the_deployment() -> None:
    pages = Pages(cast(Sight, None), cast(Desk, None), Transfers("downloads", 1))

    async def check() -> None:
        return

    async with AsyncExitStack() as stack:

        async def watch(caller: Caller) -> None:
            events = pages.stream("jobs", caller, None, check).body_iterator
            await stack.enter_async_context(aclosing(cast(AsyncGenerator[Any, None], events)))
            await anext(aiter(events))

        for number in range(MAX_STREAMS_OF_USERS):
            owner = f"key_{number // MAX_STREAMS_OF_A_KEY}"
            await watch(Caller(owner, owner))
        with pytest.raises(HTTPException, match="user keys"):
            await watch(Caller("key_9", "key_9"))
        for _ in range(MAX_STREAMS - MAX_STREAMS_OF_USERS):
            await watch(Caller("key_ops"))
        with pytest.raises(HTTPException, match="pages are open;"):
            await watch(Caller("key_ops"))


async def test_nothing_more_comes_once_the_key_of_a_page_is_revoked(sight: Sight) -> None:
    store, pages = sight.daemon.store, Pages(sight, cast(Desk, None), Transfers("downloads", 1))
    api_keys.add(store, NewApiKey("key_a", "a", "user", "0" * 64), now_s=1.0)
    headers = [(GATEWAY_HEADER, "secret"), (CALLER_HEADER, "key_a")]
    told = [(name.lower().encode(), value.encode()) for name, value in headers]
    request = Request({"type": "http", "headers": told})

    async def check() -> None:
        await Callers(store, "secret").check(request)

    events = aiter(pages.stream("jobs", USER, None, check).body_iterator)
    for part in ("retry: ", "event: header", "event: view"):
        assert str(await anext(events)).startswith(part)
    api_keys.revoke(store, "key_a", now_s=2.0)
    with pytest.raises(StopAsyncIteration):
        await anext(events)


async def test_a_page_outlives_a_store_that_is_away_for_a_while(
    sight: Sight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_streams, "UPDATE_S", 0.0)
    pages = Pages(sight, cast(Desk, None), Transfers("downloads", 1))

    async def check() -> None:
        raise StoreUnreachableError("db: cannot be reached")

    events = aiter(pages.stream("jobs", USER, None, check).body_iterator)
    for part in ("retry: ", "event: header", "event: view"):
        assert str(await anext(events)).startswith(part)
    job = add_batch_of_user(sight)
    assert job.id in str(await anext(events))
    monkeypatch.setattr(page_streams, "MAX_UNCHECKED_S", -1.0)
    with pytest.raises(StopAsyncIteration):
        await anext(events)


async def test_no_job_is_a_view_that_there_is_not(sight: Sight) -> None:
    pages = Pages(sight, cast(Desk, None), Transfers("downloads", 1))

    async def check() -> None:
        return

    with pytest.raises(HTTPException, match="no such view: job"):
        pages.stream("job", Caller(), None, check)
    with pytest.raises(HTTPException, match="no such view: job"):
        await pages.page("job", Caller())


def test_charts_carry_numbers_only() -> None:
    text = render("tide.html", make_facts())
    columns = text.split('data-columns="')[1].split('"')[0]

    assert json.loads(columns.replace("&#34;", '"'))[0] == [1.0, 2.0]


def make_reply(ttft_s: float | None = 0.12, *, slo_class: str = "chat") -> SeenReply:
    return SeenReply(slo_class, "engine-0", ttft_s, 0.02, 100, 40, 10)


def test_workers_count_together_and_a_restarted_one_goes_on() -> None:
    fd = create_tally(2)
    first, second = (Tally(fd, 2, worker) for worker in (0, 1))
    first.count_call("/v1/models", 200)
    second.count_call("/v1/models", 200)
    Tally(fd, 2, 1).count_call("/v1/models", 200)

    (series,) = first.read()

    assert (series.labels, series.values[0]) == (("/v1/models", "200"), 3.0)


def test_the_page_has_histograms_by_class_that_add_up() -> None:
    tally = Tally(create_tally(1), 1, 0)
    for seconds in (0.005, 0.12, 0.12, 100.0):
        tally.count_reply(make_reply(seconds))
    tally.count_reply(make_reply(None, slo_class="flex"))

    text = TallyPage(tally, list, list).render(is_daemon_up=False).decode()

    assert 'batchrun_gateway_ttft_seconds_bucket{class="chat",le="0.15"} 3.0' in text
    assert 'batchrun_gateway_ttft_seconds_bucket{class="chat",le="+Inf"} 4.0' in text
    assert 'batchrun_gateway_ttft_seconds_count{class="chat"} 4.0' in text
    assert 'ttft_seconds_count{class="flex"}' not in text
    assert 'batchrun_gateway_engine_cached_tokens_total{engine="engine-0"} 200.0' in text
    assert "batchrun_daemon_up 0.0" in text


def test_more_series_than_there_is_room_for_are_not_counted_and_once_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tally = Tally(create_tally(1), 1, 0)
    for number in range(MAX_ENGINES):
        bounds = SloBounds(1.0, 0.1)
        tally.count_reply(replace(make_reply(), engine=f"engine-{number}", bounds=bounds))
    series = [each for each in tally.read() if each.kind in {ENGINE, FELT}]
    for status in range(MAX_SERIES):
        tally.count_call("/v1/models", status)

    assert len(series) == 2 * MAX_ENGINES
    assert len(tally.read()) == MAX_SERIES
    assert len(caplog.messages) == 1


def told_by(tally: Tally) -> bytes:
    rows = [(each.kind, each.labels, each.values.tolist()) for each in tally.read()]
    return json.dumps(rows).encode()


def test_figures_are_of_the_last_minutes() -> None:
    tally = Tally(create_tally(1), 1, 0)
    tally.count_reply(make_reply(5.0))
    figures = GatewayFigures("http://unused", "secret")
    figures.take(told_by(tally), 0.0)
    for _ in range(4):
        tally.count_reply(make_reply(0.12))
    figures.take(told_by(tally), 10.0)

    (felt,) = figures.felt(TTFT)

    assert felt.num_calls == 4
    assert felt.mean_s == pytest.approx(0.12)
    assert felt.quantile_s(0.99, TTFT_BOUNDS_S) == 0.15
    ttft = next(each for each in figures.view() if each["latency"] == "TTFT")
    assert (ttft["num_calls"], ttft["p50_s"], ttft["p99_s"]) == (4, 0.15, 0.15)
    assert figures.engines() == [EngineCalls("engine-0", 4, 400, 160, 40)]
    assert figures.tokens_per_s == pytest.approx(4 * (100 - 40 + 10) / 10.0)
    figures.take(told_by(tally), 11.0 + WINDOW_S)
    assert figures.felt(TTFT) == []


def test_what_callers_feel_is_counted_by_engine_against_the_bounds_of_each_call() -> None:
    tally = Tally(create_tally(1), 1, 0)
    tight, loose = SloBounds(0.1, 0.01), SloBounds(1.0, 0.05)
    for ttft_s, bounds in ((0.12, tight), (0.12, loose), (5.0, loose), (0.12, None)):
        tally.count_reply(replace(make_reply(ttft_s), bounds=bounds))
    tally.count_reply(replace(make_reply(None), tpot_s=None, bounds=loose))
    figures = GatewayFigures("http://unused", "secret")
    assert figures.felt_calls() is None
    figures.take(told_by(Tally(create_tally(1), 1, 0)), 0.0)
    assert (figures.felt_calls(), figures.promises("engine-0")) == ({}, None)

    figures.take(told_by(tally), 2.0)

    assert figures.felt_calls() == {"engine-0": FeltCalls(3, 2, 3, 1)}
    seen = {"num_first": 3, "num_late_first": 2, "num_answers": 3, "num_late_answers": 1}
    assert figures.promises("engine-0") == seen
    text = TallyPage(tally, list, list).render(is_daemon_up=False).decode()
    assert 'batchrun_gateway_late_calls_total{engine="engine-0",latency="ttft"} 2.0' in text


def test_another_gateway_begins_anew() -> None:
    tally = Tally(create_tally(1), 1, 0)
    tally.count_reply(make_reply())
    figures = GatewayFigures("http://unused", "secret")
    figures.take(told_by(tally), 0.0)
    figures.take(told_by(Tally(create_tally(1), 1, 0)), 2.0)

    assert figures.engines() == []


@pytest_asyncio.fixture
async def nonsense_url() -> AsyncIterator[str]:
    """A server that answers every call with something that is no tally."""

    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(text='{"calls": 3}')

    server = await asyncio.get_running_loop().create_server(web.Server(answer), "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_gateway_that_tells_nonsense_is_looked_at_again(nonsense_url: str) -> None:
    figures = GatewayFigures(nonsense_url, "secret")
    async with aiohttp.ClientSession() as session:
        await figures.look(session, 0.0)

    assert figures.engines() == []
    assert figures.tokens_per_s is None
