"""Whatever an engine answers and whatever a caller sends as a line: it ends as one answer or one
error, and all that is written can be read."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from engine_builders import CHAT, make_request
from odd_json import odd_line, odd_reply
from store_builders import add_batch

from batchrun.engine.client import Reply, classify
from batchrun.errors import DataError
from batchrun.jobs.batch import BatchLines, new_batch_job
from batchrun.jobs.inputs.input_data import open_input
from batchrun.jobs.results.batch_files import write_batch_files
from batchrun.jobs.results.output_file import write_output
from batchrun.jobs.spec import InputSpec, JobSpec
from batchrun.store import results
from batchrun.store.batches import NewBatch
from batchrun.store.database import open_store
from batchrun.types import Outcome, OutcomeKind

LATER = [pytest.mark.nightly, pytest.mark.timeout(1_800)]
RETRY_AFTER = (
    None,
    "1",
    "1e400",
    "nan",
    "-5",
    "Mon, 01 Jan 0001 00:00:00 +9999",
    "\udcff",
    "Fri, 31 Dec 9999 23:59:59 -0001",
    "Thu, 01 Jan 1970 00:00:00 GMT",
)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def read_json(text: bytes) -> object:
    return json.loads(text, parse_constant=refuse_constant)


def outcomes_of(rng: Random, num_replies: int) -> list[Outcome]:
    found = []
    for row in range(num_replies):
        status_code = 200 if rng.random() < 0.9 else rng.choice((204, 302, 400, 404, 429, 500))
        reply = Reply(status_code, odd_reply(rng), rng.choice(RETRY_AFTER), duration_s=0.1)
        found.append(classify(make_request(CHAT, row=row), reply, now_s=1_700_000_000.0))
    return found


@pytest.mark.parametrize(
    ("seed", "num_replies"),
    [(0, 3_000), *(pytest.param(seed, 100_000, marks=LATER) for seed in range(1, 11))],
)
def test_every_reply_ends_as_an_answer_or_an_error(
    tmp_path: Path, seed: int, num_replies: int
) -> None:
    outcomes = outcomes_of(Random(seed), num_replies)
    assert {OutcomeKind.OK, OutcomeKind.RETRY} <= {outcome.kind for outcome in outcomes}
    input_path = tmp_path / "in.jsonl"
    input_path.write_text('{"x": 1}\n' * num_replies)
    fields = {"path": str(input_path), "messages": "{{ x }}"}
    output = {"path": str(tmp_path / "out.jsonl"), "body": True}
    spec = JobSpec.model_validate({"name": "x", "input": fields, "output": output})
    store = open_store(tmp_path / "store.db")
    asked = NewBatch("file-1", CHAT, "24h", None, None, "r")
    job = new_batch_job(tmp_path, CHAT, deadline_s=60, weight=1)
    batch = add_batch(store, asked, job, now_s=1.0)
    seq = batch.job.seq
    results.commit(store, [(seq, outcome) for outcome in outcomes], now_s=2.0)

    ids = (f"r{row}" for row in range(num_replies))
    found = results.read(store, seq)
    files = write_batch_files(tmp_path, batch, found, custom_ids=ids, missing=None)
    with open_input(spec.input) as data:
        found = results.read(store, seq)
        write_output(tmp_path / "out.jsonl", found, spec=spec, data=data, missing=None)
    store.close()

    lines = {}
    for file in (files.output, files.error):
        assert file is not None
        for text in (tmp_path / file.id).read_bytes().splitlines(keepends=True):
            line = read_json(text)
            assert isinstance(line, dict) and line["custom_id"] not in lines
            lines[line["custom_id"]] = line
    rows = (tmp_path / "out.jsonl").read_bytes().split(b"\n")
    assert len(lines) == len(rows) - 1 == num_replies
    for outcome, text in zip(outcomes, rows, strict=False):
        line, row = lines[f"r{outcome.row}"], read_json(text)
        assert isinstance(row, dict)
        if outcome.kind is OutcomeKind.OK:
            assert outcome.body is not None
            answer = read_json(outcome.body)
            assert line["response"]["body"] == answer and line["error"] is None
            assert row["error"] is None and row["body"] is not None
            assert row["response"] is not None or "content" not in first_message(answer)
        else:
            assert row["error"] is not None and row["body"] is None
            assert line["error"] is not None or line["response"]["status_code"] >= 400


def first_message(answer: object) -> dict[str, object]:
    """The message of choice 0, without content where that is null."""
    assert isinstance(answer, dict)
    message = answer["choices"][0].get("message")
    fields = message if isinstance(message, dict) else {}
    return {key: value for key, value in fields.items() if value is not None}


@pytest.mark.parametrize(
    ("seed", "num_lines"),
    [(0, 2_000), *(pytest.param(seed, 100_000, marks=LATER) for seed in range(1, 11))],
)
def test_validator_and_reader_agree_on_every_line(
    tmp_path: Path, seed: int, num_lines: int
) -> None:
    """What the validator takes, the reader reads as the same row; what the reader refuses, the
    validator has refused."""
    rng = Random(seed)
    lines = [odd_line(rng, number) for number in range(num_lines)]
    taken = [line for line in lines if is_taken(tmp_path, line)]
    assert num_lines / 20 < len(taken) < num_lines
    blank = [rng.choice((b" ", b"\t", b"", b"\r")) * rng.randrange(9) for _ in taken]
    text = b"".join(line + b"\n" + space + b"\n" for line, space in zip(taken, blank, strict=True))
    (tmp_path / "in.jsonl").write_bytes(text)
    found = BatchLines(CHAT, ["m"])
    found.read(tmp_path / "in.jsonl")
    codes = {error.code for error in found.errors}
    assert codes <= {"duplicate_custom_id", "mismatched_model", "too_many_tasks"}

    spec = InputSpec(path=(str(tmp_path / "in.jsonl"),), format="openai-batch")
    with open_input(spec) as data:
        rows = [row for _, part in data.iter_rows() for row in part]
    ids = [parsed["custom_id"] for line in taken for parsed in parsed_lines(line)]
    assert [row["custom_id"] for row in rows] == ids


def is_taken(folder: Path, line: bytes) -> bool:
    """Whether the validator takes a file of this alone; the reader is then asked, too."""
    path = folder / "line.jsonl"
    path.write_bytes(line)
    found = BatchLines(CHAT, ["m"])
    found.read(path)
    spec = InputSpec(path=(str(path),), format="openai-batch")
    try:
        with open_input(spec) as data:
            num_rows = len([row for _, part in data.iter_rows() for row in part])
    except DataError:
        assert found.errors
        return False
    assert found.errors or num_rows == found.num_requests
    return not found.errors


def parsed_lines(text: bytes) -> list[dict[str, object]]:
    """What Python's own parser makes of the lines."""
    found = [json.loads(line) for line in text.split(b"\n") if line.strip(b" \t\r")]
    assert all(isinstance(row, dict) for row in found)
    return found
