"""The real data sets, where they lie beside the checkout: every row arrives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchrun.datasets import import_dataset
from batchrun.inputs import RequestTemplate, check_ids, open_input
from batchrun.jobspec import load_job_file

CHECKOUT = Path(__file__).parents[2]
REAL_DATA = CHECKOUT.parent / "shared" / "datasets"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not REAL_DATA.is_dir(), reason="no real data in ../shared/datasets"),
]


def imported(name: str, tmp_path: Path) -> list[dict[str, str]]:
    written = import_dataset(name, REAL_DATA / name, tmp_path / f"{name}.parquet")
    rows: list[dict[str, str]] = pq.read_table(written.path).to_pylist()
    assert len(rows) == written.num_rows
    return rows


def test_loogle_has_217_questions_on_14_documents(tmp_path: Path) -> None:
    rows = imported("loogle", tmp_path)
    tasks = Counter(row["task"] for row in rows)
    assert tasks == {"shortdep_qa": 80, "longdep_qa": 43, "shortdep_cloze": 94}
    assert len({row["document_id"] for row in rows}) == 14
    assert all(row["question"] and row["answer"] for row in rows)


def test_toolbench_has_1358_distinct_queries(tmp_path: Path) -> None:
    rows = imported("toolbench", tmp_path)
    assert len(rows) == len({row["query"] for row in rows}) == 1358
    assert Counter(row["id"].partition("-")[0] for row in rows)["solvable"] == 764


def test_nextqa_has_4996_questions_on_570_videos(tmp_path: Path) -> None:
    rows = imported("nextqa", tmp_path)
    assert len(rows) == 4996
    assert len({row["video_id"] for row in rows}) == len({row["video"] for row in rows}) == 570
    assert max(len(row["video"].split()) for row in rows) < 512


@pytest.mark.parametrize("name", ["loogle", "toolbench", "nextqa"])
def test_the_shipped_job_renders_every_real_row(name: str, tmp_path: Path) -> None:
    path = import_dataset(name, REAL_DATA / name, tmp_path / f"{name}.parquet").path
    spec = load_job_file(CHECKOUT / "jobs" / f"{name}.yaml", cwd=tmp_path)
    data = open_input(spec.input.model_copy(update={"path": (str(path),)}))
    check_ids(data)
    template = RequestTemplate(spec, data.columns, model="default")
    bodies = [
        template.render(row, row_number=first_row + offset)
        for first_row, rows in data.iter_rows(template.columns_used)
        for offset, row in enumerate(rows)
    ]
    assert len(bodies) == data.num_rows
    assert all(body["messages"] for body in bodies)
