"""Chats as the model's template renders them, and in the common order where there is none."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import pytest

from batchrun.errors import ConfigError
from batchrun.jobs.prompts.prompt_text import ChatTemplate, prefix_text

FOLDER = Path(__file__).parents[1] / "chat_templates"
NOW = datetime(2026, 3, 9, 12)
PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
SYSTEM = {"role": "system", "content": "You help."}
USER = {"role": "user", "content": "Why?"}
REPLY = {"role": "assistant", "content": "Because."}
TOOL = {"type": "function", "function": {"parameters": {"type": "object"}, "name": "find"}}


def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(
        {"default": (FOLDER / f"{name}_manner.jinja").read_text("utf-8")},
        {"bos_token": "<s>", "eos_token": "</s>"},
        now=NOW,
    )


def template(text: str) -> ChatTemplate:
    return ChatTemplate({"default": text}, {}, now=NOW)


def chat(*messages: Mapping[str, object], **fields: object) -> dict[str, object]:
    return {"model": "m", "messages": list(messages), **fields}


def shared_text(first: str, second: str) -> str:
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((index for index, (a, b) in pairs if a != b), None)]


FOUR_TURNS = chat(SYSTEM, USER, REPLY, {"role": "user", "content": "Then?"}, tools=[TOOL])


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("qwen", ["You help.", "find", "<|im_start|>user", "Why?", "Because.", "Then?"]),
        ("llama", ["You help.", "|>user", "find", "Why?", "Because.", "Then?"]),
        ("mistral", ["Why?", "Because.", "find", "You help.", "Then?"]),
    ],
)
def test_texts_stand_where_the_template_puts_them(name: str, parts: list[str]) -> None:
    text = template_of(name).render(FOUR_TURNS)
    assert sorted(parts, key=text.index) == parts


def test_without_a_template_tools_stand_between_the_system_text_and_the_messages() -> None:
    text = prefix_text(FOUR_TURNS).decode()
    parts = [
        "<|system|>",
        "You help.",
        "<|tools|>",
        "find",
        "<|user|>",
        "Why?",
        "Because.",
        "Then?",
    ]
    assert sorted(parts, key=text.index) == parts


def test_without_a_system_text_the_tools_stand_first() -> None:
    assert prefix_text(chat(USER, tools=[TOOL])).startswith(b"<|tools|>")


@pytest.mark.parametrize(("name", "shares_system"), [("qwen", True), ("mistral", False)])
def test_rows_with_other_tools_share_what_stands_before_the_tools(
    name: str, *, shares_system: bool
) -> None:
    other = {"function": {"name": "other"}}
    texts = [template_of(name).render(chat(SYSTEM, USER, tools=[tool])) for tool in (TOOL, other)]
    assert ("You help." in shared_text(*texts)) is shares_system


def test_tools_have_the_fields_and_the_order_of_vllms_schema() -> None:
    tool = {"function": {"parameters": {"b": 1, "a": "é<"}, "extra": 1, "name": "find"}}
    text = template("{{ tools | tojson }}").render(chat(USER, tools=[tool]))
    function = '{"name": "find", "description": null, "parameters": {"b": 1, "a": "é<"}}'
    assert text == f'[{{"type": "function", "function": {function}}}]'


def test_arguments_of_a_call_become_an_object_and_the_body_stays() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    body = chat(USER, {"role": "assistant", "content": None, "tool_calls": [call]})
    before = copy.deepcopy(body)
    text = template("{{ messages[1].tool_calls[0].function.arguments.a[0] + 1 }}").render(body)
    assert (text, body) == ("2", before)


PARTS = "{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}"
MACRO = (
    "{% macro show(told) %}{% for p in told %}({{ p.text }}){% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m['content']) }}{% endfor %}"
)


@pytest.mark.parametrize("content", ["x", [{"type": "text", "text": "x"}]])
def test_contents_come_as_the_template_takes_them(content: object) -> None:
    body = chat({"role": "user", "content": content})
    texts = [template(text).render(body) for text in (PARTS, MACRO, PLAIN)]
    assert texts == ["(x)", "(x)", "[user] x\n"]


def test_an_image_counts_where_the_template_puts_it() -> None:
    def key(url: str, detail: str = "low") -> str:
        image = {"type": "image_url", "image_url": {"url": url, "detail": detail}}
        words = [{"type": "text", "text": text} for text in ("before", "after")]
        message = {"role": "user", "content": [words[0], image, words[1]]}
        return template_of("qwen").render(chat(message))

    first, second = key("data:a"), key("data:b")
    assert first == key("data:a", "high") != second
    shared = len(shared_text(first, second))
    assert first.index("before") < shared < first.index("<|image_pad|>") < first.index("after")


def test_media_come_first_where_contents_are_text() -> None:
    words = {"type": "text", "text": "look"}
    image = {"type": "image_url", "image_url": {"url": "data:a"}}
    lines = template(PLAIN).render(chat({"role": "user", "content": [words, image]})).splitlines()
    assert lines[0].startswith("[user] <|") and lines[1] == "look"


def test_developer_messages_become_one_system_message_unless_the_template_knows_them() -> None:
    body = chat({"role": "developer", "content": "Be brief."}, USER, SYSTEM)
    assert template(PLAIN).render(body) == "[system] Be brief.\n\nYou help.\n[user] Why?\n"
    kept = template(PLAIN + "{# 'developer' #}").render(body)
    assert kept.startswith("[developer] Be brief.\n[user]")


@pytest.mark.parametrize("trimmed", ["", " | trim"])
def test_a_continued_message_has_no_end(trimmed: str) -> None:
    text = "{% for m in messages %}<{{ m.content" + trimmed + " }}>{% endfor %}"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    body = chat(USER, {"role": "assistant", "content": "So "}, **options)
    assert template(text).render(body) == "<Why?><So" + ("" if trimmed else " ")


def test_options_of_the_request_reach_the_template() -> None:
    text = "{{ depth }} {{ add_generation_prompt }} {{ enable_thinking }}"
    body = chat(USER, chat_template_kwargs={"depth": 2}, reasoning_effort="none")
    assert template(text).render(body) == "2 True False"


def test_tools_are_shown_even_where_none_may_be_called() -> None:
    assert "find" in template("{{ tools }}").render(chat(USER, tools=[TOOL], tool_choice="none"))


def test_a_template_in_a_request_counts_nothing_as_the_engine_refuses_it() -> None:
    body = chat(USER, chat_template="own {{ messages[0].content }}")
    assert template(PLAIN).prefix_text(body) == prefix_text(body)


@pytest.mark.parametrize(
    "text",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.nothing.at_all }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ 'x' * 2 ** 40 }}",
        "{% for i in range(9999) %}{{ 'xxxxxxxx' * 9999 }}{% endfor %}",
    ],
)
def test_a_chat_that_the_template_refuses_is_laid_out_in_the_common_order(text: str) -> None:
    assert template(text).prefix_text(chat(SYSTEM, USER)) == b"<|system|>You help.<|user|>Why?"


@pytest.mark.parametrize("messages", [None, [], [{"content": "x"}], [7], "text"])
def test_what_is_no_chat_never_fails(messages: object) -> None:
    for body in ({"messages": messages}, {"prompt": "once"}):
        assert template(PLAIN).prefix_text(body) == prefix_text(body)


def test_one_time_is_told_for_a_whole_job() -> None:
    assert template("{{ strftime_now('%d %b %Y') }}").render(chat(USER)) == "09 Mar 2026"


def test_tags_of_hugging_face_are_known() -> None:
    text = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert template(text).render(chat(USER, REPLY)) == "Why?"


def write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_the_template_file_goes_before_the_tokenizers_configuration(tmp_path: Path) -> None:
    config = {"chat_template": "old", "bos_token": {"content": "<s>"}, "add_bos_token": True}
    special = {"bos_token": "<x>", "eos_token": "</s>"}
    write(tmp_path, tokenizer_config__json=config, special_tokens_map__json=special)
    old = ChatTemplate.load(tmp_path, now=NOW)
    write(tmp_path, chat_template__jinja="{{ bos_token }}new{{ eos_token }}")
    new = ChatTemplate.load(tmp_path, now=NOW)
    assert old is not None and old.render(chat(USER)) == "old"
    assert new is not None and new.render(chat(USER)) == "<s>new</s>"


def test_a_list_of_templates_has_one_for_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path, tokenizer_config__json={"chat_template": named})
    made = ChatTemplate.load(tmp_path, now=NOW)
    assert made is not None and made.render(chat(USER)) == "plain"
    assert made.render(chat(USER, tools=[TOOL])) == "tools"


def test_a_folder_whose_template_vllm_does_not_use_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path, now=NOW) is None
    write(tmp_path, chat_template__jinja=PLAIN, config__json={"model_type": "gpt_oss"})
    assert ChatTemplate.load(tmp_path, now=NOW) is None
    write(tmp_path, config__json={"model_type": "mistral"}, tekken__json={})
    assert ChatTemplate.load(tmp_path, now=NOW) is not None
    (tmp_path / "consolidated.safetensors").touch()
    assert ChatTemplate.load(tmp_path, now=NOW) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [("config.json", "[1]"), ("config.json", "{"), ("chat_template.jinja", "{% if")],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"{tmp_path}.* chat template"):
        ChatTemplate.load(tmp_path, now=NOW)
