"""A newcomer's jobs on a running deployment: every kind of input, output and end."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment_rig import JOB_FILE, DeploymentRig

from batchrun.home import Home

TEXTS = [f"question {i}" for i in range(6)]
FAILS_ON_ROW_0 = JOB_FILE.replace("{{ text }}", "{{ 8 // (text[-1] | int) }}")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentRig]:
    """One deployment for all tests here, in a folder with a space and a letter beyond ASCII."""
    folder = tmp_path_factory.mktemp("new") / "mein Übungsordner"
    folder.mkdir()
    made = DeploymentRig(folder)
    made.use_fake_engine()
    made.write_rows(TEXTS)
    write_inputs(folder)
    made.ask("up", "-d")
    yield made
    made.close()


def write_inputs(folder: Path) -> None:
    """The same rows as JSONL, CSV, two Parquet files for a glob, and as an OpenAI batch."""
    rows = [{"id": f"row-{i}", "text": text} for i, text in enumerate(TEXTS)]
    body = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}
    fixed = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    batch = [{"custom_id": row["id"], **fixed} for row in rows]
    other = [{"custom_id": f"c{i}", **fixed, "url": "/v1/embeddings"} for i in range(30)]
    for name, lines in (("rows.jsonl", rows), ("batch.jsonl", batch), ("other.jsonl", other)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    csv_lines = ["id,text", *(f"{row['id']},{row['text']}" for row in rows)]
    (folder / "rows.csv").write_text("\n".join(csv_lines) + "\n")
    for part in range(2):
        texts = [f"part {part} {i}" for i in range(3)]
        DeploymentRig(folder).write_rows(texts, name=f"part-{part}.parquet")


def job_of(path: str, endpoint: str, template: str, output: str) -> str:
    """A job file for an input of another format or endpoint."""
    key = "id: id, " if template and "*" not in path else ""
    return (
        f"name: other\nendpoint: {endpoint}\n"
        f"input: {{path: '{path}', {key}{template}}}\noutput: {{path: '{output}'}}\n"
    )


CHAT = 'messages: [{role: user, content: "{{ text }}"}]'


@pytest.mark.parametrize(
    ("path", "endpoint", "template", "output"),
    [
        ("rows.jsonl", "/v1/chat/completions", CHAT, "new folder/ö.jsonl"),
        ("rows.csv", "/v1/chat/completions", CHAT, "csv.parquet"),
        ("part-*.parquet", "/v1/chat/completions", CHAT, "parts.jsonl"),
        ("batch.jsonl", "/v1/chat/completions", "", "batch.parquet"),
        ("rows.csv", "/v1/completions", 'prompt: "{{ text }}"', "prompts.jsonl"),
        ("rows.parquet", "/v1/embeddings", 'input: "{{ text }}"', "vectors.parquet"),
    ],
)
def test_every_kind_of_input_and_endpoint_ends_in_a_file(
    rig: DeploymentRig, path: str, endpoint: str, template: str, output: str
) -> None:
    rig.write_job(job_of(path, endpoint, template, f"answers/{output}"), "other.yaml")

    done = rig.call("run", "other.yaml")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"{rig.folder / 'answers' / output}\n")
    rows = rig.output(f"answers/{output}")
    assert len(rows) == len(TEXTS)
    assert all(row["response"] and row["error"] is None for row in rows)


def test_a_job_file_in_another_folder_reads_beside_itself_and_writes_where_one_stands(
    rig: DeploymentRig,
) -> None:
    (rig.folder / "jobs").mkdir()
    rig.write_job(JOB_FILE.replace("rows.parquet", "../rows.parquet"), "jobs/here.yaml")
    (rig.folder / "out.parquet").write_text("an older file")

    assert rig.call("run", "jobs/here.yaml").returncode == 0

    assert [row["text"] for row in rig.output()] == TEXTS


def test_rows_that_fail_matter_only_under_strict(rig: DeploymentRig) -> None:
    rig.write_job(FAILS_ON_ROW_0)

    loose, strict = (
        rig.call("submit", "job.yaml", "--wait"),
        rig.call("run", "job.yaml", "--strict"),
    )

    assert (loose.returncode, strict.returncode) == (0, 1)
    assert "\nwhy rows failed: batchrun errors job_" in loose.stderr
    assert "out.parquet is there already; the job replaces it when it ends\n" in strict.stderr
    assert "batchrun: rows failed: 1; see `batchrun errors job_" in strict.stderr
    (failed,) = rig.ask("errors", "sample")["errors"]
    assert (failed["row"], failed["message"]) == (0, "integer division or modulo by zero")


def test_a_model_that_nobody_serves_is_said_at_submit(rig: DeploymentRig) -> None:
    rig.write_job(JOB_FILE.replace("name: sample", "name: wrong\nmodel: gpt-9"))

    done = rig.call("run", "job.yaml")

    assert done.returncode == 2
    assert done.stderr.count("batchrun: ") == 1
    assert "batchrun: model: no engine serves 'gpt-9'; they serve fake" in done.stderr
    assert rig.call("results", "wrong").returncode == 2


def test_a_batch_for_another_endpoint_is_refused_instead_of_failing_every_row(
    rig: DeploymentRig,
) -> None:
    rig.write_job("name: mixed\ninput: {path: other.jsonl}\noutput: {path: mixed.jsonl}\n")

    done = rig.call("run", "job.yaml")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "batchrun: row 0, and all of the first 30 rows: 'url' is '/v1/embeddings' but the job's "
        "endpoint is /v1/chat/completions\n"
    )


@pytest.mark.parametrize("action", ["pause", "resume", "cancel"])
def test_an_ended_job_stays_as_it_is(rig: DeploymentRig, action: str) -> None:
    rig.write_job(JOB_FILE.replace("name: sample", "name: my first job"))
    assert rig.call("submit", "job.yaml", "--wait").returncode == 0

    refused = rig.call(action, "my first job")

    assert refused.returncode == 4
    assert " is completed and cannot become " in refused.stderr


@pytest.mark.parametrize("action", ["cancel", "status", "results"])
def test_a_job_that_is_not_there_is_one_line(rig: DeploymentRig, action: str) -> None:
    refused = rig.call(action, "no such, job?")

    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("batchrun: no such, job?: no such job; ")
    assert refused.stderr.count("\n") == 1


def test_a_second_up_is_refused_and_changes_nothing(rig: DeploymentRig) -> None:
    daemon = rig.pid_of("daemon")

    refused = rig.call("up", "-d")

    assert (refused.returncode, refused.stderr.count("\n")) == (4, 1)
    assert "a daemon runs already" in refused.stderr
    assert "stop it with `batchrun down`" in refused.stderr
    assert rig.pid_of("daemon") == daemon


def test_flags_of_run_that_a_running_daemon_ignores_are_named(rig: DeploymentRig) -> None:
    rig.write_job(JOB_FILE)

    done = rig.call("run", "job.yaml", "--model", "other")

    assert done.returncode == 0
    assert "--model, --listen and --config have no effect" in done.stderr


def test_the_gateway_shows_the_metrics_of_the_daemon(rig: DeploymentRig) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{rig.port}/metrics", timeout=30) as reply:
        page = reply.read().decode()

    assert reply.headers["Content-Type"].startswith("text/plain; version=")
    daemon = Home(rig.home).read_daemon_address()
    assert daemon is not None
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{daemon.url}/metrics", timeout=30)
    assert 'batchrun_engine_up{engine="0"} 1.0\n' in page
    assert "batchrun_offline_enabled 1.0\n" in page


def test_an_engine_without_the_scheduler_cannot_be_steered(rig: DeploymentRig) -> None:
    refused = rig.call("engine", "set", "--policy", "echo")

    assert refused.returncode == 4
    assert refused.stderr.startswith("batchrun: no engine runs batchrun's scheduler: only those do")
    assert rig.ask("status")["engines"][0]["telemetry"] is None


def test_online_calls_of_an_engine_without_our_scheduler_cannot_be_recorded(
    rig: DeploymentRig,
) -> None:
    code, line = rig.refuse("trace", "record", "-o", "calls.parquet", "--seconds", "5")
    assert code == 4
    assert "no engine runs batchrun's scheduler" in line
    assert not (rig.folder / "calls.parquet").exists()
