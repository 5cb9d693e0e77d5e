"""Cached tokens that are predicted from text alone, and those that the real vLLM then reports.

One engine after the other, each with another chat template, serves the same rows with tools.
"""

from __future__ import annotations

import json
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_builders import CHAT, REAL_MODEL, real_settings, start_and_let_go, stop

from batchrun.errors import EngineError
from batchrun.jobs.inputs.input_data import open_input
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.prompts.prompt_text import ChatTemplate, prefix_text
from batchrun.jobs.prompts.template import RequestTemplate
from batchrun.jobs.prompts.tokens import (
    TokenCounter,
    TokenRatio,
    predict_cached_in_row,
    sample_rows,
    token_counter,
)
from batchrun.pool.prefix_keys import CHUNK_BYTES, ChainBuilder
from batchrun.pool.radix_tree import PrefixOrder, order_by_prefix

pytestmark = [pytest.mark.nightly, pytest.mark.engine]

CHECKOUT = Path(__file__).parents[2]
TEMPLATES = CHECKOUT / "tests" / "chat_templates"
NUM_ROWS = 60
BLOCK_TOKENS = 32
TOLERANCE = 0.03
ENGINE_ARGS = (
    "--kv-cache-memory-bytes=134217728",  # more than all rows need
    "--max-model-len=8192",
    "--max-num-seqs=4",
    f"--block-size={BLOCK_TOKENS}",
)
TEMPLATE_NAMES = ("qwen", "llama", "mistral")

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Served:
    """One engine, what its folder says, and the rows' prompt and cached tokens in order."""

    name: str
    base_url: str
    template: ChatTemplate
    count: TokenCounter
    num_prompt_tokens: list[int]
    num_cached_tokens: list[int]

    def ask(self, path: str, body: Body) -> Body:
        return post(self.base_url + path, body)


def post(url: str, body: Body) -> Body:
    """Raises EngineError when the engine refuses."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            answer: Body = json.load(reply)
    except urllib.error.HTTPError as refusal:
        raise EngineError(refusal.read().decode()) from None
    return answer


@pytest.fixture(scope="module")
def bodies() -> list[Body]:
    """Rows of the shipped job, their tools in the body instead of the system text."""
    spec = load_job_file(CHECKOUT / "jobs" / "toolbench.yaml", cwd=CHECKOUT)
    data = open_input(spec.input)
    template = RequestTemplate(spec, data.columns, model=REAL_MODEL)
    made: list[Body] = []
    for number, row in enumerate(data.read_rows(range(NUM_ROWS))):
        body: Body = template.render(row, row_number=number)
        tools = str(row["tools"])
        body["messages"][0]["content"] = body["messages"][0]["content"].removesuffix(tools)
        body["tools"] = [{"type": "function", "function": tool} for tool in json.loads(tools)]
        made.append(body | {"tool_choice": "none", "max_tokens": 1})
    return made


def model_with(template: str, tiny_model: Path, folder: Path) -> Path:
    """A copy of the model whose chats this template renders."""
    model = shutil.copytree(tiny_model, folder / "model")
    shutil.copy(TEMPLATES / f"{template}_manner.jinja", model / "chat_template.jinja")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["bos_token"] = "<|endoftext|>"
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    return model


@pytest.fixture(scope="module", params=TEMPLATE_NAMES)
def served(
    request: pytest.FixtureRequest,
    tiny_model: Path,
    bodies: list[Body],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """The engine that has served all rows one after the other, in the planned order."""
    folder = tmp_path_factory.mktemp(request.param)
    model = model_with(request.param, tiny_model, folder)
    template = ChatTemplate.load(model, now=datetime.now())
    count = token_counter(model / "tokenizer.json")
    assert template is not None and count is not None
    settings = replace(real_settings(folder, model), vllm_args=ENGINE_ARGS)
    start_and_let_go(settings)
    try:
        order = order_of([template.prefix_text(body) for body in bodies])
        send = partial(post, settings.base_url + CHAT)
        usages = [send(bodies[row])["usage"] for row in order.rows.tolist()]
        yield Served(
            request.param,
            settings.base_url,
            template,
            count,
            [usage["prompt_tokens"] for usage in usages],
            [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages],
        )
    finally:
        stop(settings)


def order_of(texts: Sequence[bytes]) -> PrefixOrder:
    builder = ChainBuilder(0)
    builder.add(texts)
    return order_by_prefix(builder.build())


def counted(served: Served, bodies: Sequence[Body]) -> TokenRatio:
    """The ratio of the common order's text to the tokens that the engine counted."""
    ratio = TokenRatio()
    text_bytes = sum(len(prefix_text(body)) for body in bodies)
    ratio.correct(text_bytes, sum(served.num_prompt_tokens))
    return ratio


def predicted_tokens(
    key: Callable[[Body], bytes], bodies: Sequence[Body], ratio_of: Callable[..., TokenRatio]
) -> int:
    """The sum over all rows, planned by this key. `ratio_of` sees what rows share of their text."""
    texts = [key(body) for body in bodies]
    order = order_of(texts)
    planned = [texts[row] for row in order.rows.tolist()]
    sample = sample_rows(len(planned)).tolist()
    shared_bytes = (order.shared_chunks * CHUNK_BYTES).tolist()
    ratio = ratio_of(planned[row][: shared_bytes[row]] for row in sample)
    return sum(
        predict_cached_in_row(chunks, len(text), ratio.estimate_tokens(len(text)), BLOCK_TOKENS)
        for chunks, text in zip(order.shared_chunks.tolist(), planned, strict=True)
    )


def test_the_cached_tokens_that_come_back_were_predicted(
    served: Served, bodies: list[Body], capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = partial(TokenRatio.sampled, count=served.count)
    predicted = predicted_tokens(served.template.prefix_text, bodies, sampled)
    in_common_order = predicted_tokens(prefix_text, bodies, lambda _: counted(served, bodies))
    returned = sum(served.num_cached_tokens)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{served.name}: {predicted} cached tokens predicted "
            f"({predicted / returned - 1:+.1%}), "
            f"in the common order {in_common_order} ({in_common_order / returned - 1:+.1%}), "
            f"{returned} returned\n"
        )
    assert returned > sum(served.num_prompt_tokens) / 2
    assert predicted == pytest.approx(returned, rel=TOLERANCE)
    assert abs(predicted - returned) < abs(in_common_order - returned)
    if served.name == "mistral":
        assert in_common_order > returned * (1 + TOLERANCE)


def test_the_template_renders_what_the_engine_does(served: Served, bodies: list[Body]) -> None:
    call = {"name": "find", "arguments": '{"name": "é", "all": [true, null]}'}
    user: Body = {"role": "user", "content": [{"type": "text", "text": t} for t in ("So?", "Hm.")]}
    turns = [
        {"role": "developer", "content": "Be brief. "},
        user,
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "none"}]},
        user | {"name": "Ann"},
    ]
    for body in (*bodies[:3], bodies[0] | {"messages": turns}, {**bodies[0], "messages": [user]}):
        tokens = served.ask("/tokenize", body)["tokens"]
        rendering = served.ask("/detokenize", {"model": REAL_MODEL, "tokens": tokens})["prompt"]
        assert served.template.render(body) == rendering
