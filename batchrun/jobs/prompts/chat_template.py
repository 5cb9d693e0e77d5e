"""A model's chat template: the prompt text that the engine makes of a chat, for prefix keys.

Follows vLLM 0.32 (`renderers/hf.py`, `renderers/chat_utils.py`) and the template environment of
Hugging Face's transformers, without importing either.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from batchrun.errors import ConfigError
from batchrun.jobs.prompts.prompt_text import (
    prefix_text,
    template_messages,
    until_open_end,
    with_open_end,
)
from batchrun.jobs.prompts.templating import JobEnvironment, render_text

OWN_RENDERERS = ("deepseek_v32", "deepseek_v4", "deepseek_v41", "gpt_oss", "inkling", "kimi_k3")
"""Values of `model_type` whose chats vLLM renders in code of its own."""
REFUSALS = (
    TemplateError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError,
    RecursionError,
)  # fmt: skip
"""What rendering one chat can raise."""
_MAX_COMPILED = 16


class _Compiled(NamedTuple):
    template: Template
    takes_parts: bool
    takes_developer: bool


class ChatTemplate:
    """One model's templates, compiled once. Used by one thread at a time.

    `templates` maps names to texts: `default`, and `tool_use` for chats with tools where the
    model has one. `now` is the time that they are told: one for a whole job, or a date in the
    prompt would part its rows.
    Raises ConfigError when a template is not well-formed.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        now: datetime,
    ) -> None:
        environment = _make_environment(now)
        self._compile = lru_cache(_MAX_COMPILED)(lambda text: _compile(environment, text))
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        for name, text in templates.items():
            try:
                self._compile(text)
            except TemplateError as failure:
                raise ConfigError(f"chat template {name!r}: {failure}") from None

    @classmethod
    def load(cls, folder: Path, *, now: datetime) -> Self | None:
        """The template of the model in `folder`; None when there is none, or vLLM does not use it.

        `chat_template.jinja` goes before the one in `tokenizer_config.json`. Raises ConfigError
        when a file cannot be read or a template is not well-formed.
        """
        try:
            if _has_own_renderer(folder):
                return None
            config = _read_json(folder / "tokenizer_config.json")
            templates = _find_templates(folder, config)
            special = _token_texts(_read_json(folder / "special_tokens_map.json") | config)
        except (OSError, ValueError, LookupError, TypeError) as failure:
            raise ConfigError(f"{folder}: its chat template cannot be read: {failure}") from None
        try:
            return cls(templates, special, now=now) if templates else None
        except ConfigError as failure:
            raise ConfigError(f"{folder}: {failure}") from None

    def prefix_text(self, body: Mapping[str, object]) -> bytes:
        """The prompt of any request as bytes; what is no chat is left to `prefix_text`.

        A chat that the template refuses is laid out in the common order.
        """
        if "messages" in body:
            try:
                return self.render(body).encode("utf-8", "surrogatepass")
            except REFUSALS:
                pass
        return prefix_text(body)

    def render(self, body: Mapping[str, object]) -> str:
        """The prompt text of a chat. Raises one of `REFUSALS` when the engine has none either."""
        tools = _tools(body)
        template, takes_parts, takes_developer = self._choose(body, has_tools=tools is not None)
        messages = template_messages(
            body["messages"], in_parts=takes_parts, keep_developer=takes_developer
        )
        values = {
            **self._special_tokens,
            "documents": None,
            "tools": tools,
            **_template_kwargs(body),
            "messages": messages,
        }
        if not values["continue_final_message"]:
            return render_text(template, values)
        if values["add_generation_prompt"]:
            raise ValueError("a chat cannot go on with its last message and begin another one")
        messages[-1] = with_open_end(messages[-1])
        return until_open_end(render_text(template, values))

    def _choose(self, body: Mapping[str, object], *, has_tools: bool) -> _Compiled:
        if body.get("chat_template") is not None:
            raise ValueError("the engine takes no template from a request")
        name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        return self._compile(self._templates[name])


def _tools(body: Mapping[str, object]) -> list[dict[str, object]] | None:
    tools = body.get("tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise TypeError("'tools' must be a list")
    return [_tool(tool) for tool in tools]


def _tool(tool: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """A tool with the fields, and in the order, that vLLM's schema gives it."""
    function = tool["function"]
    told = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        told["strict"] = function["strict"]
    return {"type": "function", "function": told}


def _template_kwargs(body: Mapping[str, object]) -> dict[str, object]:
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping) or given.keys() & {"chat_template", "tokenize"}:
        raise ValueError("the engine refuses these chat_template_kwargs")
    effort = body.get("reasoning_effort")
    told = {
        "enable_thinking": None if effort is None else effort != "none",
        **given,
        "add_generation_prompt": body.get("add_generation_prompt", True),
        "continue_final_message": body.get("continue_final_message", False),
    }
    told |= {name: body.get(name, given.get(name)) for name in ("documents", "reasoning_effort")}
    return {name: value for name, value in told.items() if value is not None and value != "auto"}


def _has_own_renderer(folder: Path) -> bool:
    """Whether vLLM renders this model's chats without a Jinja template."""
    if _read_json(folder / "config.json").get("model_type") in OWN_RENDERERS:
        return True
    # Mistral's library reads these; vLLM prefers it where the weights have Mistral's names too.
    tokenizers = [*folder.glob("tekken.json"), *folder.glob("tokenizer.model.v*")]
    return bool(tokenizers) and any(folder.glob("consolidated*.safetensors"))


def _find_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    files["default"] = folder / "chat_template.jinja"
    found = {name: path.read_text("utf-8") for name, path in files.items() if path.is_file()}
    told = config.get("chat_template")
    if found or told is None:
        return found
    if isinstance(told, list):
        return {str(item["name"]): str(item["template"]) for item in told}
    return {"default": str(told)}


def _token_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens by their names in templates, such as `bos_token`."""
    named = ((name, value) for name, value in config.items() if name.endswith("_token"))
    texts = ((name, v.get("content") if isinstance(v, dict) else v) for name, v in named)
    return {name: text for name, text in texts if isinstance(text, str)}


def _read_json(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    if not isinstance(document, dict):
        raise ValueError(f"{path.name} holds no object")
    return document


class _Generation(Extension):
    """`{% generation %}`, which marks text for training; here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012 - Jinja2 reads it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_plain"), [], [], body).set_lineno(line)

    def _plain(self, caller: Callable[[], str]) -> str:
        return caller()


def _make_environment(now: datetime) -> JobEnvironment:
    """What Hugging Face's templates rely on, in the sandbox of job files."""
    environment = JobEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _to_json(value: object, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _compile(environment: JobEnvironment, text: str) -> _Compiled:
    takes_developer = "'developer'" in text or '"developer"' in text
    takes_parts = _takes_parts(environment.parse(text))
    return _Compiled(environment.from_string(text), takes_parts, takes_developer)


def _takes_parts(tree: nodes.Template) -> bool:
    """Whether a template loops over the parts of contents, as vLLM tells it (format `openai`)."""
    names = {"content"}
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            pairs = zip(macros[call.node.name].args, call.args, strict=False)
            names |= {parameter.name for parameter, given in pairs if _is_content(given, names)}
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None, names: Collection[str]) -> bool:
    if isinstance(node, nodes.Filter | nodes.Test):
        return _is_content(node.node, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node, names)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names
