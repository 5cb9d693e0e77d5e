"""A request's text as the engine's template makes it, for prefix keys.

Where the model's chat template is at hand, it is rendered as vLLM 0.32 (`renderers/hf.py`,
`renderers/chat_utils.py`) and the template environment of Hugging Face's transformers do, without
importing either. Where it is not, all chats are laid out in the most common order: system text,
tools, messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import xxhash
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from batchrun.errors import ConfigError
from batchrun.jobs.prompts.templating import JobEnvironment, render_text
from batchrun.strict import LARGE_JSON_BYTES, parse_json

OWN_RENDERERS = ("deepseek_v32", "deepseek_v4", "deepseek_v41", "gpt_oss", "inkling", "kimi_k3")
"""Values of `model_type` whose chats vLLM renders in code of its own."""
REFUSALS = (
    TemplateError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError,
    RecursionError,
)  # fmt: skip
"""What rendering one chat can raise."""
_MAX_COMPILED = 16
Part = tuple[str, str]
"""(kind, text): `text`, or `image`, `audio`, `video` with a mark for the text."""

_OPEN_END = "\ue000open end\ue000"
SYSTEM_ROLES = frozenset({"system", "developer"})
_MEDIA = ("image", "audio", "video")
_TEXT_KINDS = frozenset({"refusal", "thinking"})
_KEPT_FIELDS = ("name", "reasoning", "tool_call_id")


def prefix_text(body: Mapping[str, object]) -> bytes:
    """The prompt as bytes: equal leading bytes mean equal leading tokens, up to the last few.

    Chats give their messages with roles; images count as a hash of their URL. Completions give
    their prompt, embeddings their input.
    """
    if "messages" in body:
        parts = _chat(body["messages"], body)
    elif "prompt" in body:
        parts = iter([_text(body["prompt"])])
    else:
        parts = _responses(body)
    return "".join(parts).encode("utf-8", "surrogatepass")


def media_mark(url: str) -> str:
    """What stands in a prompt for what is not text; equal for equal addresses."""
    return f"<|{xxhash.xxh3_64_hexdigest(url.encode('utf-8', 'surrogatepass'))}|>"


def _content_parts(content: object) -> list[Part]:
    """The parts of a message's content, or of a prompt: text as it is, and for all else its kind
    with a mark that is equal for equal URLs."""
    if isinstance(content, str):
        return [("text", content)]
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        return [_part(part) for part in content]
    return [] if content is None else [("text", _json(content))]


def _template_messages(
    messages: object, *, in_parts: bool, keep_developer: bool
) -> list[dict[str, object]]:
    """The messages of a chat as vLLM hands them to a template; the given ones are left alone.

    `in_parts`: contents are lists of parts, else text in which media come first. Without
    `keep_developer`, developer messages become system messages, and all of these one. Raises
    LookupError, TypeError or ValueError when these are no messages.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("'messages' must be a list of at least one message")
    if sum(map(_num_argument_chars, messages)) > LARGE_JSON_BYTES:
        raise ValueError("its tool calls hold too much")
    shown = [_template_message(message, in_parts=in_parts) for message in messages]
    if keep_developer or not any(message["role"] == "developer" for message in shown):
        return shown
    system = [_lines(message["content"]) for message in shown if message["role"] in SYSTEM_ROLES]
    rest = [message for message in shown if message["role"] not in SYSTEM_ROLES]
    return [{"role": "system", "content": "\n\n".join(filter(None, system))}, *rest]


def _with_open_end(message: dict[str, object]) -> dict[str, object]:
    """A message of `_template_messages` with a mark where its text ends."""
    content = message["content"]
    if not isinstance(content, list):
        return {**message, "content": f"{content}{_OPEN_END} "}
    last = max(index for index, part in enumerate(content) if "text" in part)
    marked = {**content[last], "text": f"{content[last]['text']}{_OPEN_END} "}
    return {**message, "content": [*content[:last], marked, *content[last + 1 :]]}


def _until_open_end(text: str) -> str:
    """The text before the mark. Raises ValueError when the template dropped it."""
    end = text.rindex(_OPEN_END)
    # A template that strips the message also strips the space after the mark.
    is_stripped = not text.startswith(f"{_OPEN_END} ", end)
    return text[:end].rstrip() if is_stripped else text[:end]


def _chat(messages: object, body: Mapping[str, object]) -> Iterator[str]:
    items = messages if isinstance(messages, list) else []
    is_system = [_role(item) in SYSTEM_ROLES for item in items]
    num_system = [*is_system, False].index(False)
    yield from (text for item in items[:num_system] for text in _message(item))
    if body.get("tools"):
        yield f"<|tools|>{_json(body['tools'])}"
    yield from (text for item in items[num_system:] for text in _message(item))


def _responses(body: Mapping[str, object]) -> Iterator[str]:
    content = body.get("input")
    if body.get("instructions"):
        yield f"<|system|>{body['instructions']}"
    if isinstance(content, list) and content and isinstance(content[0], dict):
        yield from _chat(content, body)
    else:
        yield _text(content)


def _role(message: object) -> str:
    return str(message.get("role", "")) if isinstance(message, Mapping) else ""


def _message(message: object) -> Iterator[str]:
    if not isinstance(message, Mapping):
        yield _json(message)
        return
    yield f"<|{_role(message)}|>"
    yield _text(message.get("content"))
    if message.get("tool_calls"):
        yield _json(message["tool_calls"])


def _text(content: object) -> str:
    return "".join(text for _, text in _content_parts(content))


def _part(part: Mapping[str, object]) -> Part:
    kind = str(part.get("type", ""))
    text = part.get("text", part.get(kind) if kind in _TEXT_KINDS else None)
    if isinstance(text, str):
        return "text", text
    media = next((name for name in _MEDIA if name in kind or f"{name}_url" in part), kind)
    source = part.get(f"{media}_url", part)
    url = source.get("url", source) if isinstance(source, Mapping) else source
    data = url if isinstance(url, str) else _json(url)
    return media, media_mark(data)


def _template_message(message: Mapping[str, object], *, in_parts: bool) -> dict[str, object]:
    role, parts = message["role"], _content_parts(message.get("content"))
    has_media = any(kind != "text" for kind, _ in parts)
    shown: dict[str, object] = {"role": role}
    if in_parts and (has_media or role != "tool"):
        shown["content"] = [item for kind, text in parts for item in _template_parts(kind, text)]
    else:
        shown["content"] = _lines(message.get("content"))
    shown |= {name: message[name] for name in _KEPT_FIELDS if message.get(name) is not None}
    if "reasoning" in shown:
        shown["reasoning_content"] = shown["reasoning"]
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        shown["tool_calls"] = [_with_arguments(call) for call in calls]
    return shown


def _lines(content: object) -> str:
    parts = sorted(_content_parts(content), key=lambda part: part[0] == "text")
    return "\n".join(text for _, text in parts)


def _template_parts(kind: str, text: str) -> list[dict[str, object]]:
    words: dict[str, object] = {"type": "text", "text": text}
    return [words] if kind == "text" else [words, {"type": kind}]


def _with_arguments(call: Mapping[str, object]) -> dict[str, object]:
    """A tool call in vLLM's order of fields, its arguments an object: empty when they are none."""
    function = call["function"]
    if not isinstance(function, Mapping):
        raise TypeError("'function' of a tool call must be an object")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments.encode())
        except ValueError:
            arguments = None
    shown = arguments if isinstance(arguments, Mapping) else {}
    named = {"arguments": shown, "name": function["name"]}
    return {"id": call.get("id"), "function": named, "type": "function"}


def _num_argument_chars(message: Mapping[str, Any]) -> int:
    """What the calls of a message hold as JSON in JSON, of which little must not become much."""
    texts = (call["function"].get("arguments") for call in message.get("tool_calls") or ())
    return sum(len(text) for text in texts if isinstance(text, str))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


class _Compiled(NamedTuple):
    template: Template
    takes_parts: bool
    takes_developer: bool


class ChatTemplate:
    """One model's templates, compiled once. Used by one thread at a time.

    `templates` maps names to texts: `default`, and `tool_use` for chats with tools where the
    model has one. `now` is the time that they show: one for a whole job, or a date in the
    prompt would part its rows.
    Raises ConfigError when a template is not well-formed.
    """

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], *, now: datetime
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
            if has_own_renderer(folder):
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

        A chat that the template refuses, or whose tool calls hold over 1 MiB, is laid out in the
        common order.
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
        messages = _template_messages(
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
        messages[-1] = _with_open_end(messages[-1])
        return _until_open_end(render_text(template, values))

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
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        shown["strict"] = function["strict"]
    return {"type": "function", "function": shown}


def _template_kwargs(body: Mapping[str, object]) -> dict[str, object]:
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping) or given.keys() & {"chat_template", "tokenize"}:
        raise ValueError("the engine refuses these chat_template_kwargs")
    effort = body.get("reasoning_effort")
    values = {
        "enable_thinking": None if effort is None else effort != "none",
        **given,
        "add_generation_prompt": body.get("add_generation_prompt", True),
        "continue_final_message": body.get("continue_final_message", False),
    }
    values |= {name: body.get(name, given.get(name)) for name in ("documents", "reasoning_effort")}
    return {name: value for name, value in values.items() if value is not None and value != "auto"}


def has_own_renderer(folder: Path) -> bool:
    """Whether vLLM renders the chats of the model in this folder without a Jinja template."""
    if _read_json(folder / "config.json").get("model_type") in OWN_RENDERERS:
        return True
    # Mistral's library reads these; vLLM prefers it where the weights have Mistral's names too.
    tokenizers = [*folder.glob("tekken.json"), *folder.glob("tokenizer.model.v*")]
    return bool(tokenizers) and any(folder.glob("consolidated*.safetensors"))


def _find_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    files["default"] = folder / "chat_template.jinja"
    found = {name: path.read_text("utf-8") for name, path in files.items() if path.is_file()}
    inline = config.get("chat_template")
    if found or inline is None:
        return found
    if isinstance(inline, list):
        return {str(item["name"]): str(item["template"]) for item in inline}
    return {"default": str(inline)}


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
