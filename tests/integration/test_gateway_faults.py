"""Callers that hang up, engines that die, signals, ports."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from contextlib import closing, suppress
from pathlib import Path

import aiohttp
import psutil
import pytest
from gateway_rig import (
    CHAT,
    rig,
    running_engine,
    running_gateway,
    start_gateway,
    until,
    write_upstreams,
)

from batchrun.keys import UsageFile, digest, new_key
from batchrun.server.gateway.__main__ import KILL_AFTER_S
from batchrun.server.gateway.forward import YOUNG_S
from batchrun.server.gateway.http import USAGE
from benchmarks.deployment import free_port

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


async def test_hanging_up_before_the_first_byte_cancels_at_the_engine(tmp_path: Path) -> None:
    async with rig(tmp_path) as (engine, gateway):
        calling = asyncio.create_task(
            gateway.session.post(gateway.url + CHAT, json={"model": "hold"})
        )
        await engine.arrived.wait()
        calling.cancel()
        await asyncio.wait_for(engine.hung_up.wait(), 20)


async def test_hanging_up_in_a_stream_cancels_at_the_engine(tmp_path: Path) -> None:
    async with rig(tmp_path) as (engine, gateway):
        reply = await gateway.post(HELLO | {"model": "gated", "stream": True})
        engine.gate.release()
        await reply.content.readuntil(b"\n\n")
        reply.close()
        await asyncio.wait_for(engine.hung_up.wait(), 20)


async def test_a_stream_that_breaks_off_is_never_ended_as_if_it_were_whole(tmp_path: Path) -> None:
    async with rig(tmp_path) as (_, gateway):
        reply = await gateway.post(HELLO | {"model": "break", "stream": True})
        with pytest.raises(aiohttp.ClientError):
            await reply.read()


async def test_streams_that_do_not_end_count_as_failures(tmp_path: Path) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as engine:
        write_upstreams(upstreams, [engine.url])
        document = json.loads(upstreams.read_text()) | {"timeouts": {"between_tokens_s": 1.0}}
        upstreams.write_text(json.dumps(document))
        engine.gate.release()
        async with running_gateway(upstreams) as gateway:
            for model in ("break", "gated"):
                async with gateway.post(HELLO | {"model": model, "stream": True}) as reply:
                    with suppress(aiohttp.ClientError):
                        await reply.read()
            async with gateway.session.get(gateway.url + "/metrics") as reply:
                page = await reply.text()
    counted = re.findall(rf'_calls_total{{route="{CHAT}",status="(\d+)"}} (.*)', page)
    assert counted == [("502", "1.0"), ("504", "1.0")]


@pytest.mark.parametrize("model", ["torn", "silent"])
async def test_an_engine_that_dies_before_its_answer_is_503_and_no_other_is_tried(
    tmp_path: Path, model: str
) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as one, running_engine() as two:
        write_upstreams(upstreams, [one.url, two.url])
        body = HELLO | {"model": model}
        async with running_gateway(upstreams) as gateway, gateway.post(body) as reply:
            assert reply.status == 503
            assert "closed the connection" in (await reply.json())["error"]["message"]
        assert (len(one.seen), len(two.seen)) == (1, 0)


@pytest.mark.parametrize(("dies_by", "status"), [("500", 500), ("reset", 503)])
async def test_a_call_that_meets_a_dead_engine_goes_to_one_other(
    tmp_path: Path, dies_by: str, status: int
) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as one, running_engine() as two:
        one.dies_by = dies_by
        write_upstreams(upstreams, [one.url, two.url])
        async with running_gateway(upstreams) as gateway:
            for _ in range(4):
                async with gateway.post(HELLO) as reply:
                    assert reply.status == 200
            assert (len(one.seen), len(two.seen)) == (1, 4)
            two.dies_by = dies_by
            async with gateway.post(HELLO) as reply:
                assert reply.status == status


@pytest.mark.parametrize(("dies_by", "status"), [("500", 500), ("reset", 503)])
async def test_a_call_that_an_engine_died_of_after_a_while_goes_to_no_other(
    tmp_path: Path, dies_by: str, status: int
) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as one, running_engine() as two:
        one.dies_by, one.dies_after_s = dies_by, YOUNG_S
        write_upstreams(upstreams, [one.url, two.url])
        async with running_gateway(upstreams) as gateway, gateway.post(HELLO) as reply:
            assert (reply.status, len(two.seen)) == (status, 0)


async def test_no_engine_reachable_is_503_with_retry_after(tmp_path: Path) -> None:
    upstreams = tmp_path / "upstreams.json"
    write_upstreams(upstreams, [f"http://127.0.0.1:{free_port()}"])
    async with running_gateway(upstreams) as gateway, gateway.post(HELLO) as reply:
        assert reply.status == 503
        assert int(reply.headers["Retry-After"]) > 0
        assert (await reply.json())["error"]["type"] == "server_error"


async def test_an_engine_that_refuses_is_passed_over(tmp_path: Path) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as engine:
        dead = f"http://127.0.0.1:{free_port()}"
        write_upstreams(upstreams, [dead, engine.url, dead + "/again"])
        async with running_gateway(upstreams) as gateway:
            for _ in range(10):
                async with gateway.post(HELLO) as reply:
                    assert reply.status == 200
        assert len(engine.seen) == 10


async def test_calls_go_to_the_engine_with_the_fewest_in_flight(tmp_path: Path) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as one, running_engine() as two:
        write_upstreams(upstreams, [one.url, two.url])
        async with running_gateway(upstreams) as gateway:
            held = asyncio.create_task(
                gateway.session.post(gateway.url + CHAT, json={"model": "hold"})
            )
            await one.arrived.wait()
            for _ in range(5):
                async with gateway.post(HELLO) as reply:
                    assert reply.status == 200
            held.cancel()
        assert (len(one.seen), len(two.seen)) == (1, 5)


@pytest.mark.parametrize("models", [["tiny"], None])
async def test_health_needs_no_engine_and_readiness_needs_one(
    tmp_path: Path, models: list[str] | None
) -> None:
    upstreams = tmp_path / "upstreams.json"
    port = free_port()
    write_upstreams(upstreams, [f"http://127.0.0.1:{port}"], models=models)
    async with running_gateway(upstreams) as gateway:
        url, get = gateway.url, gateway.session.get
        async with get(url + "/healthz") as alive, get(url + "/readyz") as ready:
            assert (alive.status, ready.status) == (200, 503)
        async with running_engine(port=port), get(url + "/readyz") as ready:
            assert ready.status == 200


async def test_a_new_list_of_engines_is_picked_up_and_a_lost_one_changes_nothing(
    tmp_path: Path,
) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_gateway(upstreams) as gateway, running_engine() as engine:
        async with gateway.post(HELLO) as reply:
            assert reply.status == 503
        write_upstreams(upstreams, [engine.url], api_key="secret")
        await answered(gateway.url)
        upstreams.unlink()
        upstreams.mkdir()  # two looks at a broken file, then a call
        await asyncio.sleep(2.5)
        async with gateway.post(HELLO) as reply:
            assert reply.status == 200
        assert engine.seen[-1].headers["Authorization"] == "Bearer secret"


async def test_a_worker_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    async with rig(tmp_path, "--workers", "2") as (_, gateway):
        parent = psutil.Process(gateway.process.pid)
        before = {child.pid for child in parent.children()}
        limits = parent.rlimit(psutil.RLIMIT_NOFILE)
        parent.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
        psutil.Process(min(before)).kill()
        stderr = gateway.process.stderr
        assert stderr is not None
        async with asyncio.timeout(60):
            while b"a worker cannot be started" not in await stderr.readline():
                continue
        parent.rlimit(psutil.RLIMIT_NOFILE, limits)
        await until(lambda: len({child.pid for child in parent.children()} - before) == 1)
        await answered(gateway.url)


async def answered(url: str) -> None:
    """Wait until the gateway is ready."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(20):
        while True:
            with suppress(aiohttp.ClientError):
                async with session.get(url + "/readyz") as reply:
                    if reply.status == 200:
                        return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_sigterm_lets_a_running_stream_end_and_takes_no_new_call(
    tmp_path: Path, workers: str
) -> None:
    async with rig(tmp_path, "--workers", workers) as (engine, gateway):
        reply = await gateway.post(HELLO | {"model": "gated", "stream": True})
        gateway.process.terminate()
        await refused(gateway.url)
        for _ in range(5):
            engine.gate.release()
        text = await reply.read()
        assert text.endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(gateway.process.wait(), 20) == 0


async def refused(url: str) -> None:
    """Wait until nothing listens."""
    host, port = url.removeprefix("http://").split(":")
    async with asyncio.timeout(20):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionError:
                return
            writer.close()
            await asyncio.sleep(0.05)


async def test_a_stream_that_outlasts_the_drain_is_cut_and_counted(tmp_path: Path) -> None:
    name, text = new_key()
    key = {"id": name, "role": "user", "sha256": digest(text), "slo_class": None}
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [key | {"requests_per_minute": None, "seq": 1}]}))
    headers, drain_s = {"Authorization": f"Bearer {text}"}, KILL_AFTER_S + 1
    arguments = ("--workers", "2", "--drain-s", str(drain_s), "--keys", str(keys))
    async with rig(tmp_path, *arguments) as (engine, gateway):
        reply = await gateway.post(HELLO | {"model": "gated", "stream": True}, headers=headers)
        engine.gate.release()
        await reply.content.readuntil(b"\n\n")
        gateway.process.terminate()
        with pytest.raises(aiohttp.ClientError):
            await reply.read()
        assert await asyncio.wait_for(gateway.process.wait(), 20) == 0
        await asyncio.wait_for(engine.hung_up.wait(), 20)
    with closing(UsageFile(keys.with_suffix(USAGE))) as usage:
        assert usage.read(1).num_calls == 1


async def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    async with rig(tmp_path, "--workers", "2") as (_, gateway):
        supervisor = psutil.Process(gateway.process.pid)
        before = {child.pid for child in supervisor.children()}
        for pid in before:
            psutil.Process(pid).kill()
        await until(lambda: len({child.pid for child in supervisor.children()} - before) == 2)
        await answered(gateway.url)


async def test_workers_share_the_port_and_a_killed_supervisor_leaves_none_behind(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, "--workers", "2") as (engine, gateway):
        for _ in range(8):
            async with (
                aiohttp.ClientSession() as session,
                session.post(gateway.url + CHAT, json=HELLO) as reply,
            ):
                assert reply.status == 200
        gateway.process.kill()
        await refused(gateway.url)
        assert len(engine.seen) == 8


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--listen", "127.0.0.1:{port}"], "port {port} on 127.0.0.1 is in use"),
        (["--listen", "127.0.0.1:{port}", "--workers", "2"], "port {port} on 127.0.0.1 is in use"),
        (["--listen", "0.0.0.0:8000"], "no API key is asked for"),
        (
            ["--listen", "127.0.0.1:0", "--keys", "nowhere"],
            "nowhere: cannot read the list of API keys",
        ),
        (["--listen", "8000"], "is not HOST:PORT"),
        (["--listen", "0.0.0.0:8000", "--keys", "{keys}"], "no API key is asked for"),
        (["--listen", "127.0.0.1:0", "--workers", "0"], "--workers must be at least 1"),
        (["--listen", "127.0.0.1:0", "--drain-s", "0"], "--drain-s must be above 0"),
    ],
)
async def test_wrong_settings_are_one_line_and_exit_2(
    tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        keys = tmp_path / "keys"
        keys.write_text('{"keys": null}')
        filled = [argument.format(port=port, keys=keys) for argument in arguments]
        process = await start_gateway("--upstreams", str(tmp_path / "f"), *filled)
        _, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert complaint.format(port=port) in stderr.decode()
    assert stderr.count(b"\n") == 1
