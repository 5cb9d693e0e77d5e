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


def content_of(template: RequestTemplate, **row: object) -> object:
    body = template.render(row, row_number=0)
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
        ("{{ q * 100000000 }}", {"q": "ab"}, "the product is too long"),
        ("{{ n ** 100 }}", {"n": 9}, "the exponent is over 64"),
        ("{% for i in range(1000000) %}x{% endfor %}", {"range": range(5)}, None),
        ("{{ q.__class__.__mro__ }}", {"q": "x"}, "unsafe"),
        ("{{ q.format.__globals__ }}", {"q": "x"}, "unsafe"),
        ("{{ q | dictsort }}", {"q": None}, "has no attribute 'items'"),
    ],
)
def test_a_row_that_does_not_fit_is_a_row_error(
    text: str, row: dict[str, object], problem: str | None
) -> None:
    template = make_template(text)
    with pytest.raises(RowRenderError, match=problem or "not callable") as caught:
        template.render(row, row_number=41)
    assert caught.value.row_error.code == "template_error"
    assert str(caught.value) == f"row 41: {caught.value.row_error.message}"


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


def image_template(folder: Path) -> RequestTemplate:
    content = [{"type": "text", "text": "{{ q }}"}, {"image": {"column": "image"}}]
    spec = make_spec(input={"path": f"{folder}/*.parquet", "messages": user(content)})
    return RequestTemplate(spec, COLUMNS, model="m")


def image_url_of(template: RequestTemplate, value: object) -> str:
    parts = content_of(template, q="what?", image=value)
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
    template = image_template(tmp_path)
    assert template.columns_used == ("q", "image")
    expected = "data:image/png;base64," + base64.b64encode(PNG).decode()
    assert image_url_of(template, value) == expected


def test_an_image_of_a_cached_data_set_is_a_link_to_its_blobs(tmp_path: Path) -> None:
    cached, other = (tmp_path / f"datasets--acme--{name}" for name in ("set", "other"))
    folder = cached / "snapshots" / "main" / "data"
    folder.mkdir(parents=True)
    for blobs in (cached / "blobs", other / "blobs"):
        blobs.mkdir(parents=True)
        (blobs / "0123").write_bytes(PNG)
        (folder / f"{blobs.parent.name}.png").symlink_to(blobs / "0123")

    assert image_url_of(image_template(folder), f"{cached.name}.png").startswith("data:image/png;")
    with pytest.raises(RowRenderError, match="outside the folder"):
        image_url_of(image_template(folder), f"{other.name}.png")


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
        image_url_of(image_template(folder), value)


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
