"""`batchrun.map` and `batchrun.stream` against a live deployment with the fake engine."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from deployment_rig import DeploymentRig
from kill_rig import wait_until
from pydantic import BaseModel

import batchrun
from batchrun.control.client import DaemonClient
from batchrun.control.following import views
from batchrun.control.lending import deployment_up
from batchrun.errors import DataError, InputError, JobSpecError, RowsFailedError, StateError
from batchrun.files import try_lock
from batchrun.home import Home
from batchrun.store import jobs
from batchrun.store.database import open_store
from batchrun.types import OFFLINE_OFF

ASK = "Classify: {{ text }}"
TEXTS = [f"review {i}" for i in range(12)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentRig]:
    """One deployment, up; its engine refuses rows that hold the word `poison`."""
    made = DeploymentRig(tmp_path_factory.mktemp("map"))
    refuse = {"match": {"substring": "poison"}, "action": {"status": 400}}
    made.use_fake_engine(rules=[refuse])
    made.ask("up", "-d")
    yield made
    made.close()


def ask(rig: DeploymentRig, frame: Any, template: Any = ASK, **options: Any) -> Any:
    """A call of `map` without a progress bar."""
    options = {"max_tokens": 8, "progress": False} | options
    return batchrun.map(frame, template, home=rig.home, **options)


def test_every_kind_of_frame_comes_back_as_itself_with_equal_answers(rig: DeploymentRig) -> None:
    frame = pl.DataFrame({"key": range(12), "text": TEXTS})
    pandas = frame.to_pandas().set_index("key")

    answered = ask(rig, frame)
    num_begun = len(rig.executions())
    lazy, arrow, other = ask(rig, frame.lazy()), ask(rig, frame.to_arrow()), ask(rig, pandas)

    assert answered.columns == ["key", "text", "response", "finish_reason", "error"]
    assert answered["text"].to_list() == TEXTS
    assert answered["response"].null_count() == 0
    assert answered["error"].null_count() == 12
    assert isinstance(lazy, pl.LazyFrame) and lazy.collect().equals(answered)
    assert pl.DataFrame(pl.from_arrow(arrow)).equals(answered)
    assert isinstance(other, pd.DataFrame)
    assert other.index.equals(pandas.index)
    assert other["response"].tolist() == answered["response"].to_list()
    assert len(rig.executions()) == num_begun == 12


def test_rows_that_fail_are_a_column_or_an_error_and_run_again(rig: DeploymentRig) -> None:
    frame = pl.DataFrame({"text": ["sound", "poison", "also sound"]})

    answered = ask(rig, frame)
    num_begun = len(rig.executions())
    with pytest.raises(RowsFailedError, match=r"1 of 3 rows failed; the first is row 1: .*400"):
        ask(rig, frame, errors="raise")

    assert answered["error"].is_not_null().to_list() == [False, True, False]
    assert "scripted HTTP 400" in answered["error"][1]
    assert answered["response"].is_null().to_list() == [False, True, False]
    assert len(rig.executions()) == num_begun


def test_what_is_wrong_is_said_before_anything_runs(rig: DeploymentRig) -> None:
    frame = pl.DataFrame({"text": TEXTS})

    with pytest.raises(JobSpecError, match=r"no column 'txt' \(did you mean 'text'\?\)"):
        ask(rig, frame, "{{ txt }}")
    with pytest.raises(InputError, match="has a column 'response' already, as the answers do"):
        ask(rig, frame.with_columns(response=pl.lit("")))
    with pytest.raises(InputError, match="a list is no table: give a polars, pandas or Arrow one"):
        ask(rig, TEXTS)
    with pytest.raises(InputError, match="errors must be one of column, raise, not 'rais' "):
        ask(rig, frame, errors="rais")


class Label(BaseModel):
    tone: Literal["good", "bad"]
    stars: int | None


class Verdict(BaseModel):
    error: str


def test_a_frame_without_rows_comes_back_with_empty_columns(tmp_path: Path) -> None:
    empty = pl.DataFrame({"text": []}, schema={"text": pl.String})

    answered = batchrun.map(empty, ASK, home=tmp_path)
    labelled = batchrun.map(empty.lazy(), ASK, home=tmp_path, schema=Label)
    pandas = batchrun.map(empty.to_pandas(), ASK, home=tmp_path)

    assert answered.columns == ["text", "response", "finish_reason", "error"]
    assert isinstance(labelled, pl.LazyFrame)
    assert labelled.collect_schema()["stars"] == pl.Int64
    assert isinstance(pandas, pd.DataFrame) and list(pandas) == answered.columns
    with pytest.raises(JobSpecError, match="no column 'text'; it has none at all"):
        batchrun.map(pl.DataFrame(), ASK, home=tmp_path)


@pytest.mark.parametrize("template", ["", "Classify.", "Classify: {text}"])
def test_a_template_that_reads_no_column_is_refused(tmp_path: Path, template: str) -> None:
    with pytest.raises(JobSpecError, match=r"uses no column, .* write \{\{ text \}\}"):
        batchrun.map(pl.DataFrame({"text": TEXTS}), template, home=tmp_path)


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        (Label(tone="good", stars=1), "schema must be a pydantic model, a class, not Label"),
        ({"type": "object"}, "schema must be a pydantic model, a class, not {'type'"),
        (Verdict, "a field of the schema cannot be named 'error'; rename it"),
    ],
)
def test_what_is_no_schema_is_refused(tmp_path: Path, schema: Any, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        batchrun.map(pl.DataFrame({"text": TEXTS}), ASK, home=tmp_path, schema=schema)


def test_a_column_that_is_there_twice_is_refused_where_it_is_read(rig: DeploymentRig) -> None:
    twice = pd.DataFrame([["a", "b", "c"]], columns=["text", "text", "other"])
    line = "more than one column 'text'; rename the others"

    for frame in (twice, pa.Table.from_arrays([["a"], ["b"]], names=["text", "text"])):
        with pytest.raises(InputError, match=line):
            ask(rig, frame)

    assert ask(rig, twice, "Say {{ other }}")["response"].notna().all()


def test_what_a_lazy_frame_cannot_read_is_a_line(tmp_path: Path) -> None:
    missing = pl.scan_parquet(tmp_path / "nope.parquet")

    with pytest.raises(DataError, match=r"the LazyFrame cannot be collected: .*nope.parquet"):
        batchrun.map(missing, ASK, home=tmp_path)


def test_numbers_of_numpy_are_numbers(rig: DeploymentRig) -> None:
    frame = pl.DataFrame({"text": TEXTS})

    plain = ask(rig, frame, temperature=0.5)
    other = ask(rig, frame, temperature=np.float32(0.5), max_tokens=np.int64(8))

    assert other.equals(plain)


async def test_a_stream_gives_each_row_once_with_its_answer(rig: DeploymentRig) -> None:
    rows = [{"n": n, "text": f"streamed {n}"} for n in range(30)]

    first = [row async for row in batchrun.stream(rows, ASK, home=rig.home, max_tokens=8)]
    num_begun = len(rig.executions())
    again = [row async for row in batchrun.stream(rows, ASK, home=rig.home, max_tokens=8)]

    assert sorted(row["n"] for row in first) == list(range(30))
    assert all(row["response"] and row["error"] is None for row in first)
    assert sorted(first, key=lambda row: row["n"]) == again
    assert len(rig.executions()) == num_begun


async def test_a_stream_names_the_row_that_failed_after_those_before_it(rig: DeploymentRig) -> None:
    rows = [{"text": f"before {n}"} for n in range(40)] + [{"text": "poison of a stream"}]
    seen = []

    with pytest.raises(RowsFailedError, match=r"^row 40 failed: .*400.*; errors=\"column\" gives"):
        async for row in batchrun.stream(rows, ASK, home=rig.home, max_tokens=8, errors="raise"):
            seen.append(row["text"])

    assert len(seen) == len(set(seen)) and "poison of a stream" not in seen
    answered = [row async for row in batchrun.stream(rows, ASK, home=rig.home, max_tokens=8)]
    assert len(answered) == 41


@pytest.mark.nightly
def test_another_model_of_the_deployment_answers_anew(tmp_path: Path) -> None:
    with closing(DeploymentRig(tmp_path)) as other:
        frame = pl.DataFrame({"text": TEXTS})
        num_begun = []
        for model in ("one", "two", "two"):
            other.use_fake_engine(f"--model={model}")
            other.ask("up", "-d")
            assert ask(other, frame)["error"].null_count() == len(TEXTS)
            num_begun.append(len(other.executions()))
            other.ask("down")

    assert num_begun == [12, 24, 24]


def test_a_job_file_becomes_a_job_to_wait_for(
    rig: DeploymentRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rig.folder)
    rig.write_rows(["one", "poison", "three"])
    rig.write_job()

    job = batchrun.submit("job.yaml", home=rig.home, progress=False).wait(progress=False)

    assert job.status()["num_completed"] == 2
    assert job.results().select("id", "text").collect().rows() == [
        ("row-0", "one"),
        ("row-1", "poison"),
        ("row-2", "three"),
    ]
    assert job.errors()["row"].to_list() == [1]


def test_a_job_that_is_paused_goes_on_when_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(DeploymentRig(tmp_path)) as rig:
        rig.use_fake_engine()
        rig.write_rows(["one", "two"])
        job = batchrun.submit(rig.write_job(), home=rig.home, progress=False)
        with closing(open_store(job.home.store_location)) as store:
            jobs.pause(store, job.id, "by the user")

        again = batchrun.submit("job.yaml", home=rig.home, progress=False)

        assert again.id == job.id
        assert again.wait(progress=False).status()["num_completed"] == 2


def test_who_follows_a_job_is_told_once_that_offline_work_is_off(
    rig: DeploymentRig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(rig.folder)
    rig.write_rows(["one", "two"])
    rig.ask("offline", "off")
    try:
        job = batchrun.submit(rig.write_job(), home=rig.home, progress=False)
        looks = views(DaemonClient(job.home), job.id)
        while next(looks)["stage"] != OFFLINE_OFF:
            pass
        next(looks)
    finally:
        rig.ask("offline", "on")

    assert capsys.readouterr().err.count(f"{job.id} {OFFLINE_OFF}\n") == 1
    assert [*looks][-1]["num_completed"] == 2


SHARED_OUTPUT = """\
name: shared
input: {path: rows.parquet, id: id, messages: [{role: user, content: "{{ text }}"}]}
request: {max_tokens: 8}
output: {path: "out[1].jsonl", keep: [text], rows_per_file: 2}
"""


def test_the_output_of_an_earlier_job_is_not_that_of_a_later_one(
    rig: DeploymentRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rig.folder)
    file = rig.folder / "shared.yaml"
    file.write_text(SHARED_OUTPUT)
    rig.write_rows(["one", "two", "poison"])
    first = batchrun.submit(file, home=rig.home, progress=False).wait(progress=False)
    assert first.results().collect()["error"].null_count() == 2

    rig.write_rows([f"more {number}" for number in range(20_000)])
    later = batchrun.submit(file, home=rig.home, progress=False)
    with pytest.raises(StateError, match="its output is not written"):
        later.results()
    (rig.folder / "out[1].jsonl" / "of-another").touch()
    later.cancel()
    wait_until(lambda: later.status()["state"] == "cancelled")

    with pytest.raises(StateError, match=r"output not written: .*of-another"):
        later.results()
    refused = rig.call("results", later.id)
    assert refused.returncode != 0 and "of-another" in refused.stderr
    (rig.folder / "out[1].jsonl" / "of-another").unlink()
    assert rig.call("results", later.id).returncode == 0
    assert later.results().collect().height == 20_000


PROGRAM = """\
import sys
import polars as pl
import batchrun

frame = pl.DataFrame({"text": [f"review {i}" for i in range(160)]})
answered = batchrun.map(frame, "Classify: {{ text }}", max_tokens=8)
assert answered["response"].null_count() == 0
print(answered["text"].equals(frame["text"]))
"""


def test_parts_of_an_output_are_one_table_of_the_values_that_were_kept(
    rig: DeploymentRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rig.folder)
    rows: list[dict[str, object]] = [
        {"text": "one", "k": "x", "same": {"a": 1}, "number": None, "list": [1]},
        {"text": "poison", "k": {"z": 1}, "same": {"b": 2}, "number": 1, "list": {"a": 1}},
        {"text": "three", "k": True, "same": None, "number": 1.5, "list": 1},
    ]
    rows[0] |= {"flag": {"a": True}, "inner": {"a": 5}, "items": [1], "deep": [{"a": [1]}]}
    rows[1] |= {"flag": {"a": 5}, "inner": {"a": {"b": 1}}, "items": [{"b": 1}], "deep": None}
    rows[2] |= {"flag": None, "inner": {"a": 5}, "items": [], "deep": [{"a": [0.5], "b": "x"}]}
    (rig.folder / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = SHARED_OUTPUT.replace("rows.parquet, id: id", "mixed.jsonl").replace(
        "_file: 2", "_file: 1"
    )
    job = job.replace("[text]", "[k, same, number, list, flag, inner, items, deep]").replace(
        "out[1]", "mixed-out"
    )
    (rig.folder / "mixed.yaml").write_text(job)

    done = batchrun.submit("mixed.yaml", home=rig.home, progress=False).wait(progress=False)

    table = done.results().collect()
    assert table["k"].to_list() == ["x", '{"z": 1}', "true"]
    assert table["same"].to_list() == [{"a": 1, "b": None}, {"a": None, "b": 2}, None]
    assert table["number"].to_list() == [None, 1.0, 1.5]
    assert table["list"].to_list() == ["[1]", '{"a": 1}', "1"]
    assert table["flag"].to_list() == ['{"a": true}', '{"a": 5}', None]
    assert table["inner"].to_list() == ['{"a": 5}', '{"a": {"b": 1}}', '{"a": 5}']
    assert table["items"].to_list() == ["[1]", '[{"b": 1}]', "[]"]
    assert table["deep"].to_list() == [[{"a": [1], "b": None}], None, [{"a": [0.5], "b": "x"}]]
    assert table["error"].null_count() == 2


def test_a_call_that_was_killed_at_half_goes_on_where_it_was(tmp_path: Path) -> None:
    rig = DeploymentRig(tmp_path)
    rig.use_fake_engine("--latency-s=0.2", window={"requests": 8})
    command = [sys.executable, "-c", PROGRAM]
    env = {**os.environ, "BATCHRUN_HOME": str(rig.home)}
    try:
        first = subprocess.Popen(command, cwd=tmp_path, env=env)
        wait_until(lambda: len(rig.executions()) > 40)
        first.send_signal(signal.SIGKILL)
        first.wait()
        begun = len(rig.executions())

        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        again = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

        assert 40 < begun < 160
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
        assert (again.returncode, again.stdout) == (0, "True\n"), again.stderr
        assert len(rig.executions()) == 160
    finally:
        rig.close()


AT_ONCE = """\
import sys
import polars as pl
import batchrun

frame = pl.DataFrame({"text": [f"{sys.argv[1]} {i}" for i in range(int(sys.argv[2]))]})
answered = batchrun.map(frame, "Classify: {{ text }}", max_tokens=8)
print(answered["response"].null_count())
"""


def test_calls_at_once_share_a_deployment_until_the_last_and_equal_ones_a_job(
    tmp_path: Path,
) -> None:
    rig = DeploymentRig(tmp_path)
    rig.use_fake_engine("--latency-s=0.2", window={"requests": 8})
    env = {**os.environ, "BATCHRUN_HOME": str(rig.home)}
    calls = [("short", "4"), ("long", "120"), ("long", "120")]
    try:
        running = [
            subprocess.Popen(
                [sys.executable, "-c", AT_ONCE, *call],
                cwd=tmp_path,
                env=env,
                stdout=subprocess.PIPE,
                text=True,
            )
            for call in calls
        ]
        said = [process.communicate()[0] for process in running]

        assert said == ["0\n", "0\n", "0\n"]
        assert len(rig.executions()) == 124
        assert not (rig.home / "run" / "engine-0.json").exists()
    finally:
        rig.close()


def test_a_worker_that_is_forked_during_a_call_holds_none_of_its_locks(rig: DeploymentRig) -> None:
    ours, theirs = multiprocessing.Pipe()
    home = Home(rig.home)

    def wait_for_the_end() -> None:
        theirs.send("forked")
        theirs.recv()

    worker = multiprocessing.get_context("fork").Process(target=wait_for_the_end)
    with deployment_up(home, is_shown=False):
        worker.start()
        assert ours.recv() == "forked"
        with (home.run / "calls.lock").open("ab") as calls:
            is_held = not try_lock(calls.fileno())
    with (home.run / "calls.lock").open("ab") as calls:
        is_free = try_lock(calls.fileno())
    ours.send("end")
    worker.join()

    assert is_held
    assert is_free
