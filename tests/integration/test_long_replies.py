"""Long replies are taken in a few at a time, and those of one engine do not wait for another's; of
large requests only so many are in flight."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from image_builders import data_url_of, picture

from batchrun.daemon import in_flight
from batchrun.daemon.daemon import Daemon
from batchrun.daemon.dispatch import ROWS_PER_READ
from batchrun.daemon.engine_link import Slot
from batchrun.daemon.writer import MAX_LONG_REPLIES
from batchrun.engine.command import AttachedSettings
from batchrun.engine.engine import AttachedEngine
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.submit import prepare_job
from batchrun.pool.row_queue import Window
from batchrun.store import jobs, results
from batchrun.store.database import open_store
from batchrun.store.jobs import JobRecord
from batchrun.types import JobState

JOB = """\
name: sample
model: MODEL
input: {path: rows.parquet, messages: [{role: user, content: "{{ text }}"}]}
output: {path: out.parquet}
"""
PICTURES = """\
name: pictures
model: one
input:
  path: rows.parquet
  messages: [{role: user, content: [{image: {column: image}}, {type: text, text: short}]}]
output: {path: out.parquet}
"""
LONG_CHARS = 100_000


class OddEngine:
    """An engine with one model that answers "short" or at length, or drips where it `drips`;
    what has pictures once they are `seen`."""

    def __init__(self, model: str, *, drips: bool = False) -> None:
        self.model, self.drips = model, drips
        self.num_replies = self.num_with_pictures = 0
        self.seen = asyncio.Event()
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answer)
        self.server = TestServer(app)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.text()
        if "image_url" in body:
            self.num_with_pictures += 1
            await self.seen.wait()
        text = "x" * (9 if "short" in body else LONG_CHARS)
        if self.drips:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b'{"choices": [{"text": "' + text.encode())
            self.num_replies += 1
            while True:
                await asyncio.sleep(0.05)
                await response.write(b"x")
        self.num_replies += 1
        message = {"role": "assistant", "content": text}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})


@asynccontextmanager
async def daemon_of(folder: Path, *engines: OddEngine) -> AsyncIterator[Daemon]:
    """A daemon in this process with these engines."""
    async with AsyncExitStack() as ends:
        store = open_store(folder / "store.db")
        ends.callback(store.close)
        slots = []
        for odd in engines:
            await ends.enter_async_context(odd.server)
            url = str(odd.server.make_url("")).rstrip("/")
            engine = AttachedEngine(AttachedSettings(name=odd.model, url=url))
            await engine.start()
            ends.push_async_callback(engine.stop)
            window = Window(32, 400_000)
            slots.append(Slot(engine, uses_priority=False, window=window, models=None))
        (folder / "inputs").mkdir()
        daemon = Daemon(store, slots, folder / "inputs")
        running = asyncio.create_task(daemon.run())
        try:
            yield daemon
        finally:
            running.cancel()
            await asyncio.wait([running])


async def submit(daemon: Daemon, folder: Path, model: str, *texts: str) -> JobRecord:
    """Submit a job of these rows."""
    pq.write_table(pa.table({"text": list(texts)}), folder / "rows.parquet")
    (folder / "job.yaml").write_text(JOB.replace("MODEL", model))
    spec = load_job_file(folder / "job.yaml", cwd=folder)
    return await daemon.submit(prepare_job(spec, links=daemon.links))


async def until_completed(daemon: Daemon, record: JobRecord) -> None:
    async with asyncio.timeout(60):
        while jobs.get(daemon.store, record.id).state is not JobState.COMPLETED:
            await asyncio.sleep(0.05)


async def test_replies_of_rows_wait_for_the_room_that_the_writer_has(tmp_path: Path) -> None:
    engine = OddEngine("one")
    async with daemon_of(tmp_path, engine) as daemon:
        async with AsyncExitStack() as taken, asyncio.timeout(60):
            for _ in range(MAX_LONG_REPLIES):
                await taken.enter_async_context(daemon.writer.room("one"))
            record = await submit(daemon, tmp_path, "one", *["long"] * 9, "short")
            while engine.num_replies < 10 or not len(results.done_rows(daemon.store, record.seq)):
                await asyncio.sleep(0.05)
            assert results.done_rows(daemon.store, record.seq).tolist() == [9]
        await until_completed(daemon, record)


async def test_replies_that_drip_hold_up_no_other_engine(tmp_path: Path) -> None:
    bad, good = OddEngine("bad", drips=True), OddEngine("good")
    async with daemon_of(tmp_path, bad, good) as daemon:
        await submit(daemon, tmp_path, "bad", *["long"] * 2 * MAX_LONG_REPLIES)
        async with asyncio.timeout(60):
            while bad.num_replies < 2 * MAX_LONG_REPLIES:
                await asyncio.sleep(0.05)
        await until_completed(daemon, await submit(daemon, tmp_path, "good", *["long"] * 9))


async def test_rows_with_pictures_wait_for_others_and_hold_up_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = picture(seed=77, size=(200, 200))
    monkeypatch.setattr(in_flight, "MAX_BODIES_BYTES", 3 * len(image))
    engine = OddEngine("one")
    async with daemon_of(tmp_path, engine) as daemon:
        pq.write_table(pa.table({"image": [image] * 40}), tmp_path / "rows.parquet")
        (tmp_path / "job.yaml").write_text(PICTURES)
        spec = load_job_file(tmp_path / "job.yaml", cwd=tmp_path)
        pictures = await daemon.submit(prepare_job(spec, links=daemon.links))
        async with asyncio.timeout(60):
            while engine.num_with_pictures < ROWS_PER_READ:
                await asyncio.sleep(0.01)
        (tmp_path / "texts").mkdir()
        texts = await submit(daemon, tmp_path / "texts", "one", *["short"] * 40)
        await until_completed(daemon, texts)
        assert engine.num_with_pictures == ROWS_PER_READ, "what was read at once"
        dicts = [each for each in gc.get_objects() if type(each) is dict]
        kept = [each for each in dicts if each.get("url") == data_url_of(image)]
        assert not kept, "bodies in flight are kept once, as they are sent"
        engine.seen.set()
        await until_completed(daemon, pictures)
