"""A large job's plan is read from its file as long as nothing that it is made of has changed."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.daemon.ending import JobEnd
from batchrun.daemon.opening import take_up_job
from batchrun.daemon.writer import ResultWriter
from batchrun.jobs import submit as plans
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.results.keeping import find_unused_links
from batchrun.jobs.submit import JobPlan, pin_again, plan_file, prepare_job
from batchrun.store import jobs
from batchrun.store.database import Store, open_store
from batchrun.store.jobs import JobRecord
from batchrun.types import JobState

JOB_FILE = """\
name: sample
endpoint: /v1/completions
input: {path: in.plan, format: parquet, prompt: "{{ text }}"}
output: {path: out.jsonl}
"""
TEXTS = ["shared " * 90 + str(row % 7) * 300 + f"row {row}" for row in range(40)]


@pytest.fixture(autouse=True)
def _every_plan_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "KEPT_ROWS", 1)


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
    stages: list[str] = []

    def note(stage: str, done: int, total: int) -> None:
        stages.append(stage)

    job = take_up_job(store, record, links=links, model_folder=lambda _: model, progress=note)
    job.close()
    return job.plan, "reading rows" in stages


def is_same(one: JobPlan, other: JobPlan) -> bool:
    arrays = [
        (*astuple(plan.chains), *astuple(plan.order), plan.text_bytes, plan.new_bytes)
        for plan in (one, other)
    ]
    values = [(plan.salt, plan.errors, plan.tokens.bytes_per_token) for plan in (one, other)]
    return all(map(np.array_equal, *arrays)) and values[0] == values[1]


def test_a_job_that_is_taken_up_again_reads_no_row(
    store: Store, record: JobRecord, links: Path
) -> None:
    first, has_read = taken_up(store, record, links)
    again, has_read_again = taken_up(store, record, links)

    assert (has_read, has_read_again) == (True, False)
    assert is_same(first, again)
    assert list(again.errors) == [2]
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


def test_a_job_whose_plan_cannot_be_written_runs(
    store: Store, record: JobRecord, links: Path
) -> None:
    plan_file(links, record.id).mkdir()
    plan, has_read = taken_up(store, record, links)
    assert has_read
    assert plan.num_rows == len(TEXTS)


def test_a_plan_goes_with_its_job(store: Store, record: JobRecord, links: Path) -> None:
    taken_up(store, record, links)
    path = plan_file(links, record.id)

    assert find_unused_links([record], links=links, now_s=0.0) == []
    ended = replace(record, state=JobState.COMPLETED)
    (unused,) = find_unused_links([ended], links=links, now_s=1e12)
    assert (unused.path, unused.size_bytes) == (path, path.stat().st_size)


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


def test_a_template_beside_others_counts_too(
    store: Store, record: JobRecord, links: Path, tmp_path: Path
) -> None:
    more = tmp_path / "model" / "additional_chat_templates"
    more.mkdir(parents=True)
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    taken_up(store, record, links, tmp_path / "model")
    (more / "tool_use.jinja").write_text("{{ messages }}")
    assert taken_up(store, record, links, tmp_path / "model")[1]
