"""What a newcomer gets wrong before anything runs: one line that says what to do, and its code."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_call import Cli, cli_in, line_of
from deployment_rig import JOB_FILE

from batchrun.engine.command import ManagedSettings
from benchmarks.deployment import free_port

LONG_NAME = "x" * 256


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Calls the command in a folder with good rows and no daemon: (exit code, stdout, stderr)."""
    ids = [f"row-{i}" for i in range(3)]
    pq.write_table(pa.table({"id": ids, "text": ["a", "b", "a"]}), tmp_path / "rows.parquet")
    (tmp_path / "job.yaml").write_text(JOB_FILE)
    return cli_in(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("call", "exit_code", "line"),
    [
        ("run", 2, "missing argument 'file'; see `batchrun run --help`"),
        ("run absent.yaml", 2, "absent.yaml: no such file"),
        ("run .", 2, ".: cannot be read: Is a directory"),
        ("run job.yaml extra", 2, "got unexpected extra argument(s) (extra); see `batchrun run"),
        ("statsu", 2, "no such command 'statsu' (did you mean 'status'?); see `batchrun --help`"),
        ("status --nope", 2, "no such option: --nope"),
        (
            "offline",
            2,
            "missing argument 'switch'. Choose from: on, off; see `batchrun offline --help`",
        ),
        ("offline maybe", 2, "invalid value for 'switch': 'maybe' is not one of 'on', 'off'"),
        ("up --listen 0.0.0.0:80", 2, "there is no API key yet; make one"),
        ("up --config absent.yaml", 2, "absent.yaml: no such file"),
        ("status x", 2, "x: no such job; `batchrun status` lists the jobs"),
        ("results x", 2, "x: no such job;"),
        ("errors x", 2, "x: no such job;"),
        ("inspect x", 2, "x: no such job;"),
        ("inspect absent.yaml", 2, "absent.yaml: no such file"),
        ("pause x", 3, "no daemon runs for"),
        ("resume x", 3, "no daemon runs for"),
        ("cancel x", 3, "no daemon runs for"),
        ("pause a/b", 2, "'a/b': no such job;"),
        *(
            (f"{each} \udcff", 2, r"b'\xff': this argument is not UTF-8")
            for each in ("status", "cancel", "keys revoke")
        ),
        ("offline on", 3, "no daemon runs for"),
        ("submit job.yaml --wait", 3, "job.yaml was not submitted: no daemon runs to wait for"),
        ("submit job.yaml --home rows.parquet", 2, "rows.parquet: cannot be the home (it is a"),
    ],
)
def test_a_wrong_call_is_one_line(cli: Cli, call: str, exit_code: int, line: str) -> None:
    assert line in line_of(cli(*call.split()), exit_code)
    assert json.loads(cli("status", "--json")[1])["jobs"] == []


@pytest.mark.parametrize(
    ("right", "wrong", "line"),
    [
        ("request", "reqest", "job.yaml:7: reqest: unknown key (did you mean 'request'?)"),
        ("name:", "nmae:", "job.yaml:1: nmae: unknown key (did you mean 'name'?)"),
        ("name: sample", "name: a/b", "job.yaml:1: name: must be 1 to 128 letters"),
        ("{{ text }}", "{{ txt }}", "job.yaml:6: input.messages[0].content: the input has no "),
        ("{{ text }}", "{{ text /", "job.yaml:6: input.messages[0].content: template line 1: "),
        ("[text]", "[txt]", "job.yaml:8: output.keep[0]: the input has no column 'txt' (did you"),
        ("id: id", "id: idd", "input.id: the input has no column 'idd' (did you mean 'id'?)"),
        ("id: id", "id: text", "row 2: id 'a' (column 'text') is also the id of "),
        ("rows.parquet", "absent.parquet", "absent.parquet: no such file"),
        ("rows.parquet", "no*.parquet", "no*.parquet: no file matches this pattern"),
        ("rows.parquet", "folder", "folder: is a folder; name a file, or a glob such as"),
        ("rows.parquet", "empty.parquet", "empty.parquet: the input has no rows"),
        ("rows.parquet", "torn.parquet", "torn.parquet: the Parquet file is cut short"),
        ("rows.parquet", "text.parquet", "text.parquet: not a Parquet file (it does not start"),
        ("rows.parquet", "job.yaml", "job.yaml: unknown format; set input.format to"),
        ("rows.parquet", "torn.jsonl", "torn.jsonl:2: not valid JSON"),
        ("rows.parquet", "torn.csv", "torn.csv:2: 3 fields where the header has 2"),
        ("out.parquet", "out.txt", "job.yaml:8: output.path: must end in .parquet or .jsonl"),
        ("out.parquet", "rows.parquet", "job.yaml:8: output.path: would overwrite the input"),
        ("out.parquet", "job.yaml/out.jsonl", "job.yaml is not a folder"),
        ("out.parquet", "dir.jsonl", "dir.jsonl: is a folder; name a file"),
        ("out.parquet", "gone/out.jsonl", "gone is not a folder"),
        ("out.parquet", f"{LONG_NAME}.jsonl", "cannot be written: File name too long"),
        ("out.parquet", f"new/{LONG_NAME}/out.jsonl", "cannot be written: File name too long"),
        ("rows.parquet", f"{LONG_NAME}.jsonl", "cannot be read: File name too long"),
        ("rows.parquet", f"{LONG_NAME}/*.jsonl", "no file matches this pattern"),
        (
            "{{ text }}",
            "hello",
            "job.yaml:5: input.messages: uses no column, so every row would be",
        ),
        ('"{{ text }}"', "{{ text }}", 'job.yaml:6: quote the template: "{{ ... }}"'),
        (
            "max_tokens: 8",
            "max_token: 8",
            "job.yaml:7: request.max_token: /v1/chat/completions has",
        ),
        ("rows.parquet", "rows.xlsx", "rows.xlsx: a spreadsheet; save it as CSV, or in Python"),
        ("role: user", "rol: user", "input.messages[0].role: is required and must be text; 'rol'"),
        (
            "role: user",
            "role: usr",
            "messages[0].role: no model knows 'usr' (did you mean 'user'?)",
        ),
        ("content:", "contnt:", "messages[0].content: is required; 'contnt' stands there instead"),
        (
            "rows.parquet",
            "other.csv",
            "other.csv:1: one column, 'id;text': semicolons seem to stand",
        ),
        ("rows.parquet", "wide.csv", "wide.csv:1: not UTF-8 text; save it as UTF-8"),
        ("rows.parquet", "torn.json", "torn.json: not valid JSON: "),
        ("rows.parquet", "one.json", "one.json: must be an array of objects, not an object"),
        ("max_tokens: 8", "stream: true", "job.yaml:7: request.stream: a job's answers go to a"),
    ],
)
def test_a_wrong_job_is_refused_in_one_line_and_not_added(
    cli: Cli, right: str, wrong: str, line: str
) -> None:
    write_odd_files(Path("rows.parquet"))
    Path("job.yaml").write_text(JOB_FILE.replace(right, wrong, 1))

    tried = cli("submit", "job.yaml", "--dry-run")
    assert not Path("home").exists()
    refused = cli("submit", "job.yaml")
    assert line in line_of(refused, 2)
    assert tried == refused
    assert json.loads(cli("status", "--json")[1])["jobs"] == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
@pytest.mark.parametrize(
    ("right", "wrong", "line"),
    [
        ("rows.parquet", "shut/in/rows.parquet", "rows.parquet: cannot be read: Permission denied"),
        ("out.parquet", "shut/in/out.jsonl", "job.yaml:8: output.path: "),
    ],
)
def test_a_folder_without_permission_is_told_in_one_line(
    cli: Cli, right: str, wrong: str, line: str
) -> None:
    Path("shut").mkdir(mode=0)
    Path("job.yaml").write_text(JOB_FILE.replace(right, wrong, 1))

    assert line in line_of(cli("submit", "job.yaml", "--dry-run"), 2)


def write_odd_files(rows: Path) -> None:
    """Inputs that cannot be used, and a folder named like an output."""
    for folder in ("folder", "dir.jsonl"):
        Path(folder).mkdir()
    Path("gone").symlink_to("nowhere")
    pq.write_table(pq.read_table(rows).slice(0, 0), "empty.parquet")
    Path("torn.parquet").write_bytes(rows.read_bytes()[:-20])
    Path("text.parquet").write_text("id,text\n1,a\n")
    Path("torn.jsonl").write_text('{"id": "a", "text": "b"}\n{"id": "c", "te')
    Path("rows.xlsx").write_bytes(b"PK")
    Path("torn.json").write_text('[{"id": "a"')
    Path("one.json").write_text('{"id": "a"}')
    Path("other.csv").write_text("id;text\n1;a\n")
    Path("wide.csv").write_text("id,text\n1,a\n", encoding="utf-16")
    Path("torn.csv").write_text("id,text\n1,a,b\n")


def test_without_a_daemon_a_job_can_be_added_and_looked_at(cli: Cli) -> None:
    code, out, err = cli("submit", "job.yaml")
    assert (code, err) == (0, "no daemon runs; the job waits for `batchrun up -d`\n")
    job = out.split()[0]

    assert cli("status", job)[0] == cli("errors", job)[0] == cli("inspect", job)[0] == 0
    line = line_of(cli("results", job), 4)
    assert line.startswith(f"{job} is validating with 0 of 3 rows done; --partial -o PATH writes")
    assert line_of(cli("results", job, "--partial"), 2) == (
        "--partial needs a file to write to: -o PATH, or -o - for stdout"
    )
    assert "would overwrite" in line_of(cli("results", job, "--partial", "-o", "rows.parquet"), 2)
    assert cli("results", job, "--partial", "-o", "part.jsonl")[0] == 0
    assert Path("part.jsonl").read_text() == ""


def test_init_twice_overwrites_nothing(cli: Cli) -> None:
    code, out, _ = cli("init", "my project")
    assert (code, out.splitlines()[-1]) == (
        0,
        "next: cd 'my project' && batchrun run jobs/sample.yaml",
    )
    Path("my project/batchrun.yaml").write_text("model: mine\n")

    assert "batchrun.yaml exists already" in line_of(cli("init", "my project"), 2)
    assert Path("my project/batchrun.yaml").read_text() == "model: mine\n"


def test_doctor_names_everything_that_is_missing_and_how_to_mend_it(
    cli: Cli, shared_fake_engine: ManagedSettings
) -> None:
    port = free_port()
    engines = [
        {"name": "bare", "python": sys.executable, "port": port},
        {"name": "near", "attach": f"{shared_fake_engine.base_url}/v1"},
        {"name": "far", "attach": f"http://127.0.0.1:{free_port()}"},
        {"name": "odd", "command": ["no-such-program"]},
        {"name": "gone", "python": "/no/such/python"},
    ]
    document = {"model": "./absent", "listen": f"127.0.0.1:{free_port()}", "engines": engines}
    Path("batchrun.yaml").write_text(json.dumps(document))
    with socket.create_server(("127.0.0.1", port)):
        code, out, _ = cli("doctor", "--json")

    found = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    missing = {name for name, finding in found.items() if not finding["ok"]}
    assert code == 4
    assert missing - {"home", "memory", "engine bare"} == {
        "port of engine bare",
        "engine far",
        "engine odd",
        "engine gone",
        "model",
    }
    assert all(found[name]["mend"] for name in missing)
    assert found["engine gone"]["mend"].startswith("install vLLM there, or remove `python`")
