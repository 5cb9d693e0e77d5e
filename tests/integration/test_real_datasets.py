"""The real data sets, where they lie beside the checkout: every row arrives."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from direct_study import direct_figures
from tokenizers import Tokenizer

from batchrun.engine.tiny_model import build_tiny_model
from batchrun.jobs.expected_answers import estimate_outputs
from batchrun.jobs.inputs.input_data import check_ids, open_input
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.prompts.template import RequestTemplate
from batchrun.jobs.prompts.tokens import read_prompts
from batchrun.jobs.study import KvSize, study_job
from batchrun.samples.dataset import DatasetName
from batchrun.samples.importers import import_dataset
from batchrun.simulator.traces.reading import Drawing, read_rates, read_trace
from batchrun.simulator.traces.trace import summarize_trace

CHECKOUT = Path(__file__).parents[2]
REAL_DATA = CHECKOUT.parent / "shared" / "datasets"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not REAL_DATA.is_dir(), reason="no real data in ../shared/datasets"),
]


def imported(name: DatasetName, tmp_path: Path) -> list[dict[str, str]]:
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


STUDIED = (
    "prompt_tokens_mean",
    "shared_share_mean",
    "common_share_mean",
    "key_portion_share_mean",
    "rows_per_key_portion_mean",
    "shared_share_of_tokens",
)


@pytest.mark.timeout(900)
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["loogle", "toolbench", "nextqa"])
def test_inspect_tells_every_mean_to_3_percent_of_a_direct_count(
    name: DatasetName, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"video_tokens": 512} if name == "nextqa" else {}
    path = import_dataset(name, REAL_DATA / name, tmp_path / f"{name}.parquet", **more).path
    build_tiny_model(tmp_path / "tiny")
    prompts = read_prompts(tmp_path / "tiny", now=datetime.now(UTC))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tiny" / "tokenizer.json"))
    tokenizer.no_truncation()
    spec = load_job_file(CHECKOUT / "jobs" / f"{name}.yaml", cwd=tmp_path)
    with open_input(spec.input.model_copy(update={"path": (str(path),)})) as data:
        template = RequestTemplate(spec, data.columns, model=spec.model)
        job = study_job(spec, data, template, prompts)
        outputs = estimate_outputs(spec, data, job.counted.bytes_per_token)
        kv = KvSize(None, "unknown", 16, "vLLM's default")
        told = job.figures(outputs, kv)
        texts = [
            prompts.text(template.render(row, row_number=first + offset)).decode()
            for first, rows in data.iter_rows(template.columns_used)
            for offset, row in enumerate(rows)
        ]
    encoded = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
    counted = direct_figures([np.array(ids, dtype=np.uint32) for ids in encoded])

    assert {key: told[key] for key in STUDIED} == {
        key: pytest.approx(counted[key], rel=0.03) for key in STUDIED
    }


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["loogle", "toolbench", "nextqa"])
def test_the_shipped_job_renders_every_real_row(name: DatasetName, tmp_path: Path) -> None:
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


AZURE = "azure_llm_2023/AzureLLMInferenceTrace_conv.csv.gz"
MOONCAKE = "mooncake/conversation_trace.jsonl.gz"
SERVEGEN = "servegen/m-small-traces.tar.gz"


def test_the_azure_trace_has_its_figures() -> None:
    summary = summarize_trace(read_trace(REAL_DATA / AZURE), peak_s=300)
    assert summary.num_requests == 19_366
    assert summary.rate_per_s == pytest.approx(5.53, abs=0.01)
    assert (summary.prompt_tokens.p50, summary.output_tokens.p50) == (1_020, 129)
    assert summary.gap_cv == pytest.approx(1.09, abs=0.01)


def test_the_mooncake_trace_has_its_figures() -> None:
    trace = read_trace(REAL_DATA / MOONCAKE)
    summary = summarize_trace(trace)
    assert (summary.num_requests, summary.prompt_tokens.largest) == (12_031, 126_195)
    assert trace.prefix is not None and len(trace.prefix.hashes) == 288_500
    assert summary.prefix_hit_rate == pytest.approx(0.37, abs=0.01)


def test_a_day_of_servegen_follows_its_tide() -> None:
    day = Drawing(seed=1, rate=0.001, from_s=86_400, to_s=2 * 86_400)
    series = read_rates(REAL_DATA / SERVEGEN)
    trace = read_trace(REAL_DATA / SERVEGEN, drawing=day)
    expected = sum(each.between(86_400, 2 * 86_400).expected_calls for each in series) / 1_000
    by_hour = np.bincount((trace.arrival_s // 3_600).astype(int))
    assert len(series) == 43
    assert len(trace) == pytest.approx(expected, rel=0.05)
    assert by_hour.max() / by_hour.min() > 1.7
