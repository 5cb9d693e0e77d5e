"""Watch and steer the real vLLM: telemetry, the offline switch, policy and budget at run time."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deployment_rig import WAIT_S, DeploymentRig
from prometheus_server import PrometheusServer, queries_of_the_alerts, queries_of_the_board
from raw_http import RawHttp
from steered_calls import ask_flex, post

from batchrun.control.client import DaemonClient
from batchrun.home import Home
from batchrun.simulator.traces.reading import load_parquet

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_ROWS = 192
OUTPUT_TOKENS = 150
LASTING_TOKENS = 3000
SMALL_ARGS = [
    "--kv-cache-memory-bytes=268435456", "--max-model-len=4096", "--max-num-seqs=16",
    "--max-num-batched-tokens=512",
]  # fmt: skip
JOB = f"""\
name: long answers
input:
  path: rows.parquet
  id: id
  messages: [{{role: user, content: "{{{{ text }}}}"}}]
request: {{max_tokens: {OUTPUT_TOKENS}, temperature: 0, ignore_eos: true}}
output: {{path: out.parquet}}
"""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentRig]:
    """The real engine with batchrun's scheduler, running."""
    made = DeploymentRig(tmp_path_factory.mktemp("steering"))
    engine = {"port": made.engine_port, "vllm_args": SMALL_ARGS}
    made.configure(engine, model="tiny", policy="echo", slo_classes={"fast": {"ttft_s": 0.5}})
    shared = "All of these questions share their beginning. " * 30
    made.write_rows([f"{shared} And this is question {i}." for i in range(NUM_ROWS)])
    made.write_job(JOB)
    made.ask("up", "-d")
    yield made
    made.close()


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", "/ping"])
def test_an_engine_asks_for_its_secret_on_every_route(rig: DeploymentRig, path: str) -> None:
    engine, key = RawHttp(rig.engine_port), (rig.home / "run" / "engine-0.key").read_text()

    assert engine.get(path).status == 401
    assert engine.post("/invocations", {"model": "tiny", "prompt": "a"}).status == 401
    shown = {"Authorization": f"Bearer {key}"}
    assert engine.call("GET", path, headers=shown).status == 200
    assert engine.get("/health").status == 200


def telemetry(rig: DeploymentRig) -> dict[str, Any]:
    """What the daemon knows of the engine now."""
    (engine,) = DaemonClient(Home(rig.home)).get("/status")["engines"]
    told: dict[str, Any] = engine["telemetry"]
    return told


def wait_for(rig: DeploymentRig, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first telemetry that fulfils the condition."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        told = telemetry(rig)
        if told is not None and condition(told):
            return told
        time.sleep(0.1)
    raise AssertionError(f"waited in vain; last: {told}")


def has_ended_calls(told: dict[str, Any], num_calls: int) -> bool:
    """Whether so many calls were admitted and none runs: no step of before them is in flight."""
    online = told["online"]
    return bool(online["num_admissions"] == num_calls and not online["num_running"])


def has_all_rows(rig: DeploymentRig, job_id: str, told: dict[str, Any]) -> bool:
    """Whether all rows of the job that have not ended have reached the engine: none is on its way
    there."""
    return sum(_offline(told)) + int(rig.job(job_id)["num_completed"]) == NUM_ROWS


def call_online(rig: DeploymentRig) -> None:
    """One call of an online user."""
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": "Hello"}]
    request = urllib.request.Request(
        f"http://127.0.0.1:{rig.port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
        assert reply.status == 200


def submit_lasting(rig: DeploymentRig) -> str:
    """The id of a job that runs until it is cancelled."""
    job = JOB.replace(f"max_tokens: {OUTPUT_TOKENS}", f"max_tokens: {LASTING_TOKENS}")
    rig.write_job(job, "lasting.yaml")
    return str(rig.ask("submit", "lasting.yaml")["id"])


def scrape(rig: DeploymentRig) -> dict[str, float]:
    """The metrics page at the gateway: sample -> value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{rig.port}/metrics", timeout=WAIT_S) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=")
        lines = reply.read().decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in samples}


@pytest.mark.nightly
def test_rows_sit_out_while_offline_work_is_off_and_then_go_on(rig: DeploymentRig) -> None:
    daemon = DaemonClient(Home(rig.home))
    job_id = rig.ask("submit", "job.yaml")["id"]
    wait_for(rig, lambda told: told["offline"]["num_running"] > 2)

    daemon.post("/offline", {"on": False})
    call_online(rig)
    off = wait_for(rig, lambda told: has_ended_calls(told, 1) and has_all_rows(rig, job_id, told))
    call_online(rig)
    later = wait_for(rig, lambda told: has_ended_calls(told, 2))
    daemon.post("/offline", {"on": True})
    ended = rig.wait_until_ended(job_id)
    end = wait_for(rig, lambda told: not told["offline"]["num_running"])

    assert not off["is_offline_on"] and not later["is_offline_on"]
    for count in ("num_running", "num_waiting", "num_computed_tokens", "num_preemptions"):
        assert later["offline"][count] == off["offline"][count]
    assert off["offline"]["num_running"] > 2
    assert (ended["state"], ended["num_completed"]) == ("completed", NUM_ROWS)
    assert end["offline"]["num_admissions"] == NUM_ROWS
    assert end["is_offline_on"]


@pytest.mark.nightly
def test_what_the_engine_counts_is_shown(rig: DeploymentRig) -> None:
    job_id = submit_lasting(rig)
    call_online(rig)
    told = wait_for(rig, lambda told: told["offline"]["num_running"] > 0)
    page = rig.call("status").stdout
    samples = scrape(rig)
    rig.ask("cancel", job_id)

    kv = told["kv"]
    assert kv["online_blocks"] + kv["offline_blocks"] + kv["free_blocks"] == kv["total_blocks"]
    assert told["offline"]["hit_rate"] > 0.5
    assert told["alone"]["num_first_tokens"] + told["shared"]["num_first_tokens"] >= 1
    assert told["step"]["measured_s"] > 0 < told["step"]["num_timed_steps"]
    assert told["num_policy_errors"] == told["num_malformed_orders"] == 0
    headings = ["hit rate", "computed tokens/s", "online TTFT", "slack", "KV blocks", "in force"]
    places = [page.rindex(heading) for heading in headings]
    assert places == sorted(places)
    labels = '{class="offline",engine="0"}'
    assert samples[f"batchrun_computed_tokens_total{labels}"] > 0
    assert samples['batchrun_engine_up{engine="0"}'] == 1
    assert samples['batchrun_policy{engine="0",policy="echo"}'] == 1
    assert samples['batchrun_online_ttft_seconds_count{engine="0",offline="false"}'] >= 0


def test_flex_calls_wait_while_offline_work_is_off_and_say_what_they_were(
    rig: DeploymentRig,
) -> None:
    daemon = DaemonClient(Home(rig.home))
    before = wait_for(rig, lambda told: not sum(_offline(told)))
    daemon.post("/offline", {"on": False})
    with rig.openai(timeout=WAIT_S) as client, ThreadPoolExecutor() as pool:
        asked = [pool.submit(ask_flex, client, is_streamed=kind) for kind in (False, True)]
        wait_for(rig, lambda told: sum(_offline(told)) == 2)
        call_online(rig)
        off = wait_for(rig, _has_more_calls(before, 1))
        are_waiting = [not each.done() for each in asked]
        daemon.post("/offline", {"on": True})
        (whole_tiers, whole_text), (stream_tiers, stream_text) = [e.result() for e in asked]
        response = client.responses.create(
            model="tiny", input="Hello", max_output_tokens=8, service_tier="flex"
        )
    end = wait_for(rig, lambda told: told["offline"]["num_admissions"] == counted(before) + 3)

    assert are_waiting == [True, True]
    assert off["offline"]["num_computed_tokens"] == before["offline"]["num_computed_tokens"]
    assert whole_tiers == stream_tiers == {"flex"}
    assert whole_text == stream_text != ""
    assert response.service_tier == "flex"
    assert end["online"]["num_admissions"] == before["online"]["num_admissions"] + 1
    assert end["num_malformed_hints"] == end["num_policy_errors"] == 0


def _offline(told: dict[str, Any]) -> tuple[int, int]:
    return told["offline"]["num_running"], told["offline"]["num_waiting"]


def counted(told: dict[str, Any]) -> int:
    """Offline requests let in so far."""
    return int(told["offline"]["num_admissions"])


def _has_more_calls(before: dict[str, Any], num: int) -> Callable[[dict[str, Any]], bool]:
    wanted = before["online"]["num_admissions"] + num
    return lambda told: told["online"]["num_admissions"] == wanted


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}),
    ("completions", {"prompt": "Hello", "max_tokens": 4}),
    ("responses", {"input": "Hello", "max_output_tokens": 4}),
]


@pytest.mark.parametrize(("route", "asked"), ASKED)
def test_a_class_reaches_the_engine_and_its_secret_nobody_else(
    rig: DeploymentRig, route: str, asked: dict[str, Any]
) -> None:
    before = telemetry(rig)
    nonce = Home(rig.home).hint_nonce.read_text()
    body = asked | {"model": "tiny"}
    good = post(rig, route, body)
    bad = post(rig, route, body | {"vllm_xargs": {"mine": {"a": 1}}})
    odd = post(rig, route, body | {"temperature": "warm", "stream_options": {"include_usage": 1}})
    wait_for(rig, _has_more_calls(before, 1))

    assert [good[0], bad[0]] == [200, 400]
    assert "vllm_xargs" in bad[1]
    for _, text in (good, bad, odd):
        assert nonce[:9] not in text
    assert telemetry(rig)["num_malformed_hints"] == 0


def test_policy_and_budget_change_at_run_time(rig: DeploymentRig) -> None:
    changed = rig.ask("engine", "set", "--policy", "bs", "--budget", "64")
    now = wait_for(rig, lambda told: told["policy"] == "bs")
    refused = rig.call("engine", "set", "--budget", "4096")
    num_before = now["offline"]["num_admissions"]
    job_id = rig.ask("submit", "job.yaml")["id"]
    wait_for(rig, lambda told: told["offline"]["num_admissions"] > num_before)
    ordered = rig.ask("engine", "set", "--policy", "echo", "--online-queue", "on-time")
    ended = rig.wait_until_ended(job_id)
    back = rig.ask("engine", "set", "--reset")

    assert changed["engines"]["0"]["token_budget"] == now["token_budget"] == 64
    assert refused.returncode == 4
    assert refused.stderr == (
        "batchrun: engine 0: the token budget can be 16 to 512 here, not 4096\n"
    )
    assert (ended["state"], ended["num_completed"]) == ("completed", NUM_ROWS)
    assert (now["online_queue"], ordered["engines"]["0"]["online_queue"]) == ("auto", "on-time")
    assert back["engines"]["0"] | {"number": 0} == {
        "number": 0, "policy": "echo", "token_budget": 512, "is_offline_on": True, "error": None,
        "online_queue": "auto",
    }  # fmt: skip


@pytest.mark.nightly
def test_online_calls_are_recorded_with_their_lengths_and_rows_are_not(
    rig: DeploymentRig,
) -> None:
    job_id = rig.ask("submit", "job.yaml")["id"]
    with rig.start("trace", "record", "-o", "calls.parquet", "--json") as recording:
        assert recording.stderr is not None
        assert "recording online calls" in recording.stderr.readline()
        for _ in range(3):
            call_online(rig)
        recording.send_signal(signal.SIGINT)
        out, err = recording.communicate(timeout=WAIT_S)
    rig.call("cancel", job_id)  # It may be done.

    trace = load_parquet(rig.folder / "calls.parquet")
    assert (recording.returncode, err) == (0, "")
    assert json.loads(out)["num_requests"] == len(trace) == 3
    assert trace.num_output_tokens.tolist() == [8, 8, 8]
    assert len(set(trace.num_prompt_tokens.tolist())) == 1 < trace.num_prompt_tokens[0]
    assert list(trace.arrival_s) == sorted(trace.arrival_s)


def test_a_daemon_that_comes_back_hears_and_steers_the_engine_that_stayed(
    rig: DeploymentRig,
) -> None:
    before = telemetry(rig)["start_id"]
    rig.kill("daemon")
    rig.ask("up", "-d")
    told = wait_for(rig, lambda told: told["start_id"] == before)
    changed = rig.ask("engine", "set", "--policy", "bs+e")

    assert told["policy"] == "echo"
    assert changed["engines"]["0"]["policy"] == "bs+e"


def test_the_sockets_lie_in_a_folder_of_their_owner(rig: DeploymentRig) -> None:
    run = Path(rig.home) / "run"
    sockets = [path for path in run.iterdir() if path.is_socket()]

    assert sorted(path.name for path in sockets) == ["engine-0.orders", "engine-0.telemetry"]
    assert {path.stat().st_mode & 0o777 for path in sockets} == {0o600}
    assert run.stat().st_mode & 0o777 == 0o700


@pytest.mark.nightly
def test_every_query_of_the_board_returns_data(rig: DeploymentRig, tmp_path: Path) -> None:
    """What engines without the scheduler cannot tell included; no call fails here, which
    `test_prometheus_board.py` has."""
    job_id = submit_lasting(rig)
    rig.wait_for(job_id, lambda view: view["eta_s"] is not None)
    queries = [*queries_of_the_board(), *queries_of_the_alerts()]
    queries = [query for query in queries if '{status=~"5.."}' not in query]
    messages: Any = [{"role": "user", "content": "Hello"}]
    prometheus = PrometheusServer(tmp_path, rig.port)
    try:
        left = queries
        for _ in range(4):
            with rig.openai() as client:
                list(client.chat.completions.create(
                    model="tiny", messages=messages, stream=True, max_tokens=64,
                    stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
                ))  # fmt: skip
            left = prometheus.wait_for(left)
            if not left:
                break
    finally:
        prometheus.close()
        rig.ask("cancel", job_id)
    assert left == []
