"""An engine that takes calls and rows and says nothing: each ends by itself, within its bound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deployment_rig import JOB_FILE, DeploymentRig
from gateway_rig import Gateway, running_engine, running_gateway, write_upstreams

from benchmarks.deployment import free_port

HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TIMEOUTS = {"first_token_s": 0.3, "between_tokens_s": 0.3, "answer_s": 0.3}


def write_list(path: Path, *urls: str, **timeouts: float) -> None:
    """The engines, with these bounds for calls."""
    write_upstreams(path, urls)
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"timeouts": TIMEOUTS | timeouts}))


async def status_of(gateway: Gateway, body: object) -> tuple[int, dict[str, Any], int]:
    """The status, the error, and in how many seconds to try again."""
    async with gateway.post(body) as reply:
        document = await reply.json()
        return reply.status, document.get("error", {}), int(reply.headers.get("Retry-After", 0))


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_call_without_an_answer_is_504(tmp_path: Path, *, is_stream: bool) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as engine:
        write_list(upstreams, engine.url)
        async with running_gateway(upstreams) as gateway:
            status, error, again_s = await status_of(
                gateway, {"model": "hold", "stream": is_stream}
            )
            assert (status, error["type"]) == (504, "server_error")
            assert "did not answer in time" in error["message"] and again_s > 0
            assert (await status_of(gateway, HELLO))[0] == 200


@pytest.mark.parametrize(("num_pieces", "words"), [(0, "in time"), (1, "stopped in the middle")])
async def test_a_stream_that_stops_ends_with_an_error_event(
    tmp_path: Path, num_pieces: int, words: str
) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as engine:
        write_list(upstreams, engine.url)
        for _ in range(num_pieces):
            engine.gate.release()
        body = HELLO | {"model": "gated", "stream": True}
        async with running_gateway(upstreams) as gateway, gateway.post(body) as reply:
            assert reply.status == 200
            *_, last = (await reply.text()).strip().split("\n\n")
        error = json.loads(last.strip().removeprefix("data: "))["error"]
        assert words in error["message"]


async def test_an_engine_whose_calls_fail_is_left_alone_until_one_succeeds(tmp_path: Path) -> None:
    upstreams, port = tmp_path / "upstreams.json", free_port()
    write_list(upstreams, f"http://127.0.0.1:{port}")
    async with running_gateway(upstreams) as gateway:
        for _ in range(3):
            assert (await status_of(gateway, HELLO))[0] == 503
        status, error, again_s = await status_of(gateway, HELLO)
        assert status == 503 and "gets none now" in error["message"] and again_s >= 1
        async with gateway.session.get(gateway.url + "/metrics") as reply:
            page = await reply.text()
        assert 'batchrun_gateway_engine_ejections_total{engine="engine-0"} 1.0' in page
        async with running_engine(port=port) as engine:
            while (await status_of(gateway, HELLO))[0] != 200:
                pass
            assert len(engine.seen) == 1
            assert (await status_of(gateway, HELLO))[0] == 200


async def test_calls_that_hang_eject_an_engine_and_go_elsewhere(tmp_path: Path) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as hung, running_engine() as well:
        write_list(upstreams, hung.url)
        async with running_gateway(upstreams) as gateway:
            for _ in range(3):
                assert (await status_of(gateway, HELLO | {"model": "hold"}))[0] == 504
            num_seen = len(hung.seen)
            write_list(upstreams, hung.url, well.url)
            while not well.seen:
                assert (await status_of(gateway, HELLO))[0] in {200, 503}
            assert len(hung.seen) == num_seen


def errors(rig: DeploymentRig) -> list[str | None]:
    """The code of each row's error in the output."""
    texts = [row["error"] for row in rig.output()]
    return [None if text is None else json.loads(text)["code"] for text in texts]


def test_a_row_without_an_answer_is_tried_again_and_then_fails(rig: DeploymentRig) -> None:
    hang = {"match": {"substring": "hangs"}, "action": {"hang": True}}
    rig.use_fake_engine(rules=[hang], timeouts={"row": 1})
    job = rig.submit_rows("hangs", "well", job=JOB_FILE + "retries: 1\n")
    view = rig.wait_until_ended(job)

    assert (view["state"], view["num_completed"], view["num_failed"]) == ("completed", 1, 1)
    assert errors(rig) == ["timeout", None]
    assert len(rig.executions()) == 3


def test_a_job_without_a_deadline_ends_by_the_deployments_bound(rig: DeploymentRig) -> None:
    hang = {"match": {"substring": "hangs"}, "action": {"hang": True}}
    rig.use_fake_engine(rules=[hang], timeouts={"job": 2})
    job = rig.submit_rows("hangs", "well")
    view = rig.wait_until_ended(job)

    assert view["state"] == "expired"
    assert errors(rig)[0] == "job_expired"
