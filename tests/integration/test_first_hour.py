"""Jobs that look fine and are not, and what a newcomer is told of them."""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import polars as pl
import psutil
import pytest
import requests
import zstandard
from deployment_rig import JOB_FILE, DeploymentRig

from batchrun.files import StoreLock

NUM_ROWS = 6
SLOW_S = 0.4
WAIT_S = 120.0
TEXTS = [f"question {i}" for i in range(NUM_ROWS)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentRig]:
    """One deployment, up; rows with `poison` are refused, those with `long` cut off."""
    made = DeploymentRig(tmp_path_factory.mktemp("hour"))
    body = json.dumps({"error": {"message": "prompt of 9123 tokens is too long", "code": "x"}})
    rules: list[dict[str, object]] = [
        {"match": {"substring": "slowly"}, "action": {"delay_s": SLOW_S}},
        {"match": {"substring": "poison"}, "action": {"status": 400, "body": body}},
        {"match": {"substring": "long"}, "action": {"finish_reason": "length"}},
        {"match": {}, "action": {"finish_reason": "stop"}},
    ]
    made.use_fake_engine(rules=rules)
    made.write_rows(TEXTS)
    made.ask("up", "-d")
    yield made
    made.close()


def run(rig: DeploymentRig, *texts: str, job: str = JOB_FILE) -> tuple[int, str, str]:
    """Run a job of these rows: (exit code, stdout, stderr)."""
    rig.write_rows(texts)
    rig.write_job(job)
    (rig.folder / "out.parquet").unlink(missing_ok=True)
    done = rig.call("run", "job.yaml")
    return done.returncode, done.stdout, done.stderr


def test_a_job_whose_rows_all_fail_has_failed(rig: DeploymentRig) -> None:
    code, _, said = run(rig, "poison 1", "poison 2", job=JOB_FILE.replace("sample", "lost"))

    assert code == 1
    assert " failed: every row failed: prompt of 9123 tokens is too long; see " in said
    assert "`batchrun errors job_" in said
    view = rig.ask("status", "lost")["jobs"][0]
    assert (view["state"], view["num_failed"]) == ("failed", 2)
    assert [row["error"] is None for row in rig.output()] == [False, False]
    assert rig.call("results", "lost").returncode == 0
    assert "every row failed" in rig.call("status").stdout


def test_answers_that_were_cut_off_are_counted(rig: DeploymentRig) -> None:
    code, shown, _ = run(rig, "long one", "short", "long two")

    assert code == 0
    assert "3 rows done, 0 failed" in shown and "; 2 answers cut off at the token limit\n" in shown
    assert "2 answers at the token limit" in rig.call("status", "sample").stdout
    assert [row["finish_reason"] for row in rig.output()] == ["length", "stop", "length"]


def test_an_answer_that_was_to_be_json_and_is_not_is_an_error_of_its_row(
    rig: DeploymentRig,
) -> None:
    wanted = JOB_FILE.replace(
        "max_tokens: 8", "max_tokens: 8, response_format: {type: json_object}"
    )
    code, _, said = run(rig, "long", "plain", job=wanted.replace("sample", "broken"))

    assert code == 1
    assert "was cut off after " in said or "is not JSON" in said
    cut, plain = (json.loads(row["error"]) for row in rig.output())
    assert cut["code"] == plain["code"] == "invalid_json"
    assert "tokens, before its JSON ended: '" in cut["message"]
    assert plain["message"].startswith("the answer is not JSON: '")
    assert [row["finish_reason"] for row in rig.output()] == ["length", "stop"]
    assert all(row["output_tokens"] for row in rig.output())


def test_errors_are_told_by_cause_with_ids(rig: DeploymentRig) -> None:
    run(rig, "fine", *(f"poison {i}" for i in range(7)), job=JOB_FILE.replace("sample", "causes"))

    found = rig.ask("errors", "causes")
    shown = rig.call("errors", "causes").stdout

    (cause,) = found["causes"]
    assert (cause["num_rows"], cause["ids"]) == (7, "row-1, row-2, row-3, row-4, row-5, ...")
    assert [row["id"] for row in found["errors"]] == [f"row-{i}" for i in range(1, 8)]
    assert "prompt of 9123 tokens is too long" in shown and "row-1, row-2" in shown


@pytest.mark.parametrize(
    "name", ["a.tsv", "a.csv.gz", "a.json", "a.jsonl.zst", "a.csv", "a.parquet"]
)
def test_ids_keep_their_type_and_the_output_joins_the_input(rig: DeploymentRig, name: str) -> None:
    table = pl.DataFrame({"key": [10, 7, 30], "text": ["a\tb", 'say "c"', "d, e"]})
    write(table, rig.folder / name)
    rig.write_job(
        f"name: typed\ninput: {{path: {name}, id: key, prompt: '{{{{ text }}}}'}}\n"
        "endpoint: /v1/completions\noutput: {path: typed.parquet}\n"
    )

    assert rig.call("run", "job.yaml").returncode == 0

    answers = pl.read_parquet(rig.folder / "typed.parquet")
    assert answers.schema["id"] == pl.Int64
    assert table.join(answers, left_on="key", right_on="id")["response"].null_count() == 0
    frame, other = table.to_pandas(), pd.read_parquet(rig.folder / "typed.parquet")
    assert len(frame.merge(other, left_on="key", right_on="id")) == 3


def write(table: pl.DataFrame, path: Path) -> None:
    """The table in the format of the file's name."""
    rows = table.to_dicts()
    if path.suffix == ".parquet":
        table.write_parquet(path)
    elif path.name.endswith(".tsv"):
        table.write_csv(path, separator="\t")
    elif path.name.endswith(".csv"):
        table.write_csv(path)
    elif path.name.endswith(".csv.gz"):
        path.write_bytes(gzip.compress(table.write_csv().encode()))
    elif path.name.endswith(".json"):
        path.write_text(json.dumps(rows, indent=2))
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(zstandard.compress(lines.encode()))


def test_status_has_the_newest_first_and_ended_jobs_behind_all(rig: DeploymentRig) -> None:
    newest = [view["id"] for view in rig.ask("status")["jobs"]][::-1]

    lines = [line.split()[0] for line in rig.call("status").stdout.splitlines() if " 100% " in line]

    assert lines == newest[:20]


def test_status_says_that_jobs_wait_while_offline_work_is_off(rig: DeploymentRig) -> None:
    rig.write_rows(["a"])
    rig.write_job(JOB_FILE.replace("sample", "held"))
    rig.ask("offline", "off")
    try:
        job = rig.ask("submit", "job.yaml")["id"]
        deadline_s = time.monotonic() + WAIT_S
        while rig.ask("status", job)["jobs"][0]["state"] != "running":
            assert time.monotonic() < deadline_s
        shown = rig.call("status").stdout
    finally:
        rig.ask("offline", "on")

    assert " held" in shown and "waiting: offline work is off" in shown


def test_status_of_a_job_that_has_ended_tells_no_speed(rig: DeploymentRig) -> None:
    run(rig, "a", job=JOB_FILE.replace("sample", "ended"))

    shown = rig.call("status", "ended").stdout

    assert " output " in shown
    assert "speed" not in shown and "ETA" not in shown and "(best possible -)" not in shown


def test_status_tells_how_long_calls_take_as_their_callers_feel_it(rig: DeploymentRig) -> None:
    message = {"role": "user", "content": "slowly"}
    call = json.dumps({"model": "fake", "messages": [message], "stream": True})
    headers = {"Content-Type": "application/json"}
    deadline_s = time.monotonic() + WAIT_S
    while not (felt := rig.ask("status")["felt"]):
        assert time.monotonic() < deadline_s
        url = f"http://127.0.0.1:{rig.port}/v1/chat/completions"
        assert requests.post(url, data=call, headers=headers, timeout=WAIT_S).ok

    ttft = next(each for each in felt if each["latency"] == "TTFT")
    assert ttft["mean_s"] >= SLOW_S and ttft["p50_s"] >= SLOW_S
    shown = rig.call("status").stdout
    assert "calls of the last 5 minutes\n TTFT" in shown and "s on average" in shown


def test_run_leaves_what_ran_before_it(tmp_path: Path) -> None:
    rig = DeploymentRig(tmp_path)
    try:
        rig.use_fake_engine()
        rig.write_rows(TEXTS)
        rig.write_job(JOB_FILE)
        rig.ask("up", "-d")
        before = [rig.pid_of(what) for what in ("gateway", "engine")]
        rig.kill("daemon")

        assert rig.call("run", "job.yaml").returncode == 0

        assert [rig.pid_of(what) for what in ("gateway", "engine")] == before
        assert all(map(psutil.pid_exists, before))
        assert StoreLock(rig.home / "store.lock").find_holder() is None
    finally:
        rig.close()


def test_the_log_begins_with_what_happened(rig: DeploymentRig) -> None:
    assert "alembic" not in rig.call("logs", "-n", "10000").stdout


def test_an_adopted_engine_that_dies_unheard_is_started_anew(tmp_path: Path) -> None:
    """The daemon that has just begun must not end for it."""
    rig = DeploymentRig(tmp_path)
    try:
        rig.use_fake_engine()
        rig.ask("up", "-d")
        engine = rig.pid_of("engine")
        rig.kill("daemon")
        os.kill(engine, signal.SIGSTOP)
        starting = rig.start("up", "-d")
        while StoreLock(rig.home / "store.lock").find_holder() is None:
            assert starting.poll() is None
            time.sleep(0.05)
        time.sleep(2.0)
        os.kill(engine, signal.SIGKILL)

        _, said = starting.communicate(timeout=WAIT_S)
        assert starting.returncode == 0, said
        assert rig.pid_of("engine") != engine
    finally:
        rig.close()
