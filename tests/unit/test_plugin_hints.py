"""What counts as a hint, and what is online because it does not."""

from __future__ import annotations

import json

import pytest

from batchrun.vllm_plugin.hints import FlexHint, Hint, NodeHint, SloHint, parse_hint

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


def extra(**changes: object) -> dict[str, object]:
    return {"batchrun": json.dumps(GOOD | changes)}


def test_a_hint_is_read_whole() -> None:
    assert parse_hint(extra(), "secret") == Hint(
        epoch=3, job="job_x", row=7, rank=12, nodes=(NodeHint(5, 9, 13), NodeHint(6, 2, 13))
    )


def test_an_expected_length_is_read_where_there_is_one() -> None:
    told, silent = parse_hint(extra(output=80), "secret"), parse_hint(extra(), "secret")

    assert isinstance(told, Hint) and told.output_tokens == 80
    assert isinstance(silent, Hint) and silent.output_tokens is None


@pytest.mark.parametrize(
    "extra_args",
    [
        None,
        {},
        {"batchrun": 5},
        {"batchrun": ["x"]},
        {"batchrun": "not json"},
        {"batchrun": "[]"},
        {"batchrun": json.dumps(GOOD) + " " * 20_000},
        extra(nonce="wrong"),
        extra(nonce=None),
        extra(v=2),
        {"batchrun": json.dumps({k: v for k, v in GOOD.items() if k != "class"})},
        extra(**{"class": "nightly"}),
    ],
)
def test_anything_else_is_online(extra_args: dict[str, object] | None) -> None:
    assert parse_hint(extra_args, "secret") is None


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"class": "offline", "job": None}, FlexHint()),
        ({"class": "online", "slo": {"ttft_s": 1, "tpot_s": 0.02}}, SloHint(1.0, 0.02)),
        (
            {"class": "online", "slo": {"ttft_s": 0.5, "tpot_s": 0.02, "jct_s": None}},
            SloHint(0.5, 0.02),
        ),
        (
            {"class": "online", "slo": {"ttft_s": 1, "tpot_s": 0.02, "jct_s": 9.0, "more": "x"}},
            SloHint(1.0, 0.02, 9.0),
        ),
    ],
)
def test_the_hints_of_calls_are_read(changes: dict[str, object], hint: object) -> None:
    given = {"v": 1, "nonce": "secret"} | changes

    assert parse_hint({"batchrun": json.dumps(given)}, "secret") == hint
    assert parse_hint({"batchrun": json.dumps(given | {"nonce": "x"})}, "secret") is None


def test_an_engine_without_a_nonce_believes_no_hint() -> None:
    assert parse_hint(extra(nonce=""), "") is None


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
    with pytest.raises(ValueError, match=r".+"):
        parse_hint(extra(**changes), "secret")
