"""The hint on the wire: what each sender writes, to the byte, and what counts as one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job_builders import make_active_job
from msgspec import UNSET

from batchrun.daemon.dispatch import shared_prefixes
from batchrun.daemon.job import Hinter
from batchrun.hints import (
    MAX_HINT_CHARS,
    URGENT_LEAD,
    FlexHint,
    HintError,
    NodeHint,
    RowHint,
    SharedPrefixes,
    SloBounds,
    SloHint,
    put_hint,
    read_hint,
    write_hint,
)
from batchrun.server.gateway.bodies import read_call_body
from batchrun.server.gateway.upstreams import Upstream
from batchrun.simulator.offline_jobs import JobShape
from batchrun.vllm_plugin import compat
from benchmarks.row_feeds import daemon_of, drawn_job
from benchmarks.scenarios import Order, draw_job

CHAT = "/v1/chat/completions"


def in_body(body: object) -> object:
    """What stands under the hint's key."""
    assert isinstance(body, dict)
    return body["vllm_xargs"]["batchrun"]


def test_the_daemon_sends_a_row_with_its_nodes(tmp_path: Path) -> None:
    job = make_active_job(tmp_path, ["a" * 600 + str(i) * 300 for i in range(3)])
    first = int(job.plan.order.rows[0])
    job.queue.take(first)
    body: dict[str, object] = {"vllm_xargs": {"mine": 1}}

    prefixes = shared_prefixes(job, first)
    hint = Hinter(epoch=4).hint(job, first, prefixes)
    assert hint is not None
    put_hint(body, hint, "secret")

    node = prefixes.nodes[0][0]
    assert in_body(body) == (
        f'{{"v":1,"nonce":"secret","epoch":4,"job":"{job.record.id}","row":{first},'
        f'"class":"offline","rank":1048576,"nodes":[[{node},2,1048577]],"key":{node},"output":128}}'
    )


def test_the_daemon_says_that_a_row_has_no_nodes(tmp_path: Path) -> None:
    job = make_active_job(tmp_path, ["x" * 600, "y" * 600])
    body: dict[str, object] = {}

    hint = Hinter(epoch=1).hint(job, 0, SharedPrefixes(), is_urgent=True)
    assert hint is not None
    put_hint(body, hint, "secret")

    assert in_body(body) == (
        f'{{"v":1,"nonce":"secret","epoch":1,"job":"{job.record.id}","row":0,'
        '"class":"offline","rank":0,"nodes":[],"key":null,"output":128}'
    )


@pytest.mark.parametrize(
    ("body", "bounds", "hint"),
    [
        (
            {},
            SloBounds(0.5, 0.02),
            '"class":"online","slo":{"ttft_s":0.5,"tpot_s":0.02,"jct_s":null,"value":1.0}',
        ),
        (
            {},
            SloBounds(1, 0.05, 30.0, 2.0),
            '"class":"online","slo":{"ttft_s":1,"tpot_s":0.05,"jct_s":30.0,"value":2.0}',
        ),
        ({"service_tier": "flex"}, None, '"class":"offline","job":null'),
    ],
)
def test_the_gateway_sends_bounds_and_the_flex_tier(
    body: dict[str, object], bounds: SloBounds | None, hint: str
) -> None:
    call = read_call_body(CHAT, json.dumps(body).encode(), bounds)
    assert not isinstance(call, bytes)

    written = call.written_for(Upstream("one", "http://h:1", hint_nonce="secret"))

    assert in_body(json.loads(written)) == f'{{"v":1,"nonce":"secret",{hint}}}'


def test_a_virtual_daemon_sends_what_the_daemon_sends() -> None:
    job = drawn_job(draw_job(JobShape(1, (64, 64), questions=(2, 2)), 4, Order.GROUPED))

    first, last = (row.hint for row in daemon_of([job]).ports[0].take_due(0.0))

    start = '{"v":1,"nonce":"virtual-engine","epoch":1,"job":"job-0","row":'
    rank = URGENT_LEAD
    nodes, last_nodes = f"[[0,1,{rank + 1}]]", f"[[0,0,{rank + 1}]]"
    assert (
        first == start + f'0,"class":"offline","rank":{rank},"nodes":{nodes},"key":0,"output":128}}'
    )
    assert last == start + (
        f'1,"class":"offline","rank":{rank + 1},"nodes":{last_nodes},"key":0,"output":128}}'
    )


def test_the_self_test_sends_a_row() -> None:
    assert compat.SELF_TEST_HINT == (
        '{"v":1,"nonce":"self-test","epoch":0,"job":"self-test","row":0,"class":"offline",'
        '"rank":0,"nodes":[]}'
    )


GOOD: dict[str, object] = {
    "v": 1,
    "nonce": "secret",
    "epoch": 3,
    "job": "job_x",
    "row": 7,
    "class": "offline",
    "rank": 12,
    "nodes": [[5, 9, 13], [6, 2, 13]],
}


def slo_hint(ttft_s: float, tpot_s: float, jct_s: float | None = None) -> SloHint:
    return SloHint(slo=SloBounds(ttft_s, tpot_s, jct_s))


def sent(**changes: object) -> str:
    return json.dumps(GOOD | changes)


def test_a_hint_is_read_whole() -> None:
    assert read_hint(sent(), "secret") == RowHint(
        epoch=3, job="job_x", row=7, rank=12, nodes=(NodeHint(5, 9, 13), NodeHint(6, 2, 13))
    )


def test_an_expected_length_is_read_where_there_is_one() -> None:
    told, silent = read_hint(sent(output=80), "secret"), read_hint(sent(), "secret")

    assert isinstance(told, RowHint) and told.output_tokens == 80
    assert isinstance(silent, RowHint) and silent.output_tokens is UNSET


def test_fields_of_later_and_of_older_releases_are_ignored() -> None:
    assert read_hint(sent(tenant={"a": [1]}, slo=None), "secret") == read_hint(sent(), "secret")


@pytest.mark.parametrize(
    "text",
    [
        None,
        5,
        ["x"],
        "not json",
        "[]",
        "[" * MAX_HINT_CHARS,
        json.dumps(GOOD) + " " * MAX_HINT_CHARS,
        sent(nonce="wrong"),
        sent(nonce="\ud800"),
        sent(nonce=None),
        sent(v=2),
        json.dumps({k: v for k, v in GOOD.items() if k != "class"}),
        sent(**{"class": "nightly"}),
    ],
)
def test_anything_else_is_no_hint(text: object) -> None:
    assert read_hint(text, "secret") is None


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"class": "offline", "job": None}, FlexHint()),
        ({"class": "online", "slo": {"ttft_s": 1, "tpot_s": 0.02}}, slo_hint(1.0, 0.02)),
        (
            {"class": "online", "slo": {"ttft_s": 0.5, "tpot_s": 0.02, "jct_s": None}},
            slo_hint(0.5, 0.02),
        ),
        (
            {"class": "online", "slo": {"ttft_s": 1, "tpot_s": 0.02, "jct_s": 9.0, "more": "x"}},
            slo_hint(1.0, 0.02, 9.0),
        ),
    ],
)
def test_the_hints_of_calls_are_read(changes: dict[str, object], hint: object) -> None:
    given = {"v": 1, "nonce": "secret"} | changes

    assert read_hint(json.dumps(given), "secret") == hint
    assert read_hint(json.dumps(given | {"nonce": "x"}), "secret") is None


def test_an_engine_without_a_nonce_believes_no_hint() -> None:
    assert read_hint(sent(nonce=""), "") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": "x"},
        {"rank": None},
        {"nodes": 5},
        {"nodes": [[1, 2]]},
        {"nodes": [[1, 2, "x"]]},
        {"nodes": [[1, 2, 3]] * 65},
        {"row": True},
        {"row": 1.0},
        {"job": 5},
        {"nodes": [[1, 2, 3, 4]]},
        {"output": None},
        {"output": "x"},
        {"output": -1},
        {"class": "online"},
        {"class": "online", "slo": [1, 2]},
        {"class": "online", "slo": {"ttft_s": 1}},
        {"class": "online", "slo": {"ttft_s": 0, "tpot_s": 1}},
        {"class": "online", "slo": {"ttft_s": True, "tpot_s": 1}},
        {"class": "online", "slo": {"ttft_s": "1", "tpot_s": 1}},
        {"class": "online", "slo": {"ttft_s": 1, "tpot_s": float("inf")}},
        {"class": "online", "slo": {"ttft_s": 1, "tpot_s": float("nan")}},
        {"class": "online", "slo": {"ttft_s": 1, "tpot_s": 10**400}},
        {"class": "online", "slo": {"ttft_s": 1, "tpot_s": 1, "jct_s": -1}},
    ],
)
def test_a_malformed_hint_with_the_nonce_is_told_apart(changes: dict[str, object]) -> None:
    with pytest.raises(HintError, match=r"malformed hint: .+"):
        read_hint(sent(**changes), "secret")


@pytest.mark.parametrize(
    "hint",
    [
        RowHint(epoch=1, job="job_ä", row=0, rank=-9),
        RowHint(epoch=2, job="j", row=3, rank=4, nodes=(NodeHint(5, 6, 7),), output_tokens=0),
        FlexHint(),
        slo_hint(1e-7, 1e9),
    ],
)
def test_what_is_written_is_read(hint: RowHint | FlexHint | SloHint) -> None:
    assert read_hint(write_hint(hint, "secret"), "secret") == hint
