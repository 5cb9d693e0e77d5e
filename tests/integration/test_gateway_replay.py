"""A trace replayed through the gateway, against an engine that a test can hold."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from dataclasses import replace
from pathlib import Path

import pytest
from gateway_rig import rig

from batchrun.simulator.replay import CallArrival, ReplayTarget, replay

ARRIVALS = [
    CallArrival(at_s=0.01 * index, prompt=f"word {index}", max_tokens=5) for index in range(8)
]


async def test_all_calls_are_answered_in_order_with_their_tokens_counted(tmp_path: Path) -> None:
    async with rig(tmp_path) as (engine, gateway):
        target = ReplayTarget(gateway.url + "/v1", "tiny", extra_body={"ignore_eos": True})
        results = await replay(ARRIVALS, target)
        assert [result.arrived_at_s for result in results] == [a.at_s for a in ARRIVALS]
        assert {(r.error, r.num_output_tokens, len(r.itl_s)) for r in results} == {(None, 5, 4)}
        assert all(r.ttft_s is not None and 0 < r.ttft_s <= r.e2e_s for r in results)
        sent = sorted(seen.json["messages"][0]["content"] for seen in engine.seen)
        assert sent == [arrival.prompt for arrival in ARRIVALS]
        assert engine.seen[0].json["ignore_eos"] is True


async def test_headers_go_with_each_call(tmp_path: Path) -> None:
    async with rig(tmp_path) as (engine, _):
        target = ReplayTarget(engine.url + "/v1", "tiny", headers={"x-batchrun-class": "fast"})
        await replay(ARRIVALS[:2], target)
        assert [seen.headers["x-batchrun-class"] for seen in engine.seen] == ["fast"] * 2


async def test_the_loop_is_open_a_held_call_holds_no_other(tmp_path: Path) -> None:
    async with rig(tmp_path) as (engine, gateway):
        replaying = asyncio.create_task(replay(ARRIVALS, ReplayTarget(gateway.url + "/v1", "hold")))
        await engine.has_seen(len(ARRIVALS))
        replaying.cancel()
        await asyncio.wait_for(engine.hung_up.wait(), 20)


async def test_a_call_that_takes_too_long_fails_and_is_cancelled(tmp_path: Path) -> None:
    async with rig(tmp_path) as (_, gateway):
        target = ReplayTarget(gateway.url + "/v1", "hold", timeout_s=0.5)
        (result,) = await replay(ARRIVALS[:1], target)
        assert result.error == "no complete answer within 0.5 s"
        assert result.ttft_s is None


@pytest.mark.parametrize(
    ("model", "complaint", "num_tokens"), [("break", "Client", 5), ("flat", "HTTP 404", 0)]
)
async def test_a_failed_call_is_a_result_with_its_error(
    tmp_path: Path, model: str, complaint: str, num_tokens: int
) -> None:
    async with rig(tmp_path) as (_, gateway):
        results = await replay(ARRIVALS[:2], ReplayTarget(gateway.url + "/v1", model))
        assert all(complaint in (result.error or "") for result in results)
        assert {result.num_output_tokens for result in results} == {num_tokens}


async def test_refused_connections_are_failed_calls() -> None:
    (result,) = await replay(ARRIVALS[:1], ReplayTarget("http://127.0.0.1:1/v1", "tiny"))
    assert "Cannot connect" in (result.error or "")
    assert replace(result, error=None).tpot_s is None


async def run_command(*arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.replay", *arguments),
        stdout=PIPE,
        stderr=PIPE,
        env=dict(os.environ),
    )
    stdout, stderr = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, stdout.decode(), stderr.decode()


async def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    async with rig(tmp_path) as (engine, gateway):
        trace = ["--duration-s", "1", "--rate-per-s", "20", "--seed", "3"]
        target = ["--base-url", gateway.url + "/v1", "--model", "tiny"]
        file = tmp_path / "out.json"
        code, stdout, stderr = await run_command(*target, *trace, "--json", str(file))
        assert (code, stderr) == (0, "")
        document = json.loads(file.read_text())
        assert document["summary"]["answered"] == len(document["calls"]) == len(engine.seen) > 0
        assert "ttft_p50_s" in stdout


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["--duration-s", "0"], 2, "--duration-s must be above 0"),
        (["--trace", "/nowhere.csv"], 2, "/nowhere.csv: cannot read the trace"),
        (["--duration-s", "0.5", "--rate-per-s", "50"], 4, "no call was answered"),
    ],
)
async def test_the_command_fails_with_one_line(
    arguments: list[str], code: int, complaint: str
) -> None:
    target = ["--base-url", "http://127.0.0.1:1/v1", "--model", "tiny"]
    returned, _, stderr = await run_command(*target, *arguments)
    assert returned == code
    assert complaint in stderr
    assert stderr.count("\n") == 1
