"""`batchrun inspect` as its user meets it: figures, plots, KV sizes, finished rows, mistakes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_call import Cli, cli_in
from deployment_rig import JOB_FILE, DeploymentRig

from batchrun.pool.prefix_keys import CHUNK_BYTES

NUM_DOCUMENTS, QUESTIONS = 4, 5
KEEPS_ANSWERS = JOB_FILE.replace("[text]", "[answer]")


def write_rows(path: Path) -> None:
    """Five questions on each of four documents of 8,000 bytes, the documents in turn."""
    documents = [f"Document {i}. " + f"{i} is what it says. " * 500 for i in range(NUM_DOCUMENTS)]
    texts = [
        documents[row % NUM_DOCUMENTS][:8_000] + f" Question number {row} of them all?"
        for row in range(NUM_DOCUMENTS * QUESTIONS)
    ]
    table = pa.table({
        "id": [f"row-{row}" for row in range(len(texts))],
        "text": texts,
        "answer": ["", *["twelve bytes"] * (len(texts) - 1)],
    })
    pq.write_table(table, path)


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Calls the command in a folder with rows and no daemon: (exit code, stdout, stderr)."""
    write_rows(tmp_path / "rows.parquet")
    (tmp_path / "job.yaml").write_text(JOB_FILE)
    return cli_in(tmp_path, monkeypatch, capsys)


def figures(cli: Cli, *arguments: str) -> dict[str, Any]:
    code, out, err = cli("inspect", *arguments, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_figures_say_what_rows_share(cli: Cli) -> None:
    found = figures(cli, "job.yaml")

    assert (found["rows"], found["prefix_groups"], found["key_portions"]) == (20, 4, 4)
    assert found["prompt_tokens_mean"] == pytest.approx(2_010, rel=0.01)
    assert found["shared_share_mean"] == pytest.approx(0.8, abs=0.02)
    assert found["common_share_mean"] == pytest.approx(0.99, abs=0.02)
    assert found["key_portion_share_mean"] == pytest.approx(0.99, abs=0.02)
    assert (found["rows_per_key_portion_mean"], found["rows_per_key_portion_std"]) == (5, 0)
    assert found["best_hit_rate"] == pytest.approx(0.8, abs=0.02)
    assert (found["expected_hit_rate"], found["kv_tokens_source"]) == (None, "unknown")
    assert found["rows_tokenised"] == 0


BATCH_FILE = """\
name: batch
input: {path: batch.jsonl, format: openai-batch}
output: {path: out.jsonl}
"""


@pytest.mark.parametrize(
    ("fields", "groups"),
    [
        ([{}, {}], 1),
        ([{}, {"model": "default"}], 1),
        ([{"cache_salt": "a"}, {"cache_salt": "b"}], 2),
        ([{}, {"cache_salt": "b"}], 2),
        ([{"model": "a"}, {"model": "b"}], 2),
    ],
)
def test_rows_share_nothing_across_models_and_cache_salts(
    cli: Cli, tmp_path: Path, fields: list[dict[str, str]], groups: int
) -> None:
    """Ten rows with the same long prompt, and in turn with these fields."""
    messages = [{"role": "user", "content": "The same long document. " * 100}]
    lines = [
        {
            "custom_id": f"row-{row}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": messages, **fields[row % 2]},
        }
        for row in range(10)
    ]
    (tmp_path / "batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "batch.yaml").write_text(BATCH_FILE)
    found = figures(cli, "batch.yaml")

    assert (found["prefix_groups"], found["key_portions"]) == (groups, groups)
    assert found["best_hit_rate"] == pytest.approx(1 - groups / 10, abs=0.02)
    assert len(found["order"]) == groups


def test_the_order_says_what_runs_first_and_how_it_begins(cli: Cli) -> None:
    order = figures(cli, "job.yaml")["order"]

    assert [stretch["num_rows"] for stretch in order] == [QUESTIONS] * NUM_DOCUMENTS
    assert [stretch["first_row"] % NUM_DOCUMENTS for stretch in order] == [0, 1, 2, 3]
    assert all("is what it says" in stretch["begins"] for stretch in order)
    assert all(stretch["shared_tokens"] > 7_900 for stretch in order)


def test_a_small_kv_serves_the_planned_order_and_not_the_inputs(cli: Cli) -> None:
    found = figures(cli, "job.yaml", "--kv-tokens", "3000")

    assert (found["kv_tokens"], found["kv_tokens_source"]) == (3_000, "--kv-tokens")
    assert found["expected_hit_rate"] == pytest.approx(found["best_hit_rate"], abs=0.01)
    assert found["expected_hit_rate_as_written"] < 0.1


def test_rows_that_need_more_kv_than_there_is_are_counted(cli: Cli) -> None:
    found = figures(cli, "job.yaml", "--kv-tokens", "2000")
    assert (found["rows_larger_than_kv"], found["expected_hit_rate"]) == (20, None)
    assert "no row fits 2,000 KV tokens" in cli("inspect", "job.yaml", "--kv-tokens", "2000")[1]


def test_block_sizes_come_from_the_engines_arguments(cli: Cli) -> None:
    Path("batchrun.yaml").write_text('engines: [{vllm_args: ["--block-size=512"]}]\n')
    found = figures(cli, "job.yaml")
    assert (found["block_tokens"], found["block_tokens_source"]) == (
        512,
        "vllm_args in batchrun.yaml",
    )
    assert found["best_hit_rate"] == pytest.approx(0.8 * 3 * 512 / 2_010, abs=0.01)


@pytest.mark.parametrize(
    ("job_file", "mean", "source"),
    [
        (JOB_FILE, 8, "the limit in the job file"),
        (JOB_FILE.replace("max_tokens: 8, ", ""), None, "unknown"),
        (KEEPS_ANSWERS, 4, "the column 'answer'"),
        (KEEPS_ANSWERS.replace("max_tokens: 8", "max_tokens: 3"), 3, "the column 'answer'"),
    ],
)
def test_answers_are_estimated_from_what_the_job_says(
    cli: Cli, job_file: str, mean: float | None, source: str
) -> None:
    Path("job.yaml").write_text(job_file)
    found = figures(cli, "job.yaml")
    assert (found["output_tokens_mean"], found["output_tokens_source"]) == (mean, source)
    assert ("output_tokens" in found["distributions"]) is (mean is not None)


def test_people_read_words_small_distributions_and_the_order(cli: Cli) -> None:
    code, out, _ = cli("inspect", "job.yaml")
    assert code == 0
    for words in ("rows per key portion", "at best 79.", "--kv-tokens N gives it", "█", "begins"):
        assert words in out


def test_distributions_are_drawn_in_one_page_with_nothing_outside_it(cli: Cli) -> None:
    code, _, err = cli("inspect", "job.yaml", "--html", "page.html")
    assert (code, err) == (0, "distributions drawn in page.html\n")
    page = Path("page.html").read_text()

    plots = [ElementTree.fromstring(plot) for plot in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert len(plots) == 1 and page.count('id="axes_') == 6
    assert "<title>Prompts of " in page and "src=" not in page
    summary, _, _ = page.partition("<svg")
    assert "<th scope=row>hit rate<td>at best 79." in summary


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("job.yaml --kv-tokens 0", "invalid value for '--kv-tokens'"),
        ("job.yaml --html absent/page.html", "--html absent/page.html: there is no folder absent"),
        ("job.yaml --html home.d", "--html home.d: is a folder; name a file"),
        ("job.yaml --html=", "--html .: is a folder; name a file"),
        ("empty.yaml", "empty.parquet: the input has no rows"),
        ("rows.parquet", "rows.parquet: no such job"),
    ],
)
def test_a_mistake_is_one_line(cli: Cli, arguments: str, line: str) -> None:
    Path("home.d").mkdir()
    pq.write_table(pq.read_table("rows.parquet").slice(0, 0), "empty.parquet")
    Path("empty.yaml").write_text(JOB_FILE.replace("rows.parquet", "empty.parquet"))

    code, out, err = cli("inspect", *arguments.split())

    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("batchrun: ") and line in err


def test_rows_that_cannot_be_rendered_are_named_and_left_out(cli: Cli) -> None:
    Path("job.yaml").write_text(
        JOB_FILE.replace("{{ text }}", "{{ text[:(900 // (id[4:]|int))] }}")
    )
    found = figures(cli, "job.yaml")
    assert (found["rows"], found["rows_with_template_errors"]) == (20, 1)
    assert found["first_error"].startswith("row 0: ")

    Path("job.yaml").write_text(JOB_FILE.replace("{{ text }}", "{{ 1 // 0 }}"))
    found = figures(cli, "job.yaml")
    assert (found["rows_with_template_errors"], found["order"]) == (20, [])
    assert cli("inspect", "job.yaml")[0] == 0


def test_a_job_whose_input_changed_is_refused(cli: Cli) -> None:
    job = cli("submit", "job.yaml")[1].split()[0]
    assert figures(cli, job)["rows"] == 20
    Path("rows.parquet").write_bytes(Path("rows.parquet").read_bytes()[:-20])

    code, out, err = cli("inspect", job)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "rows.parquet" in err and "changed" in err


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DeploymentRig]:
    made = DeploymentRig(tmp_path)
    made.use_fake_engine()
    yield made
    made.close()


@pytest.mark.nightly
@pytest.mark.slow
def test_answers_of_finished_rows_are_the_best_estimate(rig: DeploymentRig) -> None:
    rig.write_rows([f"question {i} " + "x" * CHUNK_BYTES for i in range(6)])
    rig.write_job(JOB_FILE)
    assert rig.call("run", "job.yaml").returncode == 0

    found = json.loads(rig.call("inspect", "sample", "--json").stdout)

    assert found["output_tokens_source"] == "the 6 rows that are done"
    assert 0 < found["output_tokens_mean"] <= 8
