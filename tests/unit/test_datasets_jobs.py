"""The shipped job files fit the shipped samples, and put what is shared first."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchrun.jobs.inputs.input_data import check_columns, check_ids, open_input
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.prompts.prompt_text import prefix_text
from batchrun.jobs.prompts.template import RequestTemplate
from batchrun.jobs.spec import JobSpec
from batchrun.samples.dataset import SCHEMAS, DatasetName

CHECKOUT = Path(__file__).parents[2]
GROUP_COLUMN = {"loogle": "document_id", "toolbench": "tools", "nextqa": "video_id"}
SHARED_COLUMN = {"loogle": "document", "toolbench": "tools", "nextqa": "video"}


def job(name: DatasetName) -> JobSpec:
    return load_job_file(CHECKOUT / "jobs" / f"{name}.yaml", cwd=CHECKOUT)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_job_names_only_columns_of_its_data_set(name: DatasetName) -> None:
    spec = job(name)
    template = RequestTemplate(spec, SCHEMAS[name].names, model="default")
    assert set(template.columns_used) < set(SCHEMAS[name].names)
    assert "answer" not in template.columns_used
    assert set(spec.output.keep) <= set(SCHEMAS[name].names)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_job_runs_on_the_committed_sample(name: DatasetName) -> None:
    spec = job(name)
    data = open_input(spec.input)
    check_columns(spec, data)
    check_ids(data)
    assert data.num_rows in {32, 200}


@pytest.mark.parametrize("name", SCHEMAS)
def test_rows_of_a_group_share_the_prompt_up_to_the_end_of_the_shared_text(
    name: DatasetName,
) -> None:
    data = open_input(job(name).input)
    template = RequestTemplate(job(name), data.columns, model="default")
    rows = data.read_rows(range(data.num_rows), data.columns)
    group = [row for row in rows if row[GROUP_COLUMN[name]] == rows[0][GROUP_COLUMN[name]]]
    prompts = [prefix_text(template.render(row, row_number=0)).decode() for row in group]
    shared_text = str(rows[0][SHARED_COLUMN[name]])
    shared_end = prompts[0].index(shared_text) + len(shared_text)
    assert len(prompts) > 2
    assert len({prompt[:shared_end] for prompt in prompts}) == 1
    assert len(set(prompts)) == len(prompts)
