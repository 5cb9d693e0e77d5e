"""Why calls went to the engines that they went to, as command, status, metrics and page tell it."""

from __future__ import annotations

import json
import signal
import sys
import time
from urllib.request import urlopen

from deployment_rig import DeploymentRig

from batchrun.simulator.traces.reading import read_trace
from benchmarks.deployment import free_port

WAIT_S = 120.0
PROMPT = "All of this text comes first in every call. " * 200
ENGINES = ("left", "right")


def fake_engine(name: str) -> dict[str, object]:
    port = free_port()
    command = [sys.executable, "-m", "batchrun.engine.fake", f"--port={port}", "--model=fake"]
    return {"name": name, "command": command, "port": port}


def recorded_prefixes(rig: DeploymentRig) -> set[tuple[int, ...]]:
    """Of the six calls of the trace, the first five blocks of each."""
    trace = read_trace(rig.folder / "calls.parquet")
    assert trace.prefix is not None
    assert len(trace) == 6
    return {tuple(trace.prefix.of_request(index)[:5].tolist()) for index in range(6)}


def test_the_last_calls_say_why_they_went_where_they_went(rig: DeploymentRig) -> None:
    engines = [fake_engine(name) for name in ENGINES]
    document = {"listen": f"127.0.0.1:{rig.port}", "gateway_workers": 2, "engines": engines}
    (rig.folder / "batchrun.yaml").write_text(json.dumps(document))
    rig.ask("up", "-d")
    assert rig.ask("engine", "explain")["decisions"] == []
    with rig.openai() as client:
        deadline_s = time.monotonic() + WAIT_S
        while rig.ask("status")["engines"][1]["state"] != "ready":
            assert time.monotonic() < deadline_s, "waited in vain"
        recorder = rig.start("trace", "record", "-o", "calls.parquet", "--prefixes")
        assert recorder.stderr is not None
        assert "recording online calls" in recorder.stderr.readline()
        for number in range(6):
            client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": f"{PROMPT}{number}"}]
            )
        time.sleep(2)  # The gateway notes a call's end after its caller has the answer.
        recorder.send_signal(signal.SIGINT)
        recorder.communicate(timeout=WAIT_S)
        assert recorder.returncode == 0
    told = rig.ask("engine", "explain", "--last", "4")
    seen = rig.ask("status")["routing"]
    page = urlopen(f"http://127.0.0.1:{rig.port}/dashboard/routing").read().decode()
    metrics = urlopen(f"http://127.0.0.1:{rig.port}/metrics").read().decode()

    assert [len(blocks) for blocks in recorded_prefixes(rig)] == [5]
    assert told["router"] == "cost"
    assert len(told["decisions"]) == 4
    newest = told["decisions"][0]
    assert {newest["chosen"]["engine"], newest["runner_up"]["engine"]} == set(ENGINES)
    assert newest["chosen"]["price_s"] < newest["runner_up"]["price_s"]
    assert newest["chosen"]["cached_tokens"] > 1_000
    assert newest["runner_up"]["cached_tokens"] == 0
    assert newest["told_prompt_tokens"] is not None
    # All went where the first had been, from whichever worker.
    assert sorted(each["num_calls"] for each in told["engines"]) == [0, 6]
    assert (told["imbalance"], seen["imbalance"]) == (2.0, 2.0)
    assert seen["decisions"] == []
    assert max(each["num_pieces"] for each in seen["engines"]) >= len(PROMPT) // 1024
    assert f'batchrun_routing_calls{{engine="{newest["chosen"]["engine"]}"}} 6.0' in metrics
    assert "batchrun_routing_imbalance 2.0" in metrics
    assert "Cached, foretold" in page
    assert page.count(f">{newest['chosen']['engine']}</th>") >= 6
