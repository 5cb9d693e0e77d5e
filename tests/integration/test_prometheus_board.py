"""Each query of the board and of the alerts returns data from a Prometheus that scrapes a live
deployment. Needs Debian's `prometheus`, which is fetched where it can be; skipped without it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment_rig import DeploymentRig
from prometheus_server import (
    PrometheusServer,
    find_program,
    queries_of_the_alerts,
    queries_of_the_board,
)
from raw_http import RawHttp

from batchrun.cli.operate.monitoring import ALERTS

OF_THE_SCHEDULER = (
    "batchrun_slo_", "batchrun_online_", "batchrun_computed_", "batchrun_prefix_", "batchrun_kv_",
    "batchrun_requests_", "batchrun_preemptions_", "batchrun_step_", "batchrun_policy_",
)  # fmt: skip
"""Only engines with batchrun's scheduler tell these: `test_steering_on_vllm.py` asks for all."""
FAILS = {"match": {"substring": "a call that fails"}, "action": {"status": 500}}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentRig]:
    made = DeploymentRig(tmp_path_factory.mktemp("board"))
    made.use_fake_engine("--latency-s=0.3", rules=[FAILS])
    made.submit_rows(*(f"question {i}" for i in range(5000)))
    yield made
    made.close()


def call_online(rig: DeploymentRig) -> None:
    """A streamed call, and one that fails."""
    messages: Any = [{"role": "user", "content": "Hello"}]
    with rig.openai() as client, client.chat.completions.create(
        model="fake", messages=messages, stream=True, max_tokens=4,
        stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        assert list(stream)
    message = {"role": "user", "content": "a call that fails"}
    body = {"model": "fake", "messages": [message]}
    assert RawHttp(rig.port).post("/v1/chat/completions", body).status == 500


def test_what_needs_no_scheduler_returns_data(rig: DeploymentRig, tmp_path: Path) -> None:
    served = [
        query
        for query in [*queries_of_the_board(), *queries_of_the_alerts()]
        if not any(name in query for name in OF_THE_SCHEDULER)
    ]
    prometheus = PrometheusServer(tmp_path, rig.port)
    try:
        call_online(rig)
        assert prometheus.wait_for(["batchrun_gateway_ttft_seconds_count == 1"]) == []
        call_online(rig)
        assert prometheus.wait_for(served) == []
    finally:
        prometheus.close()
    assert len(served) >= 16


def test_the_alerts_are_rules(rig: DeploymentRig, tmp_path: Path) -> None:
    file = tmp_path / "rules.yml"
    file.write_text(rig.call("metrics", "rules").stdout)

    done = subprocess.run(
        [find_program("promtool"), "check", "rules", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_the_board_is_json_with_every_query(rig: DeploymentRig) -> None:
    board = json.loads(rig.call("metrics", "grafana").stdout)

    targets = [target for panel in board["panels"] for target in panel.get("targets", [])]
    assert [target["expr"] for target in targets] == queries_of_the_board()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_open_prints_where_the_page_is(rig: DeploymentRig) -> None:
    done = rig.call("open")

    assert done.stdout == f"http://127.0.0.1:{rig.port}/dashboard\n"


def test_counts_of_the_gateway_outlive_the_daemon(rig: DeploymentRig) -> None:
    call_online(rig)
    rig.kill("daemon")

    page = RawHttp(rig.port).get("/metrics")

    assert page.status == 200
    assert b"batchrun_daemon_up 0.0" in page.body
    assert b'batchrun_gateway_ttft_seconds_count{class="default"}' in page.body
    assert b"batchrun_engine_up" not in page.body
