"""The fake engine's own rules: faults, the prefix cache, deterministic text."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchrun.engine.fake.answers import (
    BLOCK_TOKENS,
    FakeCall,
    PrefixCache,
    RefusedError,
    generate,
    parse_call,
    write_tokens,
)
from batchrun.engine.fake.script import Action, Rule, RuleBook, load_rules
from batchrun.errors import InputError


def make_book(**match: object) -> RuleBook:
    rule = Rule.model_validate({"match": match, "action": {"status": 500}})
    return RuleBook([rule])


def make_call(**body: object) -> FakeCall:
    return parse_call({"prompt": "a b c", **body}, is_chat=False, max_model_tokens=100)


def statuses(book: RuleBook, count: int) -> list[int | None]:
    return [book.choose(request_id=f"r{n}", body=b"text").status for n in range(count)]


@pytest.mark.parametrize(
    ("match", "expected"),
    [
        ({}, [500, 500, 500, 500]),
        ({"nth": 2}, [None, 500, None, None]),
        ({"every": 2}, [None, 500, None, 500]),
        ({"substring": "ex"}, [500, 500, 500, 500]),
        ({"substring": "no"}, [None, None, None, None]),
        ({"substring": "ex", "nth": 4}, [None, None, None, 500]),
    ],
)
def test_a_rule_picks_its_requests(match: dict[str, object], expected: list[int | None]) -> None:
    assert statuses(make_book(**match), 4) == expected


@pytest.mark.parametrize(
    ("request_id", "is_hit"),
    [
        ("batchrun-1-job_9-7-1", True),
        ("batchrun-12-a-7-7-3", True),
        ("batchrun-1-job_9-8-7", False),
        ("7", False),
    ],
)
def test_a_rule_for_a_row_reads_the_request_id(request_id: str, *, is_hit: bool) -> None:
    action = make_book(row=7).choose(request_id=request_id, body=b"")
    assert (action != Action()) is is_hit


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "rule "),
        ('[{"action": {"explode": true}}]', "rule 0.action.explode"),
        ('[{"match": {"nth": 0}, "action": {}}]', r"rule 0\.match\.nth"),
        ('[{"match": {}}]', r"rule 0\.action: Field required"),
    ],
)
def test_a_wrong_script_gives_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        load_rules(path)
    assert str(path) in str(caught.value)


def test_a_missing_script_gives_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_rules(tmp_path / "none.json")


def test_the_prefix_cache_counts_whole_leading_blocks() -> None:
    cache = PrefixCache(capacity_blocks=100)
    prompt = [str(n) for n in range(BLOCK_TOKENS * 3)]
    assert cache.admit(prompt) == 0
    assert cache.admit([*prompt, "more"]) == BLOCK_TOKENS * 3
    assert cache.admit(prompt) == BLOCK_TOKENS * 2
    assert cache.admit(["other", *prompt]) == 0


def test_the_prefix_cache_drops_the_oldest_prompt_first() -> None:
    cache = PrefixCache(capacity_blocks=2)
    old, new = (["old"] * (BLOCK_TOKENS + 1), ["new"] * (BLOCK_TOKENS * 2 + 1))
    cache.admit(old)
    cache.admit(new)
    assert cache.admit(new) == BLOCK_TOKENS * 2
    assert cache.admit(old) == 0


def test_a_longer_answer_starts_with_the_shorter_one() -> None:
    assert write_tokens("hash", 0, 9)[:4] == write_tokens("hash", 0, 4)


def test_answers_depend_on_prompt_seed_and_choice() -> None:
    calls = [make_call(), make_call(prompt="x"), make_call(seed=1), make_call(n=2)]
    choices = [choice for call in calls for choice in tokens_of(call)]
    assert len(choices) == 5
    assert len(set(choices)) == 4


def tokens_of(call: FakeCall) -> list[tuple[str, ...]]:
    return [choice.tokens for choice in generate(call, max_model_tokens=100, finish_reason=None)]


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("one", 1), ([1, 2, 3], 1), (["one", "two"], 2), ([[1, 2], [3]], 2)],
)
def test_a_completion_takes_every_form_of_prompt(prompt: object, num_prompts: int) -> None:
    assert len(make_call(prompt=prompt).prompts) == num_prompts


@pytest.mark.parametrize("prompt", ["", [], None, 5, [True], [["x", 5]]])
def test_a_completion_refuses_what_is_no_prompt(prompt: object) -> None:
    with pytest.raises(RefusedError):
        make_call(prompt=prompt)
