"""A large job's plan, and the copy of its rows in that order, are read from their files as long as
nothing that they are made of has changed."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from dataclasses import astuple, replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_builders import answered, refused

from batchrun.daemon.ending import JobEnd, remove_old_results
from batchrun.daemon.opening import continue_job, open_job, take_up_job
from batchrun.daemon.writer import ResultWriter
from batchrun.jobs import submit as plans
from batchrun.jobs.inputs import spool
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.prompts.tokens import PromptReader, read_prompts
from batchrun.jobs.results.keeping import ORPHAN_AGE_S, find_unused_links
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.submit import JobPlan, pin_again, plan_file, prepare_job, rows_file
from batchrun.store import jobs, results
from batchrun.store.database import Store, open_store
from batchrun.store.jobs import JobRecord
from batchrun.store.retention import remove_results
from batchrun.types import JobState

JOB_FILE = """\
name: sample
endpoint: /v1/completions
input: {path: in.plan, format: parquet, prompt: "{{ text }}"}
output: {path: out.jsonl}
"""
TEXTS = ["shared " * 90 + str(row % 7) * 300 + f"row {row}" for row in range(40)]


@pytest.fixture(autouse=True)
def _all_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "KEPT_ROWS", 1)
    monkeypatch.setattr(spool, "MAX_LOADS_PER_CHUNK", 0)


@pytest.fixture
def links(tmp_path: Path) -> Path:
    return tmp_path / "inputs"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "jobs.db")
    yield opened
    opened.close()


@pytest.fixture
def record(tmp_path: Path, store: Store, links: Path) -> JobRecord:
    """A job whose third row is null, which its template refuses."""
    write_rows(tmp_path, TEXTS)
    (tmp_path / "job.yaml").write_text(JOB_FILE)
    job = prepare_job(load_job_file(tmp_path / "job.yaml", cwd=tmp_path), links=links)
    return jobs.create(store, job, now_s=0.0)


def write_rows(folder: Path, texts: list[str]) -> None:
    cells: list[str | None] = [*texts]
    cells[2] = None
    pq.write_table(pa.table({"text": cells}), folder / "in.plan")


def taken_up(
    store: Store, record: JobRecord, links: Path, model: Path | None = None
) -> tuple[JobPlan, bool]:
    """The plan, and whether rows were read for it."""
    plan, stages, _ = stages_of(store, record, links, model)
    return plan, "reading rows" in stages


def stages_of(
    store: Store, record: JobRecord, links: Path, model: Path | None = None
) -> tuple[JobPlan, set[str], list[object]]:
    """The plan, what was done for it, and the prompts of two rows, through the copy."""
    stages: set[str] = set()

    def note(stage: str, done: int, total: int) -> None:
        stages.add(stage)

    def prompts_of(_: str, now: datetime) -> PromptReader:
        return read_prompts(model, now=now)

    job = take_up_job(store, record, links=links, prompts_of=prompts_of, progress=note)
    bodies = job.render([39, 5])
    job.close()
    return job.plan, stages, [body["prompt"] for body in bodies if isinstance(body, dict)]


def is_same(one: JobPlan, other: JobPlan) -> bool:
    arrays = [
        (*astuple(plan.chains), *astuple(plan.order), plan.text_bytes, plan.new_bytes)
        for plan in (one, other)
    ]
    values = [(plan.errors, plan.tokens.bytes_per_token) for plan in (one, other)]
    return all(map(np.array_equal, *arrays)) and values[0] == values[1]


def test_a_job_that_is_taken_up_again_reads_no_row(
    store: Store, record: JobRecord, links: Path
) -> None:
    first, has_read = taken_up(store, record, links)
    again, has_read_again = taken_up(store, record, links)

    assert (has_read, has_read_again) == (True, False)
    assert is_same(first, again)
    assert not first.errors and not again.errors, "it finds the row at fault again"
    assert again.order.shared_chunks.any()
    assert plan_file(links, record.id).stat().st_mode & 0o077 == 0


def test_a_small_job_keeps_no_plan(
    store: Store, record: JobRecord, links: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "KEPT_ROWS", len(TEXTS) + 1)
    taken_up(store, record, links)
    assert not plan_file(links, record.id).exists()


def test_another_input_is_read(
    store: Store, record: JobRecord, links: Path, tmp_path: Path
) -> None:
    first, _ = taken_up(store, record, links)
    write_rows(tmp_path, [text[1:] for text in TEXTS])
    changed = replace(record, pin=pin_again(record, links=links))

    second, has_read = taken_up(store, changed, links)

    assert has_read
    assert not is_same(first, second)


def test_another_template_of_the_model_is_read(
    store: Store, record: JobRecord, links: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = model / "tokenizer_config.json"
    config.write_text("{}")
    taken_up(store, record, links, model)
    assert not taken_up(store, record, links, model)[1]
    config.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert taken_up(store, record, links, model)[1]
    os.utime(config, (1, 1))
    assert taken_up(store, record, links, model)[1]


@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.9, 0.999])
def test_a_damaged_file_is_made_anew(
    store: Store, record: JobRecord, links: Path, place: float
) -> None:
    first, _ = taken_up(store, record, links)
    path = plan_file(links, record.id)
    content = path.read_bytes()
    at = int(place * len(content))

    for damaged in (content[:at], content[:at] + b"\xff" * 40 + content[at + 40 :], b""):
        path.write_bytes(damaged)
        again, _ = taken_up(store, record, links)
        assert is_same(first, again)
        assert path.stat().st_size == len(content)


def test_the_copy_of_its_rows_is_kept_too(
    store: Store, record: JobRecord, links: Path, tmp_path: Path
) -> None:
    everything = {"reading rows", "laying rows out"}
    _, *first = stages_of(store, record, links)
    _, *again = stages_of(store, record, links)
    write_rows(tmp_path, [text[1:] for text in TEXTS])
    changed = replace(record, pin=pin_again(record, links=links))
    _, *anew = stages_of(store, changed, links)

    assert first == [everything, [TEXTS[39], TEXTS[5]]]
    assert again == [set(), [TEXTS[39], TEXTS[5]]]
    assert anew == [everything, [TEXTS[39][1:], TEXTS[5][1:]]]


def test_a_job_without_rows_to_run_copies_none(
    store: Store, record: JobRecord, links: Path
) -> None:
    done = [(record.seq, answered(row)) for row in range(len(TEXTS))]
    results.commit(store, done, now_s=1.0)

    open_job(store, record, links=links).close()

    assert not rows_file(links, record.id).exists()


def test_a_resume_allows_max_failed_anew_and_a_restart_does_not(
    store: Store, record: JobRecord, links: Path
) -> None:
    limited = replace(record, spec=json.dumps(json.loads(record.spec) | {"max_failed": 1}))

    def pauses_after(*failed: int, now_s: float) -> bool:
        results.commit(store, [(record.seq, refused(row)) for row in failed], now_s=now_s)
        job = open_job(store, limited, links=links)
        job.close()
        return job.breaker.see(refused(9)) is not None

    assert not pauses_after(now_s=1.0)
    assert pauses_after(0, 1, now_s=1.0)
    jobs.pause(store, record.id, "too many")
    jobs.resume(store, record.id, now_s=2.0)
    assert not pauses_after(now_s=3.0)
    assert pauses_after(2, now_s=3.0)


def test_answers_to_what_an_input_held_before_are_not_taken_over(
    store: Store, record: JobRecord, links: Path, tmp_path: Path
) -> None:
    results.commit(store, [(record.seq, answered(0))], now_s=1.0)
    jobs.pause(store, record.id, "changed")
    write_rows(tmp_path, ["corrected", *TEXTS[1:]])
    jobs.resume(store, record.id, now_s=2.0, pin=pin_again(record, links=links))
    results.commit(store, [(record.seq, answered(1))], now_s=3.0)
    spec = JobSpec.model_validate_json(record.spec).model_copy(update={"continue_from": record.id})
    new = jobs.create(store, prepare_job(spec, links=links), now_s=4.0)

    assert continue_job(store, new, links=links) == 1

    assert [result.row for result in results.read(store, new.seq)] == [1]


def test_a_job_that_continues_one_whose_results_were_removed_runs_all_rows(
    store: Store, record: JobRecord, links: Path
) -> None:
    results.commit(store, [(record.seq, answered(0))], now_s=1.0)
    jobs.request_cancel(store, record.id, now_s=2.0)
    list(remove_results(store, jobs.finish(store, record.id, now_s=2.0), now_s=3.0))
    spec = JobSpec.model_validate_json(record.spec).model_copy(update={"continue_from": record.id})
    new = jobs.create(store, prepare_job(spec, links=links), now_s=4.0)

    plan, _ = taken_up(store, new, links)

    assert plan.num_rows == len(TEXTS)
    assert results.count(store, new.seq).num_done == 0


def test_a_job_whose_plan_cannot_be_written_runs(
    store: Store, record: JobRecord, links: Path
) -> None:
    plan_file(links, record.id).mkdir()
    plan, has_read = taken_up(store, record, links)
    assert has_read
    assert plan.num_rows == len(TEXTS)


def test_what_is_kept_goes_with_its_job(store: Store, record: JobRecord, links: Path) -> None:
    taken_up(store, record, links)
    kept = [plan_file(links, record.id), rows_file(links, record.id)]
    kept += [path.with_name(f".{path.name}.{'0f' * 8}.part") for path in kept]
    for left in kept[2:]:
        left.write_bytes(b"of a writer that was killed")

    assert find_unused_links([record], links=links, now_s=0.0) == []
    assert find_unused_links([], links=links, now_s=time.time() + ORPHAN_AGE_S - 60) == []
    orphans = find_unused_links([], links=links, now_s=time.time() + ORPHAN_AGE_S + 60)
    assert {*kept} < {orphan.path for orphan in orphans}
    ended = replace(record, state=JobState.COMPLETED)
    found = find_unused_links([ended], links=links, now_s=0.0)
    assert {each.path: each.size_bytes for each in found} == {
        path: path.stat().st_size for path in kept
    }


async def test_a_daemon_removes_what_is_left_of_ended_jobs(
    store: Store, record: JobRecord, links: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchrun.jobs.results.keeping.ORPHAN_AGE_S", -1.0)
    taken_up(store, record, links)
    spec = JobSpec.model_validate_json(record.spec)
    other = jobs.create(store, prepare_job(spec, links=links), now_s=1.0)
    taken_up(store, other, links)
    kept = [of(links, each.id) for each in (record, other) for of in (plan_file, rows_file)]
    unknown = rows_file(links, f"{record.id[:-1]}")
    unknown.touch()
    jobs.request_cancel(store, record.id, now_s=0.0)
    jobs.finish(store, record.id, now_s=0.0)

    for name in ("rows.csv", "answers.parquet"):
        draft = links / "uploads" / (name[0] * 12)
        draft.mkdir(parents=True)
        (draft / name).touch()

    kept_in = [links / "uploads"]
    sweeping = asyncio.create_task(remove_old_results(store, links, kept_in, age_s=None))
    while kept[0].exists() or kept[1].exists() or len(list(kept_in[0].iterdir())) > 1:
        await asyncio.sleep(0.01)
    sweeping.cancel()

    assert draft.exists()
    assert [path.exists() for path in (*kept, unknown)] == [False, False, True, True, True]


@pytest.mark.parametrize("is_folder", [False, True])
async def test_the_end_of_a_job_removes_its_plan_if_it_can(
    store: Store, record: JobRecord, links: Path, *, is_folder: bool
) -> None:
    async def pause(_job_id: str, reason: str) -> None:
        raise AssertionError(reason)

    if is_folder:
        plan_file(links, record.id).mkdir()
    taken_up(store, record, links)
    jobs.start(store, record.id, now_s=0.0)
    jobs.request_cancel(store, record.id, now_s=0.0)

    writer = ResultWriter(store, lambda _: None)
    writing = asyncio.create_task(writer.run())
    await JobEnd(store, writer, links, {}, pause).close(record)
    writing.cancel()

    assert jobs.get(store, record.id).state is JobState.CANCELLED
    assert plan_file(links, record.id).exists() == is_folder
    assert not rows_file(links, record.id).exists()


def test_a_template_beside_others_counts_too(
    store: Store, record: JobRecord, links: Path, tmp_path: Path
) -> None:
    more = tmp_path / "model" / "additional_chat_templates"
    more.mkdir(parents=True)
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    taken_up(store, record, links, tmp_path / "model")
    (more / "tool_use.jinja").write_text("{{ messages }}")
    assert taken_up(store, record, links, tmp_path / "model")[1]
