"""What goes in comes out: bodies, headers, streams, errors."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from gateway_rig import CHAT, rig, running_engine, running_gateway, write_upstreams
from yarl import URL

from batchrun.server.gateway.forward import HEALTH_S, MAX_ERROR_BYTES
from batchrun.server.gateway.shared_book import FAILURES
from benchmarks.deployment import free_port

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PATHS = [CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses"]


def is_envelope(body: Any) -> bool:
    return set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", PATHS)
async def test_bodies_reach_the_engine_byte_for_byte(tmp_path: Path, path: str) -> None:
    body = b'{ "model":"tiny",\n "messages": [], "x": 1e400, "caf\xc3\xa9": "\\u4e2d" }'
    async with rig(tmp_path) as (engine, gateway):
        async with gateway.post(body, path=f"{path}?a=%2F&b") as reply:
            assert reply.status == 200
        assert engine.seen[0].body == body
        assert engine.seen[0].path == path


async def test_stream_arrives_chunk_by_chunk_in_order(tmp_path: Path) -> None:
    async with rig(tmp_path) as (engine, gateway):
        body = HELLO | {"model": "gated", "stream": True, "n_chunks": 20}
        async with gateway.post(body) as reply:
            for index in range(20):
                engine.gate.release()  # the engine sends the next chunk only now
                event = await reply.content.readuntil(b"\n\n")
                delta = json.loads(event.removeprefix(b"data: "))["choices"][0]["delta"]
                assert delta["content"] == f"w{index} "
            assert await reply.content.read() == b"data: [DONE]\n\n"
        assert reply.headers["Content-Type"] == "text/event-stream"


async def test_many_streams_at_once_lose_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as (_, gateway):
        body = HELLO | {"stream": True, "n_chunks": 300}
        replies = [await gateway.post(body) for _ in range(30)]
        texts = [(await reply.read()).decode() for reply in replies]
        assert len(set(texts)) == 1
        assert texts[0].count("data: ") == 301


async def test_end_to_end_headers_cross_and_hop_by_hop_headers_do_not(tmp_path: Path) -> None:
    async with rig(tmp_path) as (engine, gateway):
        engine.reply_headers = {"X-Engine": "a", "Connection": "X-Gone", "X-Gone": "b"}
        sent = {"X-Mine": "1", "Connection": "X-Private", "X-Private": "2", "TE": "trailers"}
        async with gateway.post(HELLO, headers=sent) as reply:
            assert reply.headers["X-Engine"] == "a"
            assert "X-Gone" not in reply.headers
        seen = engine.seen[0].headers
        assert seen["X-Mine"] == "1"
        assert {"X-Private", "TE"}.isdisjoint(seen)


async def test_no_header_asks_or_tells_how_busy_an_engine_is(tmp_path: Path) -> None:
    async with rig(tmp_path) as (engine, gateway):
        engine.reply_headers = {"Endpoint-Load-Metrics": "TEXT named_metrics.waiting=4"}
        async with gateway.post(HELLO, headers={"endpoint-load-metrics-format": "TEXT"}) as reply:
            assert reply.status == 200
        seen = [*engine.seen[0].headers, *reply.headers]
        assert not [name for name in seen if name.lower().startswith("endpoint-load-metrics")]


@pytest.mark.parametrize(
    ("sent", "is_kept"),
    [("mine-1", True), ("batchrun-1-job-2-1", False), ("BatchRun-x", False), ("a" * 500, False)],
)
async def test_request_id_is_the_callers_unless_it_could_be_the_daemons(
    tmp_path: Path, sent: str, *, is_kept: bool
) -> None:
    async with rig(tmp_path) as (engine, gateway):
        async with gateway.post(HELLO, headers={"X-Request-Id": sent}) as reply:
            returned = reply.headers["X-Request-Id"]
        assert engine.seen[0].headers["X-Request-Id"] == returned
        assert (returned == sent) is is_kept
        assert is_kept or returned.startswith("req_")


async def test_two_request_ids_are_replaced_by_one(tmp_path: Path) -> None:
    async with rig(tmp_path) as (engine, gateway):
        two = [("X-Request-Id", "a"), ("X-Request-Id", "batchrun-1")]
        async with gateway.session.post(gateway.url + CHAT, json=HELLO, headers=two) as reply:
            assert reply.status == 200
        assert engine.seen[0].headers.getall("X-Request-Id") == [reply.headers["X-Request-Id"]]


async def test_hints_of_outside_callers_are_stripped_and_the_rest_stays(tmp_path: Path) -> None:
    async with rig(tmp_path) as (engine, gateway):
        extra = {"batchrun": '{"nonce": "x"}', "other": 1}
        async with gateway.post(HELLO | {"priority": -5, "vllm_xargs": extra}) as reply:
            assert reply.status == 200
        assert engine.seen[0].json == HELLO | {"vllm_xargs": {"other": 1}}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/batch", 404),
        ("GET", "/batchrun/tally", 404),
        ("GET", "/batchrun/routing?most=5", 404),
        ("POST", "/metrics", 405),
        ("POST", "/v1/chat%2Fcompletions", 404),
        ("POST", "/v1/../v1/load_lora_adapter", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models/tiny", 405),
    ],
)
async def test_other_routes_are_refused_with_the_envelope(
    tmp_path: Path, method: str, path: str, status: int
) -> None:
    async with rig(tmp_path) as (engine, gateway):
        async with gateway.session.request(method, gateway.url + path) as reply:
            assert reply.status == status
            assert is_envelope(await reply.json())
            assert reply.headers["X-Request-Id"].startswith("req_")
        assert engine.seen == []


async def test_the_gateway_s_own_metrics_need_no_daemon(tmp_path: Path) -> None:
    async with rig(tmp_path) as (_, gateway):
        async with gateway.post(HELLO | {"stream": True}) as reply:
            await reply.read()
        async with gateway.post(HELLO | {"model": "flat"}) as reply:
            await reply.read()
        async with gateway.session.get(gateway.url + "/metrics") as reply:
            assert reply.status == 200
            page = await reply.text()
    assert "batchrun_daemon_up 0.0" in page
    route = 'route="/v1/chat/completions"'
    assert f'batchrun_gateway_calls_total{{{route},status="200"}} 1.0' in page
    assert f'batchrun_gateway_calls_total{{{route},status="404"}} 1.0' in page
    assert 'batchrun_gateway_ttft_seconds_count{class="default"} 1.0' in page
    assert 'batchrun_gateway_engine_calls_total{engine="engine-0"} 2.0' in page


async def test_flat_errors_of_an_engine_are_put_into_the_envelope(tmp_path: Path) -> None:
    async with rig(tmp_path) as (_, gateway), gateway.post(HELLO | {"model": "flat"}) as reply:
        body = await reply.json()
        assert reply.status == 404
        assert is_envelope(body)
        assert body["error"]["message"] == "Not Found"


@pytest.mark.parametrize("framing", ["chunked", "gzip", "deflate"])
async def test_an_error_gets_the_envelope_however_it_comes(tmp_path: Path, framing: str) -> None:
    unread = "the server answered 404 Not Found"
    async with rig(tmp_path) as (_, gateway):
        for said, told in (("too long", "too long"), ("x" * (MAX_ERROR_BYTES + 1), unread)):
            call = HELLO | {"model": "flat", "framing": framing, "said": said}
            async with gateway.post(call) as reply:
                body = await reply.json()
                assert reply.status == 404 and is_envelope(body)
                assert body["error"]["message"] == told


FLAT = b'{"detail": "too long"}'
RAW_DEFLATE = zlib.compressobj(wbits=-zlib.MAX_WBITS)


@pytest.mark.parametrize(
    ("coding", "coded"),
    [
        ("gzip", gzip.compress(FLAT[:9]) + gzip.compress(FLAT[9:])),
        ("x-gzip", gzip.compress(FLAT)),
        ("deflate", RAW_DEFLATE.compress(FLAT) + RAW_DEFLATE.flush()),
    ],
    ids=["members", "x-gzip", "without-header"],
)
async def test_a_compressed_error_is_read_whole(tmp_path: Path, coding: str, coded: bytes) -> None:
    call = HELLO | {"model": "flat", "coding": coding, "coded": coded.hex()}
    async with rig(tmp_path) as (_, gateway), gateway.post(call) as reply:
        assert "Content-Encoding" not in reply.headers
        assert (await reply.json())["error"]["message"] == "too long"


@pytest.mark.parametrize(
    ("coding", "coded"),
    [("zstd", b"\x28\xb5\x2f\xfd"), ("gzip", gzip.compress(FLAT)[:-9]), ("deflate", FLAT)],
    ids=["zstd", "cut", "plain"],
)
async def test_a_compressed_error_that_cannot_be_read_passes_as_it_is(
    tmp_path: Path, coding: str, coded: bytes
) -> None:
    call = json.dumps(HELLO | {"model": "flat", "coding": coding, "coded": coded.hex()})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    async with rig(tmp_path) as (_, gateway):
        answer = await gateway.raw(f"{head}Content-Length: {len(call)}\r\n\r\n{call}".encode())
    said, _, body = answer.partition(b"\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 404")
    assert f"Content-Encoding: {coding}".encode() in said
    assert body == coded


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_body_over_the_limit_is_413_and_never_reaches_the_engine(
    tmp_path: Path, *, is_chunked: bool
) -> None:
    async with rig(tmp_path, "--max-body-bytes", "100000") as (engine, gateway):
        async with gateway.post(b"x" * 3_000_000, chunked=is_chunked or None) as reply:
            assert reply.status == 413
            assert is_envelope(await reply.json())
        assert engine.seen == []


async def test_body_of_many_megabytes_passes_whole(tmp_path: Path) -> None:
    async with rig(tmp_path) as (engine, gateway):
        body = json.dumps(HELLO | {"pad": "x" * 20_000_000}).encode()
        async with gateway.post(body) as reply:
            assert reply.status == 200
        assert engine.seen[0].body == body


async def test_upload_that_stalls_is_408(tmp_path: Path) -> None:
    async with rig(tmp_path, "--body-idle-s", "0.2") as (engine, gateway):
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
            "Connection: close\r\n\r\n{"
        )
        answer = await gateway.raw(head.encode())
        assert answer.startswith(b"HTTP/1.1 408")
        assert is_envelope(json.loads(answer.partition(b"\r\n\r\n")[2]))
        assert engine.seen == []


async def test_a_caller_that_waits_to_be_invited_is_invited(tmp_path: Path) -> None:
    async with rig(tmp_path) as (engine, gateway):
        async with gateway.post(HELLO, expect100=True) as reply:
            assert reply.status == 200
        assert "Expect" not in engine.seen[0].headers


async def test_an_offer_to_upgrade_the_protocol_is_ignored(tmp_path: Path) -> None:
    async with rig(tmp_path) as (engine, gateway):
        offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "A"}
        async with gateway.post(HELLO, headers=offer) as reply:
            assert reply.status == 200
        assert engine.seen[0].json == HELLO
        assert {"Upgrade", "HTTP2-Settings"}.isdisjoint(engine.seen[0].headers)


async def test_compressed_bodies_are_refused(tmp_path: Path) -> None:
    async with rig(tmp_path) as (engine, gateway):
        body = gzip.compress(json.dumps(HELLO | {"priority": 1}).encode())
        async with gateway.post(body, headers={"Content-Encoding": "gzip"}) as reply:
            assert reply.status == 415
            assert is_envelope(await reply.json())
        assert engine.seen == []


@pytest.mark.parametrize(
    "framing",
    [
        "Content-Length: 2\r\nTransfer-Encoding: chunked",
        "Content-Length: 2\r\nContent-Length: 40",
        "Transfer-Encoding: chunked, identity",
        "Content-Length: +2",
        "Bad Header: 1\r\nContent-Length: 2",
    ],
)
async def test_smuggled_requests_are_refused_with_the_envelope(
    tmp_path: Path, framing: str
) -> None:
    async with rig(tmp_path) as (engine, gateway):
        hidden = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{{}}"
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{framing}\r\n\r\n0\r\n\r\n"
        answer = await gateway.raw((head + hidden).encode())
        assert answer.split()[1] == b"400"
        assert answer.count(b"HTTP/1.") == 1
        assert is_envelope(json.loads(answer.partition(b"\r\n\r\n")[2]))
        assert engine.seen == []


async def test_models_are_listed_and_found_under_either_spelling(tmp_path: Path) -> None:
    async with rig(tmp_path) as (_, gateway):
        for path in ("/v1/models/org/name", "/v1/models/org%2Fname"):
            url = URL(gateway.url + path, encoded=True)
            async with gateway.session.get(url) as reply:
                assert (await reply.json())["id"] == "org/name"
        async with gateway.session.get(gateway.url + "/v1/models") as reply:
            assert [model["id"] for model in (await reply.json())["data"]] == ["tiny", "org/name"]
        async with gateway.session.get(gateway.url + "/v1/models/none") as reply:
            assert reply.status == 404
            assert (await reply.json())["error"]["code"] == "model_not_found"


async def test_the_model_of_an_engine_that_is_slow_or_away_is_not_unknown(tmp_path: Path) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as slow:
        slow.lists_after_s = HEALTH_S + 0.5
        urls = [slow.url, f"http://127.0.0.1:{free_port()}"]
        write_upstreams(upstreams, urls, models=["away"])
        async with running_gateway(upstreams) as gateway:
            for name, status in (("tiny", 200), ("away", 503), ("none", 404)):
                async with gateway.session.get(f"{gateway.url}/v1/models/{name}") as reply:
                    assert reply.status == status
                slow.lists_after_s = 0.0


async def test_an_engine_that_is_away_and_told_no_models_may_have_any(tmp_path: Path) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as well:
        write_upstreams(upstreams, [f"http://127.0.0.1:{free_port()}", well.url], models=[])
        async with running_gateway(upstreams) as gateway:
            for _ in range(FAILURES):
                async with gateway.session.get(gateway.url + "/v1/models/none") as reply:
                    assert reply.status == 503
                    assert "lists none" in (await reply.json())["error"]["message"]
            async with gateway.session.get(gateway.url + "/metrics") as reply:
                assert '_ejections_total{engine="engine-0"} 0.0' in await reply.text()


IMAGE = '{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "%s"}}]}'


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "escaped"])
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_an_image_from_inside_is_refused_in_every_spelling(
    tmp_path: Path, path: str, encoding: str
) -> None:
    async with rig(tmp_path) as (engine, gateway):
        for url in ("file:///etc/passwd", gateway.url + "/v1/models"):
            text = f'{{"model": "tiny", "messages": [{IMAGE % url}]}}'
            escaped = text.replace("image_url", "im\\u0061ge\\u005f\\u0075rl").encode()
            body = escaped if encoding == "escaped" else text.encode(encoding)
            async with gateway.post(body, path=path) as reply:
                answer = await reply.json()
                assert (reply.status, answer["error"]["code"]) == (400, "invalid_image")
        assert engine.seen == []


async def test_an_image_in_the_body_reaches_the_engine_byte_for_byte(tmp_path: Path) -> None:
    body = f'{{ "messages":[{IMAGE % "data:image/png;base64,AAAA"}] }}'.encode()
    async with rig(tmp_path) as (engine, gateway):
        async with gateway.post(body) as reply:
            assert reply.status == 200
        assert engine.seen[0].body == body
