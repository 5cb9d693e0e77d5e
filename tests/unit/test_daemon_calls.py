"""How long the gateway waits for what the daemon answers, on a clock that goes on by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import make_mocked_request
from instant_loop import InstantLoop
from multidict import CIMultiDict, CIMultiDictProxy

from batchrun.server.gateway.admission import ABOUT_CALLER, AboutCaller
from batchrun.server.gateway.daemon_calls import DAEMON_HEAD_S, DaemonCalls
from batchrun.server.web.pages import QUIET_S

OPENING, QUIET = b"retry: 1000\n\nevent: view\ndata: x\n\n", b": nothing new\n\n"


class PageStream(SimpleNamespace):
    """A reply as aiohttp has it: the daemon's stream for a page that changes no more. Once it has
    sent these pieces, it hangs."""

    status, reason, host, content_type = 200, "OK", "127.0.0.1", "text/event-stream"
    headers = CIMultiDictProxy(CIMultiDict({"Content-Type": "text/event-stream"}))

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        protocol = BaseProtocol(loop)
        protocol.connection_made(asyncio.Transport())
        self.content = StreamReader(protocol, 2**30, loop=loop)
        self._sending = loop.create_task(self._send())

    async def __aexit__(self, *_: object) -> None:
        self._sending.cancel()

    async def _send(self) -> None:
        for piece in self.pieces:
            self.content.feed_data(piece)
            await asyncio.sleep(QUIET_S)


def stream_s(home: Path, pieces: Sequence[bytes]) -> float:
    """For how long the gateway passes on a stream of the daemon's."""
    upstreams = home / "upstreams.json"
    upstreams.write_text(json.dumps({"engines": [], "daemon": {"url": "http://127.0.0.1:9"}}))

    async def answer(*_: Any, **__: Any) -> Any:
        return PageStream(pieces=pieces)

    async def pass_on() -> float:
        session: Any = SimpleNamespace(request=answer)
        calls = DaemonCalls(session, upstreams, body_idle_s=30.0)
        request = make_mocked_request("GET", "/dashboard/events/jobs")
        request[ABOUT_CALLER] = AboutCaller()
        await calls.pass_on(request, "req_1")
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        return runner.run(pass_on())


def test_a_page_on_which_nothing_changes_stays_connected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pieces = [OPENING, *[QUIET] * 20]
    last_s = QUIET_S * (len(pieces) - 1)

    assert stream_s(tmp_path, pieces) == pytest.approx(last_s + DAEMON_HEAD_S, abs=1.0)
    assert "the daemon stopped in the middle of its answer" in caplog.text
    assert "engine" not in caplog.text
