"""What a job expects of its answers when the daemon opens it, and what `inspect` says of that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.cli.inspect import answering
from batchrun.daemon.job import ActiveJob
from batchrun.daemon.opening import open_job
from batchrun.errors import DataError
from batchrun.estimator.answer_length import OVERTAKEN_BY_ANSWERS, REMEMBERED_ANSWERS
from batchrun.home import Home
from batchrun.jobs.expected_answers import (
    UNKNOWN_MODEL,
    DefaultModel,
    estimate_outputs,
    first_guess,
    open_answers,
    output_limit,
)
from batchrun.jobs.inputs.input_data import open_input
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.submit import open_submitted, prepare_job
from batchrun.store import jobs, results
from batchrun.store.database import Store, open_store
from batchrun.store.jobs import JobRecord
from batchrun.store.retention import remove_results
from batchrun.types import JobState, Outcome, OutcomeKind, RowError, Usage

JOB_FILE = """\
name: NAME
model: MODEL
endpoint: /v1/completions
input: {path: rows.parquet, prompt: "{{ text }}"}
request: {REQUEST}
output: {path: out.parquet, keep: [KEEP]}
"""
NUM_ROWS = 1_500


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    table = {"text": [f"row {n}" for n in range(NUM_ROWS)], "answer": ["x" * 79] * NUM_ROWS}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    return tmp_path


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with closing(open_store(folder / "store.db")) as store:
        yield store


def submit(
    store: Store,
    folder: Path,
    *,
    name: str = "one",
    model: str = "m",
    request: str = "",
    keep: str = "",
    inputs: str = "rows.parquet",
    output: str = "out.parquet",
) -> JobRecord:
    text = JOB_FILE.replace("NAME", name).replace("MODEL", model)
    text = text.replace("REQUEST", request).replace("KEEP", keep)
    text = text.replace("rows.parquet", inputs).replace("out.parquet", output)
    (folder / "job.yaml").write_text(text)
    spec = load_job_file(folder / "job.yaml", cwd=folder)
    return jobs.create(store, prepare_job(spec, links=folder / "links"), now_s=0.0)


def answer(
    store: Store,
    record: JobRecord,
    rows: Sequence[int],
    num_tokens: Sequence[int],
    body: bytes = b"{}",
) -> None:
    outcomes = [
        Outcome(record.id, row, 1, OutcomeKind.OK, body=body, usage=Usage(10, tokens))
        for row, tokens in zip(rows, num_tokens, strict=True)
    ]
    results.commit(store, [(record.seq, outcome) for outcome in outcomes], now_s=0.0)


def opened(
    store: Store, folder: Path, record: JobRecord, default_model: DefaultModel = UNKNOWN_MODEL
) -> ActiveJob:
    job = open_job(store, record, links=folder / "links", default_model=default_model)
    job.close()
    return job


def test_a_job_begins_with_a_guess(store: Store, folder: Path) -> None:
    free = opened(store, folder, submit(store, folder))
    limited = opened(store, folder, submit(store, folder, name="two", request="max_tokens: 16"))

    assert (free.answers.room_tokens, free.costs.output_tokens) == (128, 128)
    assert (limited.answers.room_tokens, limited.costs.output_tokens) == (16, 16)


def test_a_job_that_goes_on_knows_the_latest_answers_in_the_order_they_were_sent(
    store: Store, folder: Path
) -> None:
    record = submit(store, folder)
    order = opened(store, folder, record).plan.order.rows.tolist()
    done = order[: REMEMBERED_ANSWERS + 300]
    answer(store, record, done, [900] * 300 + [50] * REMEMBERED_ANSWERS)

    job = opened(store, folder, record)

    assert job.answers.num_ended == REMEMBERED_ANSWERS
    assert job.answers.quantile_tokens(0.95) <= 55
    assert 50 <= job.answers.mean_tokens <= 55
    assert job.costs.output_tokens == round(job.answers.mean_tokens)


def test_a_job_expects_what_the_one_before_it_of_the_same_model_had(
    store: Store, folder: Path
) -> None:
    before = submit(store, folder, name="before")
    answer(store, before, range(400), [300] * 400)
    other = submit(store, folder, name="other", model="another")
    answer(store, other, range(100), [7] * 100)

    same = opened(store, folder, submit(store, folder, name="same"))
    limited = opened(store, folder, submit(store, folder, name="cut", request="max_tokens: 200"))
    new = opened(store, folder, submit(store, folder, name="new", model="new"))

    assert (same.costs.output_tokens, same.answers.num_ended) == (300, 0)
    assert limited.costs.output_tokens == 200
    assert new.costs.output_tokens == 128


@pytest.mark.parametrize(
    ("default_model", "output_tokens", "is_guess", "source"),
    [
        (DefaultModel("old", is_sure=True), 300, False, "before, of the same model"),
        (DefaultModel("old"), 300, False, "before, of the same model"),
        (DefaultModel("new", is_sure=True), 128, True, "a guess"),
        (DefaultModel("new"), 300, True, "before, perhaps of the same model"),
        (DefaultModel(), 300, True, "before, perhaps of the same model"),
    ],
)
def test_answers_of_another_default_model_are_no_prior(
    store: Store,
    folder: Path,
    default_model: DefaultModel,
    output_tokens: int,
    source: str,
    *,
    is_guess: bool,
) -> None:
    before = submit(store, folder, name="before", model="default")
    answer(store, before, range(40), [200, 400] * 20, body=b'{"model": "old"}')

    record = submit(store, folder, model="default")
    job = opened(store, folder, record, default_model)
    with open_submitted(record, job.spec, links=folder / "links") as data:
        stored = store, record
        outputs = estimate_outputs(job.spec, data, 4.0, stored, default_model, guesses=True)

    assert (job.costs.output_tokens, job.answers.is_guess) == (output_tokens, is_guess)
    assert outputs.mean == pytest.approx(output_tokens)
    assert outputs.source.startswith(source)


def test_answers_of_the_same_default_model_go_before_newer_ones_of_another(
    store: Store, folder: Path
) -> None:
    for model, tokens in (("mine", 300), ("other", 900)):
        before = submit(store, folder, name=model, model="default")
        answer(store, before, range(40), [tokens] * 40, body=b'{"model": "%s"}' % model.encode())

    job = opened(store, folder, submit(store, folder, model="default"), DefaultModel("mine"))

    assert (job.costs.output_tokens, job.answers.is_guess) == (300, False)


def test_without_a_daemon_batchrun_yaml_says_nothing_for_sure(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "batchrun.yaml").write_text("model: mine\n")
    (folder / "job.yaml").write_text(JOB_FILE.replace("MODEL", "default"))
    monkeypatch.chdir(folder)
    spec = load_job_file(folder / "job.yaml", cwd=folder)

    assert answering(spec, Home(folder / "home")) == DefaultModel("mine", is_sure=False)


def test_rows_without_an_answer_tell_nothing(store: Store, folder: Path) -> None:
    record = submit(store, folder)
    answer(store, record, [3, 5], [0, 40])

    assert results.answer_tokens(store, record.seq, [5, 3, 4]) == [40]
    assert results.latest_answer_tokens(store, record.seq, 10) == [40]


@pytest.mark.parametrize("num_choices", [1, 2])
def test_good_answers_that_the_job_keeps_are_what_it_guesses(
    store: Store, folder: Path, num_choices: int
) -> None:
    request = f"n: {num_choices}"
    job = opened(store, folder, submit(store, folder, keep="answer", request=request))
    good = 79 / job.plan.tokens.bytes_per_token + 1

    assert (job.costs.output_tokens, job.knows_answers) == (round(good * num_choices), False)
    for row in range(OVERTAKEN_BY_ANSWERS):
        job.answers.sent(row)
        job.answers.ended(row, 900)
    assert job.knows_answers


def test_answers_of_types_that_share_none_tell_nothing(store: Store, folder: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "answer": [["x"]]}), folder / "more.parquet")
    inputs = "[rows.parquet, more.parquet]"
    record = submit(store, folder, keep="answer", inputs=inputs, output="out.jsonl")

    job = opened(store, folder, record)

    assert job.costs.output_tokens == 128


def test_a_sample_of_good_answers_reads_no_more_than_its_rows(store: Store, folder: Path) -> None:
    rows = folder / "rows.parquet"
    answers = pa.array([f"{n:079}" for n in range(10_000)], pa.large_string())
    pq.write_table(pa.table({"answer": answers, "text": ["a"] * len(answers)}), rows)
    pq.write_table(pa.table({"text": ["a"], "answer": [["x"]]}), folder / "more.parquet")
    inputs = "[rows.parquet, more.parquet]"
    record = submit(store, folder, keep="answer", inputs=inputs, output="out.jsonl")
    spec = JobSpec.model_validate_json(record.spec)

    with open_input(spec.input) as data:
        expected = open_answers(spec, data, 4.0, (store, None), np.empty(0, np.int64))
        assert estimate_outputs(spec, data, 4.0).source == "unknown"
    content = rows.read_bytes()
    rows.write_bytes(content[:4] + b"\xff" * 1996 + content[2_000:])

    assert expected.mean_tokens == round(79 / 4 + 1)
    with open_input(spec.input) as data, pytest.raises(DataError, match=r"rows\.parquet: damaged"):
        estimate_outputs(spec, data, 4.0)


def test_a_limit_is_of_each_choice_and_what_rows_returned_of_all(
    store: Store, folder: Path
) -> None:
    request = "n: 8, max_tokens: 128"
    record = submit(store, folder, request=request)
    job = opened(store, folder, record)
    with open_submitted(record, job.spec, links=folder / "links") as data:
        estimate = estimate_outputs(job.spec, data, 4.0, guesses=True)
    answer(store, record, range(400), [800] * 400)
    again = opened(store, folder, submit(store, folder, name="again", request=request))
    single = opened(store, folder, submit(store, folder, name="single"))
    spec = job.spec.model_copy(update={"request": {"n": "{{ text }}", "max_tokens": 16}})

    assert (job.costs.output_tokens, estimate.mean) == (1_024, 1_024)
    assert estimate.source == "the limit in the job file"
    assert (again.costs.output_tokens, single.costs.output_tokens) == (800, 100)
    assert (output_limit(spec), first_guess(spec)) == (None, 128)


@pytest.mark.parametrize(("failed_tokens", "is_removed"), [(900, False), (0, True)])
def test_what_answers_had_is_known_once_the_job_has_ended(
    store: Store, folder: Path, failed_tokens: int, *, is_removed: bool
) -> None:
    record = submit(store, folder)
    spec = opened(store, folder, record).spec
    answer(store, record, range(1, NUM_ROWS), [20] * (NUM_ROWS - 1))
    why, usage = RowError("invalid_json", "is not JSON"), Usage(10, failed_tokens)
    failed = Outcome(record.id, 0, 1, OutcomeKind.ROW_ERROR, error=why, usage=usage)
    results.commit(store, [(record.seq, failed)], now_s=0.0)
    jobs.start(store, record.id, now_s=1.0)
    jobs.begin_finalizing(store, record.id, JobState.COMPLETED, now_s=1.0)
    ended = jobs.finish(store, record.id, now_s=2.0)
    num_removed = list(remove_results(store, ended, now_s=3.0))[-1] if is_removed else 0
    with open_submitted(record, spec, links=folder / "links") as data:
        stored = store, jobs.get(store, record.id)
        estimate = estimate_outputs(spec, data, 4.0, stored)

    assert num_removed == NUM_ROWS * is_removed
    assert (estimate.mean, estimate.source) == (20, f"the {NUM_ROWS - 1:,} rows that are done")
    assert (estimate.std is None) is is_removed


@pytest.mark.parametrize("num_done", [0, 40])
def test_inspect_and_the_daemon_expect_the_same(store: Store, folder: Path, num_done: int) -> None:
    answer(store, submit(store, folder, name="before"), range(400), [300] * 400)
    record = submit(store, folder)
    job = opened(store, folder, record)
    first = sorted(job.plan.order.rows.tolist())[:num_done]
    answer(store, record, first, [20] * num_done)
    with open_submitted(record, job.spec, links=folder / "links") as data:
        estimate = estimate_outputs(job.spec, data, 4.0, (store, record))
        done = np.array(first, np.int64)
        answers = open_answers(job.spec, data, 4.0, (store, record), done)

    assert estimate.mean == pytest.approx(answers.mean_tokens)
    assert estimate.filled[-1] == pytest.approx(answers.mean_tokens)


def test_embeddings_have_no_answer(folder: Path) -> None:
    text = JOB_FILE.replace("/v1/completions", "/v1/embeddings").replace("prompt:", "input:")
    for word, value in (("NAME", "e"), ("MODEL", "m"), ("REQUEST", ""), ("KEEP", "")):
        text = text.replace(word, value)
    (folder / "job.yaml").write_text(text)

    assert first_guess(load_job_file(folder / "job.yaml", cwd=folder)) == 0
