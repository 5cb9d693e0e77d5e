"""Our scheduler in the real engine, pressed hard: every request gets what plain vLLM gives it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import engine_trial
import pytest
from engine_trial import NONCE, Answer, Call, Result, Trial

from batchrun.hints import HINT_VERSION

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(900)]

NUM_TOKENS = 64
NUM_COMPLETE = 64
NUM_ROWS, NUM_ONLINE, NUM_WAVES = 43, 32, 4
ROW_LEAVES = {3: 0, 11: 30, 19: 2, 27: 50}
CALL_LEAVES = {5: 0, 14: 20, 22: 1, 30: 40}
NUM_LEAVING_PREEMPTED = 3
LOGPROB_TOLERANCE = 1e-4
SCARCE_BLOCKS, AMPLE_BLOCKS = 80, 2_000

RunTrial = Callable[[str, Trial], Result]


class Draw:
    """Prompts of token ids. Rows ask about shared documents; half of the calls share a start."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._documents = [self._tokens(num) for num in (100, 180, 260, 340, 420)]
        self._system = self._tokens(70)

    def _tokens(self, num_tokens: int) -> list[int]:
        return [self._rng.randint(5, 2_000) for _ in range(num_tokens)]

    def rows(self) -> list[Call]:
        documents = [self._rng.randrange(len(self._documents)) for _ in range(NUM_ROWS)]
        calls: list[Call] = []
        for row, document in enumerate(documents):
            prompt = self._documents[document] + self._tokens(self._rng.randint(5, 40))
            later = [i for i in range(row + 1, NUM_ROWS) if documents[i] == document]
            hint = {
                "v": HINT_VERSION, "nonce": NONCE, "epoch": 1, "job": "job", "row": row,
                "class": "offline", "rank": row,
                "nodes": [[document + 1, len(later), min(later, default=row)]],
            }  # fmt: skip
            leaves = ROW_LEAVES.get(row)
            calls.append(Call(f"row-{row}", prompt, NUM_TOKENS, hint, abort_after_tokens=leaves))
        return calls

    def online(self) -> list[Call]:
        calls: list[Call] = []
        for i in range(NUM_ONLINE):
            cached = self._system + self._tokens(self._rng.randint(5, 60))
            uncached = self._tokens(self._rng.randint(8, 150))
            prompt = calls[-2].prompt if i % 8 == 7 else cached if i % 2 else uncached
            wave, leaves = 1 + i * NUM_WAVES // NUM_ONLINE, CALL_LEAVES.get(i)
            calls.append(Call(f"online-{i}", prompt, NUM_TOKENS, None, wave, leaves))
        return calls


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    draw = Draw(5)
    return [*draw.rows(), *draw.online()]


@pytest.fixture(scope="module")
def run_trial(tmp_path_factory: pytest.TempPathFactory) -> RunTrial:
    """Each trial has a process of its own: vLLM cannot start twice in one."""

    def run(name: str, trial: Trial) -> Result:
        path = tmp_path_factory.mktemp(name) / "trial.json"
        path.write_text(json.dumps(asdict(trial)))
        command = [sys.executable, engine_trial.__file__, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr[-4_000:]
        fields = json.loads(path.with_suffix(".result").read_text())
        answers = {name: Answer(**answer) for name, answer in fields.pop("answers").items()}
        return Result(answers=answers, **fields)

    return run


@pytest.fixture(scope="module")
def plain(run_trial: RunTrial, tiny_model: Path, calls: list[Call]) -> Result:
    """What vLLM alone answers, with room for everybody and nobody leaving."""
    patient = [replace(call, wave=0, hint=None, abort_after_tokens=None) for call in calls]
    result = run_trial("plain", Trial(str(tiny_model), patient, AMPLE_BLOCKS))
    assert not any(answer.num_preemptions for answer in result.answers.values())
    return result


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_preemptions_aborts_and_hits_change_no_answer_and_leak_nothing(
    run_trial: RunTrial, tiny_model: Path, calls: list[Call], plain: Result, *, is_async: bool
) -> None:
    trial = Trial(str(tiny_model), calls, SCARCE_BLOCKS, "echo", is_async, NUM_LEAVING_PREEMPTED)

    ours = run_trial("ours", trial)

    assert ours.is_async is is_async
    check_answers(ours, plain)
    check_pressure(ours)
    check_nothing_left(ours)


def check_answers(ours: Result, plain: Result) -> None:
    complete = [name for name, answer in ours.answers.items() if answer.reason == "length"]
    assert len(complete) == NUM_COMPLETE
    for name, answer in ours.answers.items():
        num_tokens = len(answer.tokens)
        wanted = plain.answers[name]
        assert num_tokens == NUM_TOKENS or answer.reason == "abort", name
        assert answer.tokens == wanted.tokens[:num_tokens], name
        assert answer.logprobs == pytest.approx(
            wanted.logprobs[:num_tokens], rel=0, abs=LOGPROB_TOLERANCE
        )
        for top, wanted_top in zip(answer.top_logprobs, wanted.top_logprobs, strict=False):
            assert top == pytest.approx(wanted_top, rel=0, abs=LOGPROB_TOLERANCE)


def check_pressure(ours: Result) -> None:
    """The trial is worth something: rows were thrown out, requests of both kinds hit the cache."""
    rows = [answer for name, answer in ours.answers.items() if name.startswith("row")]
    online = [answer for name, answer in ours.answers.items() if name.startswith("online")]
    assert sum(answer.num_preemptions > 0 for answer in rows) > NUM_LEAVING_PREEMPTED
    assert any(answer.num_preemptions and answer.reason == "length" for answer in rows)
    assert not any(answer.num_preemptions for answer in online)
    gone = [answer for answer in (*rows, *online) if answer.reason == "abort"]
    assert len(gone) == len(ROW_LEAVES) + len(CALL_LEAVES) + NUM_LEAVING_PREEMPTED
    for answers in (rows, online):
        assert {answer.num_hit_tokens > 0 for answer in answers} == {True, False}


def check_nothing_left(ours: Result) -> None:
    assert ours.num_requests_left == 0
    assert ours.num_free_blocks == SCARCE_BLOCKS - 1
    assert ours.num_blocks_in_use == 0
    assert ours.is_cache_reset
