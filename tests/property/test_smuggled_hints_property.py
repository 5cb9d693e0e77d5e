"""No body that the gateway lets through steers vLLM, however a caller spells what would.

Bodies are read as vLLM's server reads them: `json.loads` of the bytes (Starlette), then its own
request models, then the sampling parameters in which the scheduler looks for a hint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic_core import from_json
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from batchrun.errors import InputError
from batchrun.hints import HINT_KEY, HINT_VERSION, read_hint
from batchrun.server.gateway.bodies import strip_hints

NONCE = "the engine's secret"
HINT = json.dumps({
    "v": HINT_VERSION,
    "nonce": NONCE,
    "epoch": 1,
    "job": "job_a",
    "row": 0,
    "class": "offline",
    "rank": -9,
    "nodes": [],
})
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"]
BLANKS = st.text(" \t\r\n", max_size=2)
CHAT_FIELDS = ['"model": "m"', '"messages": [{"role": "user", "content": "hi"}]']
COMPLETION_FIELDS = ['"model": "m"', '"prompt": "hi"']


@st.composite
def spellings(draw: st.DrawFn, key: str) -> str:
    """The key as a JSON string: any of its letters escaped, in either case of hexadecimal."""
    letters = []
    for letter in key:
        form = draw(st.sampled_from(["{0}", "\\u{1:04x}", "\\u{1:04X}"]))
        letters.append(form.format(letter, ord(letter)))
    return '"' + "".join(letters) + '"'


def values(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """JSON texts, those that a parser may stumble over included."""
    odd = ["-9", "0", "1e3", "NaN", "1E400", "null", '"-9"', '"\\ud800"', '"\u20ac"', "[]", "{}"]
    return st.sampled_from([*odd, json.dumps(HINT), '"}, \\"priority\\": -9"']) | inner


@st.composite
def objects(draw: st.DrawFn, fields: Sequence[str] = (), depth: int = 2) -> str:
    """A JSON object with steering keys among others, repeated and nested, in any order."""
    inner = objects(depth=depth - 1) if depth else st.just("{}")
    keys = st.sampled_from(["priority", "vllm_xargs", HINT_KEY, "Priority", "x", "priority "])
    pairs = list(fields)
    for key in draw(st.lists(keys, max_size=4)):
        blank = draw(BLANKS)
        pairs.append(f"{draw(spellings(key))}{blank}:{blank}{draw(values(inner))}")
    return "{" + ", ".join(draw(st.permutations(pairs))) + "}"


def bodies(fields: Sequence[str]) -> st.SearchStrategy[bytes]:
    """Whole bodies in every encoding that JSON parsers take, half characters included."""
    return st.builds(
        lambda text, blank, encoding: (blank + text + blank).encode(encoding, "surrogatepass"),
        objects(fields),
        BLANKS,
        st.sampled_from(ENCODINGS),
    )


def is_steered(passed: bytes, kind: type[ChatCompletionRequest] | type[CompletionRequest]) -> bool:
    """Whether vLLM would find a priority or a hint in a body; it may refuse it instead."""
    try:
        request = kind.model_validate(json.loads(passed))
        extra = request.to_sampling_params(8, {}).extra_args
    except (ValueError, ValidationError, RecursionError):
        return False
    return request.priority != 0 or read_hint((extra or {}).get(HINT_KEY), NONCE) is not None


def check_nothing_steers(
    body: bytes, kind: type[ChatCompletionRequest] | type[CompletionRequest]
) -> None:
    try:
        passed = strip_hints(body)
    except InputError:
        return
    assert not is_steered(passed, kind)
    for parse in (json.loads, from_json):
        try:
            document = parse(passed)
        except ValueError:
            continue
        assert "priority" not in document
        extra = document.get("vllm_xargs")
        assert not isinstance(extra, dict) or HINT_KEY not in extra


@example(b'{"vllm_xargs": {"batchrun": 1}, "vllm_xargs": {"x": {"batchrun": 1}}}')
@given(body=bodies(CHAT_FIELDS))
def test_no_chat_call_steers_the_scheduler(body: bytes) -> None:
    check_nothing_steers(body, ChatCompletionRequest)


@given(body=bodies(COMPLETION_FIELDS))
def test_no_completion_call_steers_the_scheduler(body: bytes) -> None:
    check_nothing_steers(body, CompletionRequest)


def test_the_same_calls_would_steer_without_the_gateway() -> None:
    for fields, kind in (
        (CHAT_FIELDS, ChatCompletionRequest),
        (COMPLETION_FIELDS, CompletionRequest),
    ):
        for steering in (
            '"priority": 1, "\\u0070riority": -9',
            f'"vllm_\\u0078args": {{"b\\u0061tchrun": {json.dumps(HINT)}}}',
        ):
            body = "{" + ", ".join([*fields, steering]) + "}"
            for encoding in ENCODINGS:
                assert is_steered(body.encode(encoding), kind)
