"""`POST /v1/batches`: what is taken, and how the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest

from batchrun.api.batch_request import read_batch_request
from batchrun.api.errors import ApiError

SOUND = {
    "input_file_id": "file-1",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}
PAIRS = {f"{number:064}": "ü" * 512 for number in range(16)}

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"endpoint": "/v1/x"}, "invalid_value", "endpoint"),
    ({"endpoint": None}, "invalid_type", "endpoint"),
    ({"completion_window": "1h"}, "invalid_value", "completion_window"),
    ({"completion_window": ""}, "invalid_value", "completion_window"),
    ({"input_file_id": 5}, "invalid_type", "input_file_id"),
    ({"input_file_id": "a\0b"}, "invalid_value", "input_file_id"),
    ({"metadata": {**PAIRS, "one": "more"}}, "object_above_max_properties", "metadata"),
    ({"metadata": {"k" * 65: "v"}}, "property_name_above_max_length", f"metadata.{'k' * 65}"),
    ({"metadata": {"k": "v" * 513}}, "string_above_max_length", "metadata.k"),
    ({"metadata": {"k": ["v"]}}, "invalid_type", "metadata.k"),
    ({"metadata": "v"}, "invalid_type", "metadata"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}},
     "integer_below_min_value", "output_expires_after.seconds"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 2592001}},
     "integer_above_max_value", "output_expires_after.seconds"),
    ({"output_expires_after": {"anchor": "now", "seconds": 3600}},
     "invalid_value", "output_expires_after.anchor"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": "3600"}},
     "invalid_type", "output_expires_after.seconds"),
    ({"output_expires_after": {"seconds": 3600}},
     "missing_required_parameter", "output_expires_after.anchor"),
    ({"priority": 1}, "unknown_parameter", "priority"),
    ({"batchrun": {"weight": 0}}, "invalid_value", "batchrun.weight"),
    ({"batchrun": {"weight": True}}, "invalid_type", "batchrun.weight"),
    ({"batchrun": {"deadline": "soon"}}, "invalid_value", "batchrun.deadline"),
    ({"batchrun": {"deadline": 10**400}}, "invalid_value", "batchrun.deadline"),
    ({"batchrun": {"class": "x"}}, "unknown_parameter", "batchrun.class"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "code", "param"), REFUSED)
def test_a_wrong_value_is_refused_with_its_name(
    changes: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(ApiError) as refusal:
        read_batch_request({**SOUND, **changes}, ["24h"], None)

    assert (refusal.value.status_code, refusal.value.code, refusal.value.param) == (
        400, code, param,
    )  # fmt: skip


@pytest.mark.parametrize("key", SOUND)
def test_a_required_field_is_missed_by_name(key: str) -> None:
    document = {name: value for name, value in SOUND.items() if name != key}

    with pytest.raises(ApiError) as refusal:
        read_batch_request(document, ["24h"], None)

    assert (refusal.value.code, refusal.value.param) == ("missing_required_parameter", key)


def test_the_supported_values_are_listed() -> None:
    with pytest.raises(ApiError) as refusal:
        read_batch_request({**SOUND, "endpoint": "/v1/x"}, ["24h"], None)

    assert refusal.value.message == (
        "Invalid value: '/v1/x'. Supported values are: '/v1/chat/completions', '/v1/completions', "
        "'/v1/embeddings', and '/v1/responses'."
    )


def test_as_much_metadata_as_is_allowed_is_taken() -> None:
    wanted = read_batch_request({**SOUND, "metadata": PAIRS}, ["24h"], None)

    assert wanted.batch.metadata == PAIRS


@pytest.mark.parametrize(
    ("window", "deadline", "deadline_s"),
    [("24h", None, 86_400), ("24h", "6h", 21_600), ("90m", "6h", 5_400)],
)
def test_the_deadline_lies_within_the_window(
    window: str, deadline: str | None, deadline_s: float
) -> None:
    document = {**SOUND, "completion_window": window}
    extension = {} if deadline is None else {"batchrun": {"deadline": deadline, "weight": 2}}

    wanted = read_batch_request({**document, **extension}, ["24h", "90m"], None)

    assert (wanted.deadline_s, wanted.weight) == (deadline_s, 2 if deadline else 1)


def test_equal_requests_have_equal_hashes() -> None:
    first = read_batch_request(SOUND, ["24h"], "key").batch
    again = read_batch_request(dict(reversed(SOUND.items())), ["24h"], "key").batch
    other = read_batch_request({**SOUND, "metadata": {"a": "b"}}, ["24h"], "other").batch

    assert (first.request_hash, first.idempotency_hash) == (
        again.request_hash, again.idempotency_hash,
    )  # fmt: skip
    assert first.request_hash != other.request_hash
    assert first.idempotency_hash != other.idempotency_hash
