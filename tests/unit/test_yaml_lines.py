"""Strict YAML: one line per problem, with file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from batchrun.errors import ConfigError, JobSpecError
from batchrun.strict import load_strict, read_document


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    port: int = 1
    messages: list[str] = []


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    inner: Inner = Inner()
    items: list[Inner] = []


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "some.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def problem_of(path: Path) -> str:
    with pytest.raises(JobSpecError) as caught:
        load_strict(path, Outer, JobSpecError)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def test_a_good_file_becomes_the_model(tmp_path: Path) -> None:
    path = write(tmp_path, "name: x\ninner:\n  port: 7\nitems:\n  - {port: 2}\n")
    loaded = load_strict(path, Outer, ConfigError)
    assert loaded == Outer(name="x", inner=Inner(port=7), items=[Inner(port=2)])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name: x\nnane: y\n", ":2: nane: unknown key (did you mean 'name'?)"),
        ("name: x\nzzz: y\n", ":2: zzz: unknown key; the keys here are name, inner, items"),
        (
            "name: x\ninner:\n  mesages: []\n",
            ":3: inner.mesages: unknown key (did you mean 'messages'?)",
        ),
        (
            "name: x\nitems:\n  - port: 1\n  - prt: 2\n",
            ":4: items[1].prt: unknown key (did you mean 'port'?)",
        ),
        ("inner: {port: 1}\n", ":1: name: is required"),
        (
            "name: x\n\ninner:\n  port: many\n",
            ":4: inner.port: must be a whole number (got 'many')",
        ),
        ("name: x\nname: y\n", ':2: duplicate key "name"'),
        ("name: x\ninner:\n\tport: 1\n", ":3: a tab indents this line; YAML wants spaces"),
        ("name: [x\n", ":2: not valid YAML: did not find expected ',' or ']'"),
        ("- a\n- b\n", ":1: the file must be a mapping"),
        ("# nothing yet\n", ":1: name: is required"),
        ("nmae: x\n", ":1: nmae: unknown key (did you mean 'name'?) (and 1 more)"),
        ("name: 5\n", ":1: name: must be text (got 5)"),
        ("name: x\nitems: one\n", ":2: items: must be a list (got 'one')"),
        ("just text\n", ":1: the file must be a mapping"),
    ],
)
def test_a_problem_is_one_line_with_its_place(tmp_path: Path, text: str, problem: str) -> None:
    found = problem_of(write(tmp_path, text))
    if "not valid YAML" in problem:
        assert "not valid YAML" in found
    else:
        assert found.startswith(problem)


def test_several_problems_report_the_first_line_and_count_the_rest(tmp_path: Path) -> None:
    text = "name: x\nfirst: 1\ninner:\n  second: 2\nthird: 3\n"
    found = problem_of(write(tmp_path, text))
    assert found.startswith(":2: first:")
    assert found.endswith("(and 2 more)")


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    assert ":2: not UTF-8" in problem_of(write(tmp_path, b"name: x\ninner: \xff\n"))


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    assert "larger than" in problem_of(write(tmp_path, b"#" * (1 << 20) + b"\n"))


@pytest.mark.parametrize("text", ["a: " + "[" * 3000, "a: &a [*a]"])
def test_endless_nesting_is_refused(tmp_path: Path, text: str) -> None:
    assert "nested too deeply" in problem_of(write(tmp_path, text))


def test_an_alias_bomb_is_refused(tmp_path: Path) -> None:
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    text = "a0: &a0 [x]\n" + "\n".join(levels) + "\n"
    assert "expanded by aliases" in problem_of(write(tmp_path, text))


def test_a_missing_file_and_a_folder_are_one_line_each(tmp_path: Path) -> None:
    assert problem_of(tmp_path / "absent.yaml") == ": no such file"
    assert "cannot be read" in problem_of(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "b: {{ text }}",
        "b: {role: user, content: {{ text }}}",
        "b: {{ a }} {{ b }}",
        "b: {{ a | upper }} is",
        "b: {% if a %}x{% endif %}",
        "b: {a: 'x', b: {{ text }}}",
    ],
)
def test_a_template_outside_quotes_is_said_to_need_them(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"a: 1\n{line}\n")

    with pytest.raises(JobSpecError) as refused:
        read_document(path, JobSpecError)

    assert str(refused.value) == f'{path}:2: quote the template: "{{{{ ... }}}}"'


def test_an_escaped_pair_of_surrogates_is_one_character(tmp_path: Path) -> None:
    text = r"""{"name": "\ud83d\ude00", "inner": {"messages": ["a\uD83D\uDE00b", "\\ud83d"]}}"""

    loaded = load_strict(write(tmp_path, text), Outer, JobSpecError)

    assert (loaded.name, loaded.inner.messages) == ("\U0001f600", ["a\U0001f600b", r"\ud83d"])


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (r"""name: "a""" + r'''\ud83d"''', ":1: name: a "),
        ('name: a\ninner:\n  messages: ["\\udc00"]', ":3: inner.messages[0]: a "),
        ('name: a\ninner: {"\\ud83d": 1}', ":2: inner: a "),
    ],
)
def test_half_a_character_is_named(tmp_path: Path, text: str, place: str) -> None:
    assert f"{place}\\u escape is half a character" in problem_of(write(tmp_path, text))
