"""Pages of files and batches: bounded in bytes, and written beside the loop that serves others."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType

import httpx
import pytest
from fastapi import Depends, FastAPI, Request
from store_builders import add_batch

from batchrun.daemon.daemon import Daemon
from batchrun.jobs.batch import new_batch_job
from batchrun.jobs.results.file_bytes import FileBytes
from batchrun.server.api import files as api_files
from batchrun.server.api.batches import Batches, batches_router
from batchrun.server.api.errors import Caller
from batchrun.server.api.files import Files, files_router
from batchrun.server.api.upload import Traffic
from batchrun.store import files
from batchrun.store.batches import NewBatch
from batchrun.store.database import Store, open_store
from batchrun.store.files import NewFile

CHAT = "/v1/chat/completions"


async def let_in(request: Request) -> None:
    request.state.caller = Caller(owner=request.headers.get("owner"))


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Of a daemon with seven files and seven batches, each of over 1,000 bytes."""
    store = open_store(tmp_path / "store.db")
    for number in range(7):
        add(store, number)
    app = FastAPI()
    daemon = Daemon(store, [], tmp_path)
    guards = [Depends(let_in)]
    app.include_router(batches_router(Batches(daemon, tmp_path, ["24h"]), guards))
    app.include_router(files_router(Files(store, FileBytes(tmp_path), Traffic()), guards))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://daemon/v1/") as made:
        yield made
    store.close()


def add(store: Store, number: int) -> None:
    new = NewFile("\u4e00" * 200, "batch", 1, "0" * 64, None)
    files.add(store, new, now_s=float(number))
    job = new_batch_job(Path("/srv"), CHAT, deadline_s=86_400, weight=1)
    asked = NewBatch("file-1", CHAT, "24h", {"a": "x" * 1_000}, None, "r")
    add_batch(store, asked, job, now_s=float(number))


@pytest.mark.parametrize("kind", ["files", "batches"])
async def test_a_page_ends_where_it_is_large_and_the_next_goes_on(
    client: httpx.AsyncClient, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (await client.get(kind)).json()
    monkeypatch.setattr(api_files, "MAX_PAGE_BYTES", 3_000)

    pages = [(await client.get(kind, params={"limit": 4})).json()]
    while pages[-1]["has_more"]:
        cursor = {"limit": 4, "after": pages[-1]["last_id"]}
        pages.append((await client.get(kind, params=cursor)).json())

    assert not whole["has_more"]
    assert [item for page in pages for item in page["data"]] == whole["data"]
    assert 1 < max(len(page["data"]) for page in pages) < 4
    for page in (whole, *pages):
        ids = [item["id"] for item in page["data"]]
        assert (page["object"], page["first_id"], page["last_id"]) == ("list", ids[0], ids[-1])


@pytest.mark.parametrize("kind", ["files", "batches"])
async def test_the_loop_writes_no_page(client: httpx.AsyncClient, kind: str) -> None:
    called = set()

    def profile(frame: FrameType, what: str, _argument: object) -> None:
        called.add(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        reply = await client.get(kind)
    finally:
        sys.setprofile(None)

    assert len(reply.json()["data"]) == 7
    assert "list" in called
    assert called & {"file_object", "batch_object", "dumps"} == set()


@pytest.mark.parametrize("kind", ["files", "batches"])
async def test_a_page_waits_for_one_other_however_many_another_key_asks_for(
    client: httpx.AsyncClient, kind: str
) -> None:
    served = list[str]()

    async def ask(owner: str) -> None:
        await client.get(kind, headers={"owner": owner})
        served.append(owner)

    await asyncio.gather(*map(ask, ["greedy"] * 9 + ["victim"]))

    assert served.index("victim") <= 2
