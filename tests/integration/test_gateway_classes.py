"""SLO classes and `service_tier: "flex"`: what reaches the engine, and what the caller sees."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_rig import CHAT, rig, running_engine, running_gateway, write_upstreams

from batchrun.keys import digest, new_key

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
NONCE = "s3cret-nonce_of-the-engine-0123456789"
FAST = {"ttft_s": 0.2, "tpot_s": 0.03, "jct_s": None}
SCHEDULED: dict[str, Any] = {
    "hint_nonce": NONCE,
    "offline_priority": 1,
    "slo_classes": {"fast": FAST, "slow": FAST | {"jct_s": 9.0}},
}
ROUTES = [CHAT, "/v1/completions", "/v1/responses"]


def hint_in(body: dict[str, Any]) -> dict[str, Any]:
    hint: dict[str, Any] = json.loads(body["vllm_xargs"]["batchrun"])
    return hint


async def test_a_class_becomes_a_hint_and_a_smuggled_hint_goes(tmp_path: Path) -> None:
    forged = {"batchrun": json.dumps({"v": 1, "class": "offline", "nonce": NONCE}), "mine": 2}
    body = HELLO | {"priority": -5, "vllm_xargs": forged}
    headers = {"X-Batchrun-Class": "slow", "Accept-Encoding": "gzip"}
    async with rig(tmp_path, **SCHEDULED) as (engine, gateway):
        for path in ROUTES:
            async with gateway.post(body, path=path, headers=headers) as reply:
                assert reply.status == 200
                assert NONCE not in await reply.text() + str(reply.headers)
                assert "service_tier" not in await reply.json()

    assert [seen.path for seen in engine.seen] == ROUTES
    slo = FAST | {"jct_s": 9.0, "value": 1.0}
    for seen in engine.seen:
        hint = {"v": 1, "nonce": NONCE, "class": "online", "slo": slo}
        assert hint_in(seen.json) == hint
        assert seen.json["vllm_xargs"].keys() == {"batchrun", "mine"}
        assert seen.json["messages"] == HELLO["messages"]
        assert "priority" not in seen.json
        assert "X-Batchrun-Class" not in seen.headers


async def test_calls_that_ask_for_nothing_pass_byte_for_byte(tmp_path: Path) -> None:
    body = b'{ "model":"tiny", "x": 1e400, "service_tier" :"auto", "messages":[]}'
    async with rig(tmp_path, **SCHEDULED) as (engine, gateway):
        calls = [({}, CHAT), ({"X-Batchrun-Class": "default"}, CHAT)]
        calls.append(({"X-Batchrun-Class": "fast"}, "/v1/embeddings"))
        for headers, path in calls:
            async with gateway.post(body, path=path, headers=headers) as reply:
                assert reply.headers.get("Content-Length") is not None

    assert [seen.body for seen in engine.seen] == [body] * 3
    assert all("X-Batchrun-Class" not in seen.headers for seen in engine.seen)


async def test_beams_are_refused_with_a_class_of_the_call_and_not_of_its_key(
    tmp_path: Path,
) -> None:
    key_id, text = new_key()
    key = {"id": key_id, "sha256": digest(text), "role": "user", "slo_class": "fast"}
    listed = {"keys": [key | {"requests_per_minute": None, "seq": 1}]}
    (tmp_path / "keys.json").write_text(json.dumps(listed))
    own, body = {"Authorization": f"Bearer {text}"}, HELLO | {"use_beam_search": True}
    async with rig(tmp_path, "--keys", str(tmp_path / "keys.json"), **SCHEDULED) as (_, gateway):
        for headers, status in ((own, 200), (own | {"X-Batchrun-Class": "fast"}, 400)):
            async with gateway.post(body, headers=headers) as reply:
                assert reply.status == status


async def test_an_unknown_class_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    answers = []
    async with rig(tmp_path, **SCHEDULED) as (engine, gateway):
        for names in (["none"], ["fast", "slow"], [""]):
            lines = "".join(f"x-batchrun-class: {name}\r\n" for name in names)
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
            head += "Connection: close\r\n"
            answers.append(await gateway.raw(f"{head}{lines}\r\n{{}}".encode()))

    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 400")
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert (error["code"], error["param"]) == ("invalid_value", "x-batchrun-class")
        assert error["message"].endswith("there is default, fast, slow")
    assert engine.seen == []


async def test_flex_is_offline_work_and_the_reply_says_so(tmp_path: Path) -> None:
    spellings = ['"service_tier"', '"service\\u005ftier"']
    cases = [(path, spelling) for path in ROUTES for spelling in spellings]
    tiers = []
    async with rig(tmp_path, **SCHEDULED) as (engine, gateway):
        for path, spelling in cases:
            body = f'{{"model": "tiny", "messages": [], {spelling}: "flex"}}'
            async with gateway.post(body.encode(), path=path) as reply:
                document = await reply.json()
                assert document["choices"][0]["message"]["content"] == "hello"
                tiers.append(document["service_tier"])

    assert tiers == ["flex"] * len(cases)
    for (path, _), seen in zip(cases, engine.seen, strict=True):
        assert hint_in(seen.json) == {"v": 1, "nonce": NONCE, "class": "offline", "job": None}
        assert seen.json["priority"] == 1
        assert seen.json.get("service_tier") == ("flex" if path == "/v1/responses" else None)


@pytest.mark.parametrize(
    ("known", "tier", "priority"),
    [({"offline_priority": 1}, "flex", 1), ({}, "default", None)],
)
async def test_without_our_scheduler_flex_is_a_priority_or_nothing(
    tmp_path: Path, known: dict[str, Any], tier: str, priority: int | None
) -> None:
    body = HELLO | {"service_tier": "flex"}
    async with rig(tmp_path, **known) as (engine, gateway), gateway.post(body) as reply:
        assert (await reply.json())["service_tier"] == tier

    (seen,) = engine.seen
    assert seen.json == HELLO | ({} if priority is None else {"priority": priority})


async def test_bodies_of_flex_calls_leave_room_for_online_ones(tmp_path: Path) -> None:
    large = HELLO | {"user": "x" * 2**21}
    flex = large | {"service_tier": "flex"}
    async with rig(tmp_path, "--max-held-bytes", str(2**23)) as (engine, gateway):
        waiting = asyncio.create_task(gateway.post(flex | {"model": "hold"}))
        await engine.has_seen(1)
        for body, status in ((flex, 503), (large, 200)):
            async with gateway.post(body) as reply:
                assert reply.status == status
        waiting.cancel()


async def test_a_flex_stream_says_so_in_every_chunk_as_it_comes(tmp_path: Path) -> None:
    async with rig(tmp_path, **SCHEDULED) as (engine, gateway):
        body = HELLO | {"model": "gated", "stream": True, "service_tier": "flex"}
        async with gateway.post(body, headers={"Accept-Encoding": "gzip"}) as reply:
            for index in range(5):
                engine.gate.release()
                event = await reply.content.readuntil(b"\n\n")
                chunk = json.loads(event.removeprefix(b"data: "))
                assert chunk["service_tier"] == "flex"
                assert chunk["choices"][0]["delta"]["content"] == f"w{index} "
            assert await reply.content.read() == b"data: [DONE]\n\n"
    assert engine.seen[0].headers["Accept-Encoding"] == "identity"


async def test_a_flex_stream_that_breaks_off_breaks_off_for_the_caller(tmp_path: Path) -> None:
    async with rig(tmp_path, **SCHEDULED) as (_, gateway):
        body = HELLO | {"model": "break", "stream": True, "service_tier": "flex"}
        async with gateway.post(body) as reply:
            with pytest.raises(Exception, match=r"[Pp]ayload|reset|closed"):
                await reply.read()


async def test_the_openai_client_asks_for_flex_and_reads_it(tmp_path: Path) -> None:
    async with rig(tmp_path, **SCHEDULED) as (_, gateway):
        base_url = gateway.url + "/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
            create = client.chat.completions.create
            whole = await create(model="tiny", messages=[], service_tier="flex")
            stream = await create(model="tiny", messages=[], service_tier="flex", stream=True)
            tiers = [chunk.service_tier async for chunk in stream]

    assert whole.service_tier == "flex"
    assert tiers == ["flex"] * 5


async def test_an_engine_that_repeats_the_body_does_not_tell_the_secret(tmp_path: Path) -> None:
    texts = []
    async with rig(tmp_path, **SCHEDULED) as (engine, gateway):
        for shown in (10**6, *range(60, 300, 7)):
            body = HELLO | {"model": "blunt", "shown": shown, "service_tier": "flex"}
            async with gateway.post(body) as reply:
                assert reply.status == 400
                texts.append(await reply.text())
        gateway.process.terminate()
        _, log = await gateway.process.communicate()

    assert NONCE in str(engine.seen[0].json)
    for text in texts:
        assert NONCE[:9] not in text and "cannot read {'model': 'blunt'" in text
    assert NONCE[:9] not in log.decode()


async def test_a_flex_call_prefers_an_engine_where_it_can_give_way(tmp_path: Path) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as plain, running_engine() as fit:
        write_upstreams(upstreams, [plain.url, fit.url])
        document = json.loads(upstreams.read_text())
        document["engines"][1]["offline_priority"] = 1
        upstreams.write_text(json.dumps(document))
        async with running_gateway(upstreams) as gateway:
            for _ in range(4):
                async with gateway.post(HELLO | {"service_tier": "flex"}) as reply:
                    assert (await reply.json())["service_tier"] == "flex"

    assert (len(plain.seen), len(fit.seen)) == (0, 4)
