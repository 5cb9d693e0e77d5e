"""An engine that takes calls and rows and says nothing: each ends by itself, within its bound."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from deployment_rig import JOB_FILE, DeploymentRig
from gateway_rig import CHAT, Gateway, running_engine, running_gateway, write_upstreams

from batchrun.server.gateway.forward import YOUNG_S
from benchmarks.deployment import free_port

HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
EJECTIONS = 'batchrun_gateway_engine_ejections_total{engine="engine-0"}'
TIMEOUTS = {"first_token_s": 0.3, "between_tokens_s": 0.3, "answer_s": 0.3}


def write_list(path: Path, *urls: str, **more: object) -> None:
    """The engines, with bounds for calls and what else the list says."""
    write_upstreams(path, urls)
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"timeouts": TIMEOUTS} | more))


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


async def figures_of(gateway: Gateway) -> str:
    async with gateway.session.get(gateway.url + "/metrics") as reply:
        return await reply.text()


@pytest.mark.parametrize(
    ("path", "num_pieces", "words"),
    [(CHAT, 0, "in time"), ("/v1/responses", 0, "in time"), (CHAT, 1, "stopped in the middle")],
)
@pytest.mark.parametrize("model", ["gated", "commented"])
async def test_a_stream_that_stops_ends_with_an_error_event(
    tmp_path: Path, path: str, num_pieces: int, words: str, model: str
) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as engine:
        write_list(upstreams, engine.url)
        for _ in range(num_pieces):
            engine.gate.release()
        body = HELLO | {"model": model, "stream": True}
        body |= {"n_chunks": num_pieces} if model == "commented" else {}
        async with running_gateway(upstreams) as gateway, gateway.post(body, path=path) as reply:
            assert reply.status == 200
            *_, last = (await reply.text()).strip().split("\n\n")
        error = json.loads(last.strip().removeprefix("data: "))["error"]
        assert words in error["message"]


async def test_a_response_that_has_begun_and_may_pause_is_waited_for(tmp_path: Path) -> None:
    upstreams, path = tmp_path / "upstreams.json", "/v1/responses"
    async with running_engine() as engine:
        write_list(upstreams, engine.url, timeouts={"first_token_s": 1.0})
        body = HELLO | {"model": "gated", "stream": True, "n_chunks": 1}
        may_pause = body | {"tools": [{"type": "x"}]}
        async with running_gateway(upstreams) as it, it.post(may_pause, path=path) as pausing:
            async with it.post(body, path=path) as plain:
                assert b"in time" in await plain.read()
            await engine.hung_up.wait()
            engine.gate.release()
            assert b"[DONE]" in await pausing.read()


@pytest.mark.parametrize(
    ("said", "breaks_off", "told"),
    [
        ('{"detail": "too long"}', False, "too long"),
        ('{"detail": "too', False, "the server answered 400 Bad Request"),
        ('{"detail": "too', True, "the server answered 400 Bad Request"),
    ],
)
async def test_a_refusal_that_does_not_end_keeps_its_status(
    tmp_path: Path, said: str, told: str, *, breaks_off: bool
) -> None:
    upstreams = tmp_path / "upstreams.json"
    call = {"model": "torn", "status": "400 Oh", "said": said, "breaks_off": breaks_off}
    async with running_engine() as engine:
        write_list(upstreams, engine.url)
        async with running_gateway(upstreams) as gateway:
            status, error, again_s = await status_of(gateway, call)
            assert (status, error["message"], again_s) == (400, told, 0)


async def test_an_engine_whose_calls_fail_is_left_alone_until_one_succeeds(tmp_path: Path) -> None:
    upstreams, port = tmp_path / "upstreams.json", free_port()
    write_list(upstreams, f"http://127.0.0.1:{port}")
    async with running_gateway(upstreams) as gateway:
        for _ in range(3):
            assert (await status_of(gateway, HELLO))[0] == 503
        status, error, again_s = await status_of(gateway, HELLO)
        assert status == 503 and "gets none now" in error["message"] and again_s >= 1
        assert f"{EJECTIONS} 1.0" in await figures_of(gateway)
        async with running_engine(port=port) as engine:
            while (await status_of(gateway, HELLO))[0] != 200:
                pass
            assert len(engine.seen) == 1
            assert (await status_of(gateway, HELLO))[0] == 200


async def test_calls_that_meet_the_same_death_eject_an_engine_once(tmp_path: Path) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as dying, running_engine() as well:
        dying.dies_by, dying.dies_after_s = "500", YOUNG_S / 2
        write_upstreams(upstreams, [dying.url, well.url])
        async with running_gateway(upstreams) as gateway:
            told = await asyncio.gather(*(status_of(gateway, HELLO) for _ in range(20)))
            assert {status for status, *_ in told} == {200}
            assert f"{EJECTIONS} 1.0" in await figures_of(gateway)


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


async def test_lists_and_refusals_do_not_clear_an_engine_that_hangs(tmp_path: Path) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as hung:
        write_list(upstreams, hung.url)
        async with running_gateway(upstreams) as gateway:
            for _ in range(3):
                assert (await status_of(gateway, HELLO | {"model": "flat"}))[0] == 404
                async with gateway.session.get(gateway.url + "/v1/models") as reply:
                    assert reply.status == 200
                assert (await status_of(gateway, HELLO | {"model": "hold"}))[0] == 504
            assert f"{EJECTIONS} 1.0" in await figures_of(gateway)


async def test_a_first_token_that_never_came_was_late(tmp_path: Path) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as engine:
        write_list(upstreams, engine.url, slo={"ttft_s": 1e-9, "tpot_s": 1.0})
        async with running_gateway(upstreams) as gateway:
            streams = [HELLO | {"model": name, "stream": True} for name in ("hold", "gated")]
            assert (await status_of(gateway, streams[0]))[0] == 504
            async with gateway.post(streams[1]) as reply:
                assert b"in time" in await reply.read()
            leaving = await gateway.post(streams[1])
            leaving.close()
            async with asyncio.timeout(20):
                await engine.hung_up.wait()
            for others in ({"stream": True, "model": "flat"}, {"service_tier": "flex"}):
                await status_of(gateway, HELLO | others)
            page = await figures_of(gateway)
    for name in ("promised", "late"):
        assert f'_{name}_calls_total{{engine="engine-0",latency="ttft"}} 3.0' in page


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
