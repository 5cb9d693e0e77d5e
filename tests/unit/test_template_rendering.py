"""Rows become request bodies; a bad row is that row's own error."""

from __future__ import annotations

import base64
from decimal import Decimal
from pathlib import Path

import pytest
from image_builders import picture

from batchrun.errors import JobSpecError
from batchrun.jobs.prompts.template import RequestTemplate, RowRenderError
from batchrun.jobs.prompts.templating import make_environment
from batchrun.jobs.spec import JobSpec

COLUMNS = ["q", "n", "tags", "text", "image", "messages", "range"]
PNG = picture()


def make_spec(**changes: object) -> JobSpec:
    values: dict[str, object] = {
        "name": "x",
        "input": {"path": "/data/a.parquet", "messages": user("{{ q }}")},
        "output": {"path": "/o.jsonl"},
    }
    return JobSpec.model_validate({**values, **changes})


def user(content: object) -> list[object]:
    return [{"role": "user", "content": content}]


def make_template(content: object = None, **changes: object) -> RequestTemplate:
    if content is not None:
        changes["input"] = {"path": "/data/a.parquet", "messages": user(content)}
    return RequestTemplate(make_spec(**changes), COLUMNS, model="m")


def content_of(template: RequestTemplate, folder: Path | None = None, /, **row: object) -> object:
    body = template.render(row, row_number=0, folder=folder)
    assert isinstance(body["messages"], list)
    return body["messages"][0]["content"]


def test_the_body_has_model_messages_and_request_fields() -> None:
    template = make_template(request={"max_tokens": 8, "stop": ["\n"]})
    assert template.render({"q": "why?"}, row_number=0) == {
        "model": "m",
        "messages": [{"role": "user", "content": "why?"}],
        "max_tokens": 8,
        "stop": ["\n"],
    }


@pytest.mark.parametrize("text", ["{{ n }}{# note #}", "{# note #}{{ n }}"])
def test_a_note_beside_an_expression_makes_text_of_it(text: str) -> None:
    template = make_template(request={"stop": text})
    assert template.render({"q": "why?", "n": 7}, row_number=0)["stop"] == "7"


def test_only_the_columns_in_templates_are_used() -> None:
    template = make_template("{{ text }} {{ q }}", request={"seed": "{{ n }}"})
    assert template.columns_used == ("q", "n", "text")


@pytest.mark.parametrize("name", sorted(make_environment().globals))
def test_a_column_goes_before_a_function_of_the_same_name(name: str) -> None:
    spec = make_spec(input={"path": "/a.csv", "messages": user(f"{{{{ q }}}}{{{{ {name} }}}}")})
    template = RequestTemplate(spec, ["q", name], model="m")

    assert template.columns_used == ("q", name)
    assert content_of(template, **{"q": "a", name: "b"}) == "ab"


@pytest.mark.parametrize("name", ["self", "none", "None", "true", "True", "false", "False"])
def test_a_column_that_no_template_can_read_is_refused(name: str) -> None:
    spec = make_spec(input={"path": "/a.csv", "messages": user("{{ q }}")})
    RequestTemplate(spec, ["q", name], model="m")

    for text in (f"{{{{ q }}}} {{{{ {name} }}}}", f"{{% if {name} %}}{{{{ q }}}}{{% endif %}}"):
        spec = make_spec(input={"path": "/a.csv", "messages": user(text)})
        with pytest.raises(JobSpecError, match=f"content: .* not the column '{name}'; rename it"):
            RequestTemplate(spec, ["q", name], model="m")


def test_a_column_does_not_forbid_constants_as_arguments() -> None:
    text = "{{ q | default('none', true) }}{{ q | default('', boolean=true) }}"
    spec = make_spec(input={"path": "/a.csv", "messages": user(text)})

    assert content_of(RequestTemplate(spec, ["q", "true"], model="m"), q=None) == "none"


def test_an_image_column_and_a_field_may_be_of_any_name() -> None:
    parts = [{"image": {"column": "self"}}]
    spec = make_spec(input={"path": "/a.csv", "messages": user(parts)}, request={"seed": "{{ n }}"})
    template = RequestTemplate(spec, ["n", "self"], model="m")

    assert template.render({"n": 7, "self": "http://a/b.png"}, row_number=0)["seed"] == 7


def test_request_fields_of_one_expression_keep_their_type() -> None:
    request = {"seed": "{{ n }}", "stop": "{{ tags }}", "user": "u{{ n }}", "x": {"y": "{{ n+1 }}"}}
    body = make_template(request=request).render({"q": "a", "n": 7, "tags": ["b"]}, row_number=0)
    assert (body["seed"], body["stop"], body["user"], body["x"]) == (7, ["b"], "u7", {"y": 8})


@pytest.mark.parametrize(
    ("text", "row", "rendered"),
    [
        ("{{ n }}", {"n": 7}, "7"),
        ("{{ q }}\n", {"q": "<b> & 'x'"}, "<b> & 'x'\n"),
        ("{% for t in tags %}[{{ t }}]{% endfor %}", {"tags": ["a", "b"]}, "[a][b]"),
        ("{{ (q | fromjson).k }}", {"q": '{"k": 3}'}, "3"),
        ("{{ tags | tojson }}", {"tags": ["ä", "<"]}, '["ä", "<"]'),
        ("{{ q | tojson }}", {"q": {"price": Decimal("1.10")}}, '{"price": 1.1}'),
        ("{{ q | default('none', true) }}", {"q": None}, "none"),
        ("{{ range }}", {"range": "a column"}, "a column"),
        ("{{ q.items }}{{ tags.get('k') }}", {"q": {"items": 3}, "tags": {"k": 1}}, "31"),
        ("{% for k, v in q.items() %}{{ k ~ v }}{% endfor %}", {"q": {"k": 3}}, "k3"),
        ("{{ tags | join(', ', 'k') | upper }}", {"tags": [{"k": "a"}, {"k": 1}]}, "A, 1"),
        ("{{ q | default('none', true) | trim }}", {"q": None}, "none"),
        ("{{ q | trim | default('none', true) }}", {"q": None}, "none"),
        ("{% if q | lower == 'spam' %}a{% else %}b{% endif %}", {"q": None}, "b"),
        ("{{ q.items() | list }}", {"q": {"items": 1}}, "[('items', 1)]"),
        ("{{ q.get('x', 'y') }}{{ q.get }}", {"q": {"get": 1}}, "y1"),
        ("{% for i in [1, 2] %}{{ q * i }} {% endfor %}", {"q": "a"}, "a aa "),
        ("{{ '%*d|%-3s%%' % (n, 1700000000, q) }}", {"n": 12, "q": "a"}, "  1700000000|a  %"),
        ("{{ '%d %(k)s' if 0 else '%(k)3d' % q }}", {"q": {"k": 7}}, "  7"),
        ("{{ '%d' | format(n) }}{{ n % 7 }}", {"n": 1 << 40}, "10995116277762"),
        ("{{ '{:{}}|{:,}'.format(q, 3, n) }}", {"q": "a", "n": 1 << 40}, "a  |1,099,511,627,776"),
        ("{{ q | center(3) }}{{ q.ljust(2) }}{{ q.zfill(3) }}", {"q": "a"}, " a a 00a"),
        ("{{ q | indent(1) }}{{ tags | tojson(1) }}", {"q": "a\nb", "tags": [1]}, "a\n b[\n 1\n]"),
        ("{{ tags | tojson(0) }}", {"tags": [1]}, "[\n1\n]"),
        ("{{ tags | tojson('--') }}", {"tags": [1]}, "[\n--1\n]"),
        ("{{ '%%(a(b))%(k)3d' % q }}", {"q": {"k": 7}}, "%(a(b))  7"),
        ("{{ tags | batch(n) | list }}", {"tags": [1], "n": 1 << 60}, "[[1]]"),
        ("{{ tags | batch(2, n) | list }}", {"tags": [1], "n": 1 << 60}, f"[[1, {1 << 60}]]"),
        ("{{ tags | slice(2, n) | list }}", {"tags": [1], "n": 1 << 60}, f"[[1], [{1 << 60}]]"),
    ],
)
def test_message_text_is_text(text: str, row: dict[str, object], rendered: str) -> None:
    assert content_of(make_template(text), **row) == rendered


@pytest.mark.parametrize(
    ("text", "row", "problem"),
    [
        ("{{ q }}", {"q": None}, "a value is null"),
        ("{{ q | trim }}", {"q": None}, "a value is null"),
        ("{{ n ~ q ~ n }}", {"q": None, "n": 1}, "a value is null"),
        ("{{ q | replace('a', n) }}", {"q": "a", "n": None}, "a value is null"),
        ("{{ tags | join(', ') }}", {"tags": ["x", None]}, "a value is null"),
        ("{{ tags | map('upper') | join }}", {"tags": ["x", None]}, "a value is null"),
        ("{{ q.values }}", {"q": {"items": 3}}, "a value is a function"),
        ("{{ q }}", {"q": "  "}, "the prompt is empty"),
        ("{{ q }}", {"q": b"x"}, "a value is bytes"),
        ("{{ q.missing }}", {"q": "x"}, "no attribute 'missing'"),
        ("{{ n / 0 }}", {"n": 1}, "division by zero"),
        ("{{ q | fromjson }}", {"q": "{"}, "EOF while parsing an object"),
        ("{{ q * 100000000 }}", {"q": "ab"}, "grows over 64 Mi characters"),
        ("{{ n ** 100 }}", {"n": 9}, "the exponent is over 64"),
        ("{{ '%(a(b))d' % q }}", {"q": {"a(b)": 1}}, "a key of a % format has parentheses in it"),
        (
            "{{ tags | slice(n) | first }}",
            {"tags": [1], "n": 1 << 60},
            "over 1 Mi lists",
        ),
        ("{% for i in range(1000000) %}x{% endfor %}", {"range": range(5)}, None),
        ("{{ q.__class__.__mro__ }}", {"q": "x"}, "unsafe"),
        ("{{ q.format.__globals__ }}", {"q": "x"}, "unsafe"),
        ("{{ q | dictsort }}", {"q": None}, "has no attribute 'items'"),
        ([{"type": "text", "text": "{{ q }}"}], {"q": " "}, "the prompt is empty"),
        ([{"type": "text", "text": "{{ q }}"}] * 2, {"q": ""}, "the prompt is empty"),
    ],
)
def test_a_row_that_does_not_fit_is_a_row_error(
    text: object, row: dict[str, object], problem: str | None
) -> None:
    template = make_template(text)
    with pytest.raises(RowRenderError, match=problem or "not callable") as caught:
        template.render(row, row_number=41)
    assert caught.value.row_error.code == "template_error"
    assert str(caught.value) == f"row 41: {caught.value.row_error.message}"


@pytest.mark.parametrize(
    "expression",
    [
        "q | center(n)", "q | indent(n)", "q | indent(width=n)", "q.ljust(n)", "q.rjust(n, 'x')",
        "q.center(n)", "q.zfill(n)", "q.expandtabs(n)", "q.expandtabs(tabsize=n)",
        "tags | tojson(n)", "tags | batch(n, 0) | list", "'%*d' % (n, 1)", "'%.*f' % (n, 1)",
        "('%' ~ n ~ 'd') % 1", "('%%%(k)' ~ n ~ 's') | format(k=1)", "'%s %*d' | format(1, n, 1)",
        "'{:>{}}'.format(1, n)", "'{k:{n}}'.format_map({'k': 1, 'n': n})", "q * n",
        "text.center(n)", "text.expandtabs(n)", "text % (n, 1)", "n.to_bytes(n, 'big')",
    ],
)  # fmt: skip
def test_a_number_of_a_row_makes_nothing_enormous(expression: str) -> None:
    template = make_template("{{ " + expression + " }}")
    row = {"q": "a\n\tb", "n": 1 << 60, "tags": [1], "text": b"%*d\t"}
    with pytest.raises(RowRenderError, match="a value grows over 64 Mi characters or items"):
        template.render(row, row_number=0)


@pytest.mark.parametrize("width", [40 << 20, " " * (40 << 20)], ids=["number", "text"])
def test_the_width_of_an_indent_counts_for_each_line(width: object) -> None:
    template = make_template("{{ q | indent(n) | length }}")
    with pytest.raises(RowRenderError, match="grows over 64 Mi characters"):
        template.render({"q": "a\rb\rc", "n": width}, row_number=0)


@pytest.mark.parametrize("indent", [1_000, " " * 1_000], ids=["number", "text"])
def test_the_indent_of_json_counts_for_each_level(indent: object) -> None:
    nested: list[object] = [1] * 1_000
    for _ in range(100):
        nested = [nested]
    template = make_template("{{ tags | tojson(n) | length }}")
    with pytest.raises(RowRenderError, match="grows over 64 Mi characters"):
        template.render({"tags": nested, "n": indent}, row_number=0)


def test_what_memory_cannot_hold_is_a_row_error() -> None:
    with pytest.raises(RowRenderError, match="row 5: needs more memory than there is"):
        make_template("{{ tags | list }}").render({"tags": range(1 << 60)}, row_number=5)


@pytest.mark.parametrize("value", [{"type": "string"}, {"column": "n"}, "x", None])
def test_a_field_of_a_request_may_hold_what_is_called_image(value: object) -> None:
    template = make_template(request={"metadata": {"image": value}})

    body = template.render({"q": "hi"}, row_number=0)

    assert (body["metadata"], template.columns_used) == ({"image": value}, ("q",))


def test_messages_lose_the_nulls_that_parquet_gives_them() -> None:
    template = make_template(input={"path": "/data/a.parquet", "messages": "{{ messages }}"})
    part = {"type": "text", "text": "b"}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": None}]},
        {"role": "user", "content": [{**part, "image_url": None}], "name": "n", "refusal": None},
        {"role": "user", "content": [{"type": "x", "x": {"url": "u", "detail": None}}]},
    ]
    assert template.render({"messages": messages}, row_number=0)["messages"] == [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": [part], "name": "n"},
        {"role": "user", "content": [{"type": "x", "x": {"url": "u"}}]},
    ]


def test_items_lose_such_nulls_and_what_a_call_is_given_keeps_its_own() -> None:
    spec = make_spec(endpoint="/v1/responses", input={"path": "/a.parquet", "input": "{{ q }}"})
    call = {"type": "function_call", "arguments": {"since": None}}
    said = {"role": "user", "content": "a"}
    row = {"q": [{**call, "role": None, "content": None}, {**said, "arguments": None}]}

    body = RequestTemplate(spec, ["q"], model="m").render(row, row_number=0)

    assert body["input"] == [call, said]


def test_text_without_end_is_stopped() -> None:
    piece = "x" * (1 << 20)
    template = make_template("{% for i in tags %}{{ q }}{% endfor %}")
    with pytest.raises(RowRenderError, match="grows over 64 Mi characters"):
        template.render({"q": piece, "tags": range(100)}, row_number=0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"request": {"seed": "{{ gold }}"}},
            "request.seed: the input has no column 'gold'; its columns are q, n, tags",
        ),
        ({"request": {"a": [{"b": "{{ txt }}"}]}}, r"request.a\[0\].b: .*did you mean 'text'"),
        (
            {"input": {"path": "/a.csv", "messages": user("{{ Review Text }}")}},
            "got 'Text' .a column's name with a space in it cannot be written here; rename it.$",
        ),
        ({"request": {"a": "{{ q"}}, "request.a: template line 1: "),
        ({"input": {"path": "/a.csv", "prompt": "x"}}, "input.prompt: .* takes input.messages"),
        ({"input": {"path": "/a.csv"}}, "input.messages: is required"),
    ],
)
def test_a_wrong_template_is_refused_at_once(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(JobSpecError, match=problem):
        make_template(**changes)


@pytest.mark.parametrize(
    ("endpoint", "key", "template", "value", "expected"),
    [
        ("/v1/completions", "prompt", "{{ n }}", 5, "5"),
        ("/v1/embeddings", "input", "{{ tags }}", ["a", "b"], ["a", "b"]),
        ("/v1/responses", "input", "{{ q }}", "hello", "hello"),
        ("/v1/chat/completions", "messages", "{{ messages }}", user("hi"), user("hi")),
    ],
)
def test_every_endpoint_has_its_prompt_field(
    endpoint: str, key: str, template: str, value: object, expected: object
) -> None:
    spec = make_spec(endpoint=endpoint, input={"path": "/a.csv", key: template})
    compiled = RequestTemplate(spec, COLUMNS, model="m")
    row = dict.fromkeys(COLUMNS, value)
    assert compiled.render(row, row_number=0) == {"model": "m", key: expected}


IMAGE_TEMPLATE = make_template([
    {"type": "text", "text": "{{ q }}"},
    {"image": {"column": "image"}},
])


@pytest.mark.parametrize(
    ("endpoint", "key", "content"),
    [
        ("/v1/completions", "prompt", ["a", "{{ q }}"]),
        ("/v1/embeddings", "input", ["{{ q }}"]),
        ("/v1/responses", "input", user("{{ q }}")),
        ("/v1/responses", "input", user([{"type": "input_text", "text": "{{ q }}"}])),
    ],
)
def test_a_list_with_an_empty_prompt_is_a_row_error(
    endpoint: str, key: str, content: object
) -> None:
    spec = make_spec(endpoint=endpoint, input={"path": "/a.csv", key: content})
    template = RequestTemplate(spec, ["q"], model="m")

    assert template.render({"q": "b"}, row_number=0)
    with pytest.raises(RowRenderError, match="the prompt is empty"):
        template.render({"q": " "}, row_number=0)


def image_url_of(folder: Path, value: object) -> str:
    parts = content_of(IMAGE_TEMPLATE, folder, q="what?", image=value)
    assert isinstance(parts, list)
    assert parts[0] == {"type": "text", "text": "what?"}
    return str(parts[1]["image_url"]["url"])


def test_an_image_is_a_part_as_its_endpoint_has_it() -> None:
    content = [{"image": {"column": "image", "detail": "low"}}]
    url = "http://a/b.png"
    parts: dict[str, object] = {
        "/v1/responses": {"type": "input_image", "detail": "low", "image_url": url},
        "/v1/embeddings": {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
    }
    for endpoint, part in parts.items():
        spec = make_spec(endpoint=endpoint, input={"path": "/a.csv", "input": user(content)})
        body = RequestTemplate(spec, ["image"], model="m").render({"image": url}, row_number=0)
        assert body["input"] == user([part])


@pytest.mark.parametrize("form", ["path", "bytes", "struct of bytes", "struct of path"])
def test_an_image_column_becomes_a_data_url(tmp_path: Path, form: str) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    value = {
        "path": "a.png",
        "bytes": PNG,
        "struct of bytes": {"bytes": PNG, "path": None},
        "struct of path": {"bytes": None, "path": "a.png"},
    }[form]
    assert IMAGE_TEMPLATE.columns_used == ("q", "image")
    expected = "data:image/png;base64," + base64.b64encode(PNG).decode()
    assert image_url_of(tmp_path, value) == expected


def test_an_image_of_a_cached_data_set_is_a_link_to_its_blobs(tmp_path: Path) -> None:
    cached, other = (tmp_path / f"datasets--acme--{name}" for name in ("set", "other"))
    folder = cached / "snapshots" / "main" / "data"
    folder.mkdir(parents=True)
    for blobs in (cached / "blobs", other / "blobs"):
        blobs.mkdir(parents=True)
        (blobs / "0123").write_bytes(PNG)
        (folder / f"{blobs.parent.name}.png").symlink_to(blobs / "0123")

    assert image_url_of(folder, f"{cached.name}.png").startswith("data:image/png;")
    with pytest.raises(RowRenderError, match="outside the folder"):
        image_url_of(folder, f"{other.name}.png")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("../secret.png", "outside the folder"),
        ("/etc/passwd", "outside the folder"),
        ("link.png", "outside the folder"),
        ("loop.png", "circle|no such file"),
        ("iVBOR" + "A" * 300, "cannot be read: File name too long"),
        ("/9j/" * 1_025, "is no path; base64 needs data:image/"),
        ("absent.png", "no such file"),
        ("notes.txt", "of no known format"),
        (b"?", "of no known format"),
        (None, "neither a path nor bytes"),
    ],
)
def test_images_stay_within_the_folder_of_the_input(
    tmp_path: Path, value: object, problem: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(PNG)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "notes.txt").write_text("no image")
    with pytest.raises(RowRenderError, match=problem):
        image_url_of(folder, value)


def batch_row(**changes: object) -> dict[str, object]:
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    return {**row, "body": {"model": "default", "messages": user("hi")}, **changes}


def batch_template() -> RequestTemplate:
    spec = make_spec(input={"path": "/a.jsonl", "format": "openai-batch"})
    return RequestTemplate(spec, ["custom_id", "method", "url", "body"], model="m")


def test_the_body_of_a_batch_row_is_taken_as_it_is() -> None:
    body = {"model": "other", "messages": user("{{ q }}"), "n": 2}
    assert batch_template().render(batch_row(body=body), row_number=0) == body
    assert batch_template().render(batch_row(), row_number=0)["model"] == "m"


@pytest.mark.parametrize(
    "changes",
    [
        {"body": {"stream": True}},
        {"body": {"use_beam_search": True}},
        {"body": {"background": True}},
        {"body": "text"},
        {"method": "GET"},
        {"url": "/v1/embeddings"},
    ],
)
def test_a_wrong_batch_row_is_a_row_error(changes: dict[str, object]) -> None:
    with pytest.raises(RowRenderError, match="row 3: '"):
        batch_template().render(batch_row(**changes), row_number=3)
