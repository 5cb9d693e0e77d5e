"""The hints that the daemon sends are hints that the scheduler reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.daemon.active_job import ActiveJob
from batchrun.daemon.hinting import MAX_NODES, Hinter
from batchrun.daemon.opening import open_job
from batchrun.jobspec import load_job_file
from batchrun.store import jobs, open_store
from batchrun.submission import prepare_job
from batchrun.vllm_plugin.hints import Hint, parse_hint

JobMaker = Callable[..., ActiveJob]

JOB_FILE = """\
name: hints
endpoint: ENDPOINT
input:
  path: rows.parquet
  CONTENT: "{{ text }}"
output: {path: out.parquet}
"""


@pytest.fixture
def make_job(tmp_path: Path) -> JobMaker:
    def make(texts: list[str], endpoint: str = "/v1/completions") -> ActiveJob:
        pq.write_table(pa.table({"text": texts}), tmp_path / "rows.parquet")
        content = "prompt" if endpoint == "/v1/completions" else "input"
        text = JOB_FILE.replace("ENDPOINT", endpoint).replace("CONTENT", content)
        (tmp_path / "job.yaml").write_text(text)
        spec = load_job_file(tmp_path / "job.yaml", cwd=tmp_path)
        store = open_store(tmp_path / "store.db")
        record = jobs.create(store, prepare_job(spec, links=tmp_path / "links"), now_s=0.0)
        job = open_job(store, record, links=tmp_path / "links")
        store.close()
        return job

    return make


def hint_of(hinter: Hinter, job: ActiveJob, row: int) -> Hint:
    body: dict[str, object] = {"vllm_xargs": {"mine": 1}}
    hinter.add_hint(body, job, row, "secret")
    extra = body["vllm_xargs"]
    assert isinstance(extra, dict)
    assert extra["mine"] == 1
    hint = parse_hint(extra, "secret")
    assert hint is not None
    return hint


def test_rows_to_come_count_down_along_the_planned_order(make_job: JobMaker) -> None:
    documents = ["a" * 600, "b" * 600]
    job = make_job([documents[i % 2] + str(i) * 300 for i in range(6)])
    hinter = Hinter(epoch=4)

    hints = [hint_of(hinter, job, int(row)) for row in job.plan.order.rows]

    assert [hint.rank for hint in hints] == list(range(6))
    assert [hint.nodes[0].num_rows_to_come for hint in hints] == [2, 1, 0, 2, 1, 0]
    assert len({hint.nodes[0].node for hint in hints[:3]}) == 1
    assert hints[0].nodes[0].node != hints[3].nodes[0].node
    assert hints[0].nodes[0].next_rank == 1


def test_a_row_that_shares_nothing_has_no_nodes(make_job: JobMaker) -> None:
    job = make_job(["x" * 600, "y" * 600])

    assert hint_of(Hinter(1), job, 0).nodes == ()


def test_of_a_long_path_the_ends_are_told(make_job: JobMaker) -> None:
    texts = ["z" * (256 * n) + str(n) * 256 for n in range(1, 14)]
    job = make_job(texts)
    deepest = max(
        range(len(texts)), key=lambda row: len(job.nodes.path(job.queue.position_of(row)))
    )
    path = job.nodes.path(job.queue.position_of(deepest))

    told = [node.node for node in hint_of(Hinter(1), job, deepest).nodes]

    assert len(path) > MAX_NODES == len(told)
    assert told[0] == path[0]
    assert told[1:] == path[1 - MAX_NODES :]


def test_endpoints_without_a_place_for_it_get_no_hint(make_job: JobMaker) -> None:
    job = make_job(["x", "y"], "/v1/embeddings")
    body: dict[str, object] = {}

    Hinter(1).add_hint(body, job, 0, "secret")

    assert json.dumps(body) == "{}"
