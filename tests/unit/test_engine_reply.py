"""What each reply of an engine means for the row and its job."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from dataclasses import replace

import pytest
from engine_builders import CHAT, make_request

from batchrun.engine.client import (
    METRIC,
    EngineClient,
    Reply,
    classify,
    parse_kv_config,
)
from batchrun.jobs.results.output_file import response_text
from batchrun.media.connections import parse_retry_after
from batchrun.server.gateway.replies import ReplyUsage
from batchrun.strict import MAX_JSON_PARTS
from batchrun.types import Outcome, OutcomeKind, Usage
from benchmarks.evil_engines import MODEL, EvilEngine, whole

NOW_S = 1_700_000_000.0
CUT = {"reason": "max_output_tokens"}
FILTERED = {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}
CHOICE = {"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}


def outcome_of(
    status_code: int, body: object, *, endpoint: str = CHAT, retry_after: str | None = None
) -> Outcome:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = Reply(status_code, raw, retry_after, duration_s=0.5)
    return classify(make_request(endpoint), reply, now_s=NOW_S)


@pytest.mark.parametrize(
    ("status_code", "kind"),
    [
        (301, OutcomeKind.JOB_ERROR),
        (400, OutcomeKind.ROW_ERROR),
        (401, OutcomeKind.JOB_ERROR),
        (402, OutcomeKind.ROW_ERROR),
        (403, OutcomeKind.JOB_ERROR),
        (404, OutcomeKind.JOB_ERROR),
        (408, OutcomeKind.RETRY),
        (409, OutcomeKind.RETRY),
        (413, OutcomeKind.ROW_ERROR),
        (422, OutcomeKind.ROW_ERROR),
        (425, OutcomeKind.RETRY),
        (429, OutcomeKind.BUSY),
        (500, OutcomeKind.RETRY),
        (503, OutcomeKind.BUSY),
    ],
)
def test_the_status_decides_whose_fault_an_error_is(status_code: int, kind: OutcomeKind) -> None:
    outcome = outcome_of(status_code, {"error": {"message": "no", "code": status_code}})
    assert outcome.kind is kind
    assert outcome.body is None
    assert outcome.error is not None
    assert outcome.error.status_code == status_code


def test_a_reply_to_another_row_is_no_answer() -> None:
    good = {"choices": [CHOICE]}
    assert outcome_of(200, good | {"id": "chatcmpl-batchrun-1-job-3-1"}).kind is OutcomeKind.OK
    assert outcome_of(200, good | {"id": "chatcmpl-0"}).kind is OutcomeKind.OK
    other = outcome_of(200, good | {"id": "chatcmpl-batchrun-1-job-4-1"})
    assert other.kind is OutcomeKind.RETRY and other.error is not None
    assert other.error.message == "the engine's reply is to another request"


def test_a_reply_may_hold_many_logprobs() -> None:
    logprobs = b",".join([b'{"token":"a","logprob":0,"bytes":[97]}'] * (MAX_JSON_PARTS // 4))
    raw = b'{"choices":[{"message":{"content":"hi"},"logprobs":{"content":[%b]}}]}' % logprobs
    assert outcome_of(200, raw).kind is OutcomeKind.OK
    assert response_text(CHAT, raw) == "hi"


def test_a_good_reply_keeps_its_bytes_and_its_place() -> None:
    raw = b'{"choices": [{"finish_reason": "length"}],  "extra": 1.50}'
    outcome = outcome_of(200, raw)
    assert outcome.kind is OutcomeKind.OK
    assert outcome.body == raw
    assert outcome.finish_reason == "length"
    assert (outcome.job_id, outcome.row, outcome.attempt) == ("job", 3, 1)
    assert outcome.duration_s == 0.5


@pytest.mark.parametrize(
    "body",
    [
        b"<html>busy</html>",
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[1]",
        b'"text"',
        b"{}",
        b'{"choices": null}',
        b'{"choices": []}',
        b'{"choices": ["text"]}',
        b'{"error": "late"}',
    ],
)
def test_a_success_without_a_usable_body_is_tried_again(body: bytes) -> None:
    outcome = outcome_of(200, body)
    assert outcome.kind is OutcomeKind.RETRY
    assert outcome.error is not None
    assert outcome.error.code == "invalid_response"


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_row_that_the_engine_gave_up_is_tried_again(reason: str) -> None:
    outcome = outcome_of(200, {"choices": [{**CHOICE, "finish_reason": reason}]})
    assert outcome.kind is OutcomeKind.RETRY


@pytest.mark.parametrize("status", ["cancelled", "failed", "in_progress", "queued"])
@pytest.mark.parametrize("details", [None, {}, {"reason": None}, CUT])
def test_a_response_that_the_engine_gave_up_is_tried_again(status: str, details: object) -> None:
    told = {"status": status, "incomplete_details": details, "error": {"message": "no\n\nroom"}}
    outcome = outcome_of(200, {"output": [], **told}, endpoint="/v1/responses")
    assert outcome.error is not None and outcome.error.code == "aborted"
    assert outcome.error.message.endswith("): no room")


@pytest.mark.parametrize(
    ("endpoint", "body", "finish_reason"),
    [
        ("/v1/embeddings", {"data": [{"embedding": [0.1]}]}, None),
        ("/v1/responses", {"output": [], "status": "completed"}, None),
        ("/v1/responses", {"output": [], "incomplete_details": CUT}, "length"),
        ("/v1/responses", {"output": [], "status": "incomplete"}, "length"),
        ("/v1/responses", {**FILTERED, "output": []}, "content_filter"),
        ("/v1/completions", {"choices": [{"text": "x", "finish_reason": "stop"}]}, "stop"),
        ("/pooling", {"anything": 1}, None),
    ],
)
def test_each_endpoint_has_its_own_shape(
    endpoint: str, body: object, finish_reason: str | None
) -> None:
    outcome = outcome_of(200, body, endpoint=endpoint)
    assert outcome.kind is OutcomeKind.OK
    assert outcome.finish_reason == finish_reason


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, Usage()),
        ("many", Usage()),
        ({"prompt_tokens": 9, "completion_tokens": 4}, Usage(9, 4, 0)),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, Usage(9, 0, 0)),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}, Usage(9, 0, 8)),
        ({"prompt_tokens": -1, "completion_tokens": "4"}, Usage()),
        (
            {"input_tokens": 7, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 6}},
            Usage(7, 2, 6),
        ),
    ],
)
def test_usage_is_read_in_every_form(usage: object, expected: Usage) -> None:
    told = outcome_of(200, {"choices": [CHOICE], "usage": usage}).usage
    assert told == replace(expected, num_choices=1)


def test_the_answers_of_a_row_are_counted() -> None:
    body = {"choices": [CHOICE] * 3, "usage": {"prompt_tokens": 9, "completion_tokens": 12}}
    assert outcome_of(200, body).usage == Usage(9, 12, 0, num_choices=3)
    assert outcome_of(200, {"data": [{}] * 3}, endpoint="/v1/embeddings").usage == Usage()


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ({"error": {"message": "a\n  b", "type": "T", "code": 400}}, "T", "a b"),
        ({"error": {"message": "m", "code": "context_length"}}, "context_length", "m"),
        (
            {"object": "error", "message": "flat", "type": "BadRequestError"},
            "BadRequestError",
            "flat",
        ),
        ({"error": "plain"}, "http_400", "plain"),
        ({"detail": [{"loc": "body"}]}, "http_400", '[{"loc": "body"}]'),
        (b"not json", "http_400", "not json"),
        (b"", "http_400", "the engine answered HTTP 400"),
    ],
)
def test_error_bodies_of_every_form_give_one_line(body: object, code: str, message: str) -> None:
    error = outcome_of(400, body).error
    assert error is not None
    assert (error.code, error.message) == (code, message)


@pytest.mark.parametrize(
    "error",
    [
        {"message": "The model `x` does not exist.", "code": 400},
        {"message": "no such thing", "code": "model_not_found"},
    ],
)
def test_a_400_for_an_unknown_model_is_the_jobs_fault(error: dict[str, object]) -> None:
    assert outcome_of(400, {"error": error}).kind is OutcomeKind.JOB_ERROR


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("3", 3.0),
        ("0.5", 0.5),
        ("-2", 0.0),
        ("inf", None),
        ("nan", None),
        ("soon", None),
        ("Tue, 14 Nov 2023 22:13:30 GMT", 10.0),
        ("Tue, 14 Nov 2023 22:00:00 GMT", 0.0),
    ],
)
def test_retry_after_is_read_as_seconds_or_date(value: str | None, expected: float | None) -> None:
    assert parse_retry_after(value, now_s=NOW_S) == expected


def test_retry_after_reaches_the_outcome() -> None:
    assert outcome_of(429, {"error": {"message": "busy"}}, retry_after="2").retry_after_s == 2.0


SURROGATE = b'{"choices": [{"finish_reason": "\\ud800", "message": {"content": "x"}}]}'
DEEP = b'{"choices": [{}], "x": ' + b"[" * 600 + b"]" * 600 + b"}"


@pytest.mark.parametrize("raw", [SURROGATE, DEEP, b"\xef\xbb\xbf" + SURROGATE, b'{"choices": NaN}'])
def test_a_reply_that_cannot_be_written_again_is_no_answer(raw: bytes) -> None:
    outcome = outcome_of(200, raw)

    assert outcome.kind is OutcomeKind.RETRY
    assert outcome.error is not None and outcome.error.code == "invalid_response"


@pytest.mark.parametrize("told", [10**400, -1, True, 1.5, "7"])
def test_what_can_be_no_number_of_tokens_is_not_counted(told: object) -> None:
    outcome = outcome_of(200, {"choices": [CHOICE], "usage": {"prompt_tokens": told}})

    assert (outcome.kind, outcome.usage) == (OutcomeKind.OK, Usage(num_choices=1))


@pytest.mark.parametrize("told", ["9" * 400, "9" * 5_000, "99999999999", "2147483647", "-1", "1e9"])
@pytest.mark.parametrize("label", ["block_size", "num_gpu_blocks"])
def test_what_can_be_no_size_of_a_cache_is_not_known(label: str, told: str) -> None:
    labels = {"block_size": "16", "num_gpu_blocks": "1000"} | {label: told}
    page = ",".join(f'{name}="{value}"' for name, value in labels.items())
    config = parse_kv_config(f"{METRIC}{{{page}}} 1.0\n")

    assert config is None or config.num_tokens is None


@pytest.mark.parametrize("told", ["999999999999999", "9" * 400])
def test_the_gateway_counts_no_number_of_tokens_that_can_be_none(told: str) -> None:
    usage = ReplyUsage()
    usage.feed(f'{{"usage":{{"prompt_tokens":{told},"completion_tokens":7}}}}'.encode())

    assert (usage.prompt_tokens, usage.output_tokens) == (0, 7)


@pytest.mark.parametrize("num_bytes", [1, 30, 1_000])
def test_a_response_begins_with_the_first_event_that_the_core_had_a_part_in(num_bytes: int) -> None:
    usage = ReplyUsage()
    opening = b": ping\r\n\r\n" + b"".join(
        b': keep-alive\n\nevent: response.%s\ndata: {"told": "data:"}\n\n' % name
        for name in (b"created", b"in_progress")
    )
    for start in range(0, len(opening), num_bytes):
        usage.feed(opening[start : start + num_bytes])
        assert not usage.has_begun
    usage.feed(b"event: response.output_item.added\ndata: {}\n\n")
    assert (usage.has_begun, usage.num_events) == (True, 1)


@pytest.mark.parametrize(
    ("usage", "told", "tpot_s"),
    [
        (ReplyUsage(8), b'"completion_tokens": 88', 0.2),
        (ReplyUsage(0), b'"completion_tokens": 88', None),
        (ReplyUsage(is_sparse=True), b'"completion_tokens": 11', 0.2),
        (ReplyUsage(is_sparse=True), b"data: x" * 11, None),
        (ReplyUsage(), b"data: x" * 12, 0.2),
        (ReplyUsage(), b'data: {"tool_calls": [], "function_call": null}' * 12, 0.2),
        (ReplyUsage(), b'data: {"tool_calls": [{}]}' * 12, None),
        (ReplyUsage(), b'data: {"type": "function_call"}' * 12, None),
        (ReplyUsage(), b'data: "tool_calls":[{}]"completion_tokens": 11', 0.2),
    ],
)
def test_the_pace_is_that_of_the_tokens_of_one_choice(
    usage: ReplyUsage, told: bytes, tpot_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    instants = iter((5.0, 7.0, 9.0))
    monkeypatch.setattr(ReplyUsage, "now_s", staticmethod(lambda: next(instants)))
    usage.feed(b"{")
    usage.feed(told)
    usage.feed(b": keep-alive\n\n")
    assert usage.tpot_s == pytest.approx(tpot_s)


async def test_what_an_engine_tells_of_itself_is_bounded() -> None:
    server = await asyncio.start_server(EvilEngine().serve_connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = EngineClient(f"http://127.0.0.1:{port}")
    try:
        assert await client.models() == (MODEL,)
        assert client.context_tokens == {MODEL: None}
        config = await client.kv_config()
        assert config is not None and config.num_tokens is None
    finally:
        await client.close()
        server.close()


async def test_a_connection_that_is_a_reply_behind_is_used_once() -> None:
    async def answer_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Each call on a connection gets the reply to the one before, the first its own."""
        before = None
        with suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(re.findall(rb"(?i)content-length: (\d+)", head)[0]))
                asked = re.findall(rb"(?i)x-request-id: (\S+)", head)[0].decode()
                reply = {"id": f"chatcmpl-{before or asked}", "choices": [CHOICE]}
                writer.write(whole(json.dumps(reply).encode()))
                before = asked
        writer.close()

    server = await asyncio.start_server(answer_late, "127.0.0.1", 0)
    client = EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        kinds = [(await client.execute(make_request(CHAT, row=row))).kind for row in range(4)]
    finally:
        await client.close()
        server.close()
    assert kinds == [OutcomeKind.OK, OutcomeKind.RETRY, OutcomeKind.OK, OutcomeKind.RETRY]


def test_a_date_outside_of_the_calendar_is_no_wait() -> None:
    assert parse_retry_after("Mon, 01 Jan 0001 00:00:00 +9999", now_s=NOW_S) is None


def test_the_words_of_an_error_hold_no_control_characters() -> None:
    told = {"message": "no\x1b]0;title\x07 \x9b1m\0way", "code": "a\0b", "type": "\x1b"}
    outcome = outcome_of(400, {"error": told})

    assert outcome.error is not None
    assert outcome.error.message == "no ]0;title 1m way"
    assert (outcome.error.code, outcome.error.type) == ("a b", None)
