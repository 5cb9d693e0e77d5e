"""`POST /v1/batches`: what is taken, and how the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest

from batchrun.pool.fair_share import JobTurns, Turn
from batchrun.pool.job_shares import Owner
from batchrun.server.api.batches import BatchRequest, read_batch_request
from batchrun.server.api.errors import ApiError, Caller
from batchrun.store.api_keys import KeyLimits

SOUND = {
    "input_file_id": "file-1",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}
WINDOWS = ["7d", "24h"]
USER = Caller(owner="key_greedy", scope="key_greedy")
ADMIN = Caller(owner="key_ops")
BEYOND_A_USER_KEY = [
    ("weight", 1_000_000, "must be at most 1 with a user key; an admin key may set up to 1000000"),
    ("weight", 1.001, "must be at most 1 with a user key; an admin key may set up to 1000000"),
    (
        "deadline",
        "23h",
        "must be at least 24h with a user key, the shortest completion window; an admin key may "
        "set a shorter one",
    ),
]
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
    ({"batchrun": {"weight": 5e-324}}, "invalid_value", "batchrun.weight"),
    ({"batchrun": {"weight": 9.99e-7}}, "invalid_value", "batchrun.weight"),
    ({"batchrun": {"weight": 1_000_001}}, "invalid_value", "batchrun.weight"),
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


def test_the_bounds_of_a_weight_are_told_and_taken() -> None:
    with pytest.raises(ApiError) as refusal:
        read_batch_request({**SOUND, "batchrun": {"weight": 5e-324}}, ["24h"], None)

    assert refusal.value.message == "Invalid 'batchrun.weight': must be from 0.000001 to 1000000."
    for weight in (1e-6, 1_000_000):
        document = {**SOUND, "batchrun": {"weight": weight}}
        assert read_batch_request(document, ["24h"], None).weight == weight


@pytest.mark.parametrize(("name", "value", "problem"), BEYOND_A_USER_KEY)
def test_a_user_key_is_told_its_bound_and_who_may_pass_it(
    name: str, value: object, problem: str
) -> None:
    with pytest.raises(ApiError) as refusal:
        read_batch_request({**SOUND, "batchrun": {name: value}}, WINDOWS, None, USER)

    error = refusal.value
    assert (error.status_code, error.code, error.param) == (
        400,
        "invalid_value",
        f"batchrun.{name}",
    )
    assert error.message == f"Invalid 'batchrun.{name}': {problem}."


@pytest.mark.parametrize("caller", [ADMIN, Caller()], ids=["admin key", "no keys"])
@pytest.mark.parametrize(("name", "value", "_"), BEYOND_A_USER_KEY)
def test_an_admin_may_put_a_batch_before_those_of_others(
    caller: Caller, name: str, value: object, _: str
) -> None:
    document = {**SOUND, "batchrun": {name: value}}

    wanted = read_batch_request(document, WINDOWS, None, caller)

    expected = {"weight": (value, 86_400), "deadline": (1, 82_800)}
    assert (wanted.weight, wanted.deadline_s) == expected[name]


def test_a_user_key_may_put_its_batch_behind_others_and_end_it_before_a_longer_window() -> None:
    extension = {"weight": 0.5, "deadline": "24h"}
    document = {**SOUND, "completion_window": "7d", "batchrun": extension}

    wanted = read_batch_request(document, WINDOWS, None, USER)

    assert (wanted.weight, wanted.deadline_s) == (0.5, 86_400)


def most_that_is_taken(name: str, values: list[object]) -> tuple[float, float]:
    """Weight and deadline with the first of these values that a user key may ask for."""
    for value in values:
        try:
            document = {**SOUND, "batchrun": {name: value}}
            wanted = read_batch_request(document, ["24h"], None, USER)
        except ApiError:
            continue
        return wanted.weight, wanted.deadline_s
    raise AssertionError("none of the values is taken")


@pytest.mark.parametrize(
    ("name", "values"),
    [("weight", [1_000_000, 2, 1]), ("deadline", ["15m", "1h", "24h"])],
)
def test_no_user_key_takes_from_the_share_of_another(name: str, values: list[object]) -> None:
    """1,000 tokens/s were seen; then both keys have a batch, in rows of 1,000 tokens."""
    turns, day_s = JobTurns(1000), 86_400.0
    turns.join("before", 1, 60_000)
    turns.observe(0, is_saturated=True)
    for second in range(60):
        turns.charge(Turn("before", is_urgent=False), second, 1000, ends_subtree=True)
        turns.settle("before", second, 1000)
        turns.observe(second + 1, is_saturated=True)
    turns.leave("before")
    turns.join("victim", 1, 700_000, deadline_at=60 + day_s)
    weight, deadline_s = most_that_is_taken(name, values)
    turns.join("greedy", weight, 700_000, deadline_at=60 + deadline_s)

    for second in range(60, 360):
        turn = turns.choose({"victim", "greedy"}, second)
        assert turn is not None
        turns.charge(turn, second, 1000, ends_subtree=True)
        turns.settle(turn.job_id, second, 1000)
        turns.observe(second + 1, is_saturated=True)

    accounts = turns._shares.accounts
    assert accounts["victim"].num_fair_tokens == accounts["greedy"].num_fair_tokens == 150_000


@pytest.mark.parametrize("is_first", [True, False])
def test_a_flood_of_batches_with_deadlines_takes_no_share_of_another_key(*, is_first: bool) -> None:
    """100 batches of 24 h windows that need more than there is, before the victim's or after."""
    turns, day_s = JobTurns(1000), 86_400.0
    turns.join("before", 1, 60_000)
    turns.observe(0, is_saturated=True)
    for second in range(60):
        turns.charge(Turn("before", is_urgent=False), second, 1000, ends_subtree=True)
        turns.settle("before", second, 1000)
        turns.observe(second + 1, is_saturated=True)
    turns.leave("before")
    joins = [("victim", 40_000_000, Owner("victim", is_bounded=True))]
    greedy = Owner("greedy", is_bounded=True)
    flood = [(f"greedy-{number}", 5_000_000, greedy) for number in range(100)]
    for job_id, tokens, owner in flood + joins if is_first else joins + flood:
        turns.join(job_id, 1, tokens, deadline_at=60 + day_s, owner=owner)
    ready = {job_id for job_id, _, _ in flood + joins}

    for second in range(60, 660):
        turn = turns.choose(ready, second)
        assert turn is not None
        turns.charge(turn, second, 1000, ends_subtree=True)
        turns.settle(turn.job_id, second, 1000)
        turns.observe(second + 1, is_saturated=True)

    account = turns._shares.accounts["victim"]
    assert account.num_fair_tokens + account.num_urgent_tokens >= 297_000
    outlook = turns.outlook("victim")
    assert outlook is not None and outlook.is_kept


def test_a_key_may_have_bounds_of_its_own() -> None:
    limits = KeyLimits(max_weight=4, min_deadline_s=3_600)
    caller = Caller("key_1", "key_1", limits)

    def asked(**extension: object) -> BatchRequest:
        return read_batch_request({**SOUND, "batchrun": extension}, ["24h"], None, caller)

    wanted = asked(weight=4, deadline="1h")
    assert (wanted.weight, wanted.deadline_s) == (4, 3_600)
    with pytest.raises(ApiError, match="must be at most 4 with this API key"):
        asked(weight=4.5)
    with pytest.raises(ApiError, match="must be at least 3600 s with this API key"):
        asked(deadline="59m")


def test_a_key_below_the_usual_weight_has_that_weight() -> None:
    caller = Caller("key_1", "key_1", KeyLimits(max_weight=0.25))

    assert read_batch_request(SOUND, ["24h"], None, caller).weight == 0.25
