"""`batchrun submit --dry-run` as its user meets it: figures, nothing left, mistakes, ETAs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_call import Cli, cli_in, dry_run_of, line_of
from deployment_rig import JOB_FILE, DeploymentRig

DOCUMENTS, QUESTIONS = 3, 4
MAX_TOKENS = 8
WITH_DEADLINE = JOB_FILE + "deadline: 1s\n"
WITHOUT_VLLM = """
import sys
sys.modules["vllm"] = None
from batchrun.cli.main import main
for arguments in (["--json"], ["--profile", "a100-8b"]):
    sys.argv = ["batchrun", "submit", "job.yaml", "--dry-run", *arguments]
    try:
        main()
    except SystemExit as ended:
        print(ended.code, file=sys.stderr)
"""

Listing = dict[str, tuple[int, int]]


def texts() -> list[str]:
    """Four questions on each of three documents of 4,000 bytes, the documents in turn."""
    documents = [(f"Document {i}. " + f"{i} is what it says. " * 300)[:4_000] for i in range(3)]
    return [documents[i % 3] + f" Question {i} of them all?" for i in range(DOCUMENTS * QUESTIONS)]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Calls the command in a folder with rows and no daemon: (exit code, stdout, stderr)."""
    ids = [f"row-{i}" for i in range(len(texts()))]
    pq.write_table(pa.table({"id": ids, "text": texts()}), tmp_path / "rows.parquet")
    (tmp_path / "job.yaml").write_text(JOB_FILE)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return cli_in(tmp_path, monkeypatch, capsys)


def listing() -> Listing:
    """Every file and folder here, with what would show that it was written to."""
    stats = {str(path): path.stat() for path in Path().rglob("*")}
    return {name: (each.st_mtime_ns, each.st_nlink) for name, each in stats.items()}


def test_rows_tokens_and_hit_rates_are_those_of_the_input(cli: Cli) -> None:
    found = dry_run_of(cli)
    inspected = json.loads(cli("inspect", "job.yaml", "--json")[1])

    assert (found["name"], found["rows"], found["prefix_groups"]) == ("sample", 12, 3)
    assert found["rows_that_cannot_run"] == 0
    assert found["prompt_tokens"] == pytest.approx(sum(map(len, texts())) / 4, rel=0.02)
    assert found["output_tokens"] == 12 * MAX_TOKENS
    assert found["output_tokens_source"] == "the limit in the job file"
    assert found["best_hit_rate"] == pytest.approx(0.75, abs=0.02)
    # Each document is computed once, the questions of every row besides.
    new_bytes = DOCUMENTS * 4_000 + sum(len(text) - 4_000 for text in texts())
    assert found["computed_tokens"] == pytest.approx(new_bytes / 4 + 96, rel=0.15)
    for name in ("best_hit_rate", "expected_hit_rate", "kv_tokens", "output_path"):
        assert found[name] == inspected[name]


def test_without_a_limit_the_answers_are_a_guess_and_said_to_be(cli: Cli) -> None:
    Path("job.yaml").write_text(JOB_FILE.replace("max_tokens: 8", "max_tokens: 4000"))
    found = dry_run_of(cli)

    assert (found["output_tokens"], found["max_output_tokens_a_row"]) == (12 * 128, 4_000)
    _, out, _ = cli("submit", "job.yaml", "--dry-run")
    assert "(128 a row, from a guess, as nothing says how long they are; at most 4,000)" in out


def test_rows_that_cannot_be_rendered_are_counted_and_the_first_is_named(cli: Cli) -> None:
    content = "{{ text[:(900 // (id[4:]|int))] }}"
    Path("job.yaml").write_text(JOB_FILE.replace("{{ text }}", content))
    found = dry_run_of(cli)

    assert (found["rows"], found["rows_that_cannot_run"]) == (12, 1)
    assert found["first_error"].startswith("row 0: ")
    assert found["output_tokens"] == 11 * MAX_TOKENS
    _, out, _ = cli("submit", "job.yaml", "--dry-run")
    assert "rows that cannot be rendered and will fail: 1; first: row 0: " in out


def test_nothing_is_left_behind(cli: Cli) -> None:
    before = listing()
    assert cli("submit", "job.yaml", "--dry-run")[0] == 0
    assert listing() == before
    assert not Path("home").exists()

    assert cli("submit", "job.yaml")[0] == 0
    with_a_job = listing()
    assert cli("submit", "job.yaml", "--dry-run")[0] == 0
    assert listing() == with_a_job
    assert len(json.loads(cli("status", "--json")[1])["jobs"]) == 1


def test_the_json_is_flat(cli: Cli) -> None:
    found = dry_run_of(cli)
    assert not [name for name, value in found.items() if isinstance(value, dict | list)]
    assert (found["eta_s"], found["eta_source"], found["deadline_s"]) == (None, None, None)
    assert (found["engine_hours"], found["cost_alone"], found["is_deadline_kept"]) == (None,) * 3


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--dry-run --wait", "--dry-run submits nothing to wait for; leave out --wait"),
        ("--dry-run --strict", "--dry-run submits nothing to wait for; leave out --strict"),
        ("--dry-run --continue-from x", "--dry-run does not tell what --continue-from would take"),
        ("--price 1", "--price says what --dry-run is to assume; give --dry-run too"),
        ("--trace a.csv", "--trace says what --dry-run is to assume"),
        ("--dry-run --price dear", "--price 'dear': must be PRICE or PRICExGPUS, such as 1.80"),
        ("--dry-run --home rows.parquet", "rows.parquet: cannot be the home (it is a file)"),
        ("--dry-run --home job.yaml/home", "job.yaml/home: cannot be the home (Not a directory)"),
    ],
)
def test_a_wrong_call_is_one_line(cli: Cli, options: str, line: str) -> None:
    assert line in line_of(cli("submit", "job.yaml", *options.split()), 2)
    assert not Path("home").exists()


def test_without_daemon_trace_and_profile_the_eta_is_unknown(cli: Cli) -> None:
    Path("job.yaml").write_text(WITH_DEADLINE)
    code, out, err = cli("submit", "job.yaml", "--dry-run", "--price", "2")

    assert (code, err) == (0, "")
    for words in (
        "sample, /v1/chat/completions; it was not submitted",
        "unknown: no daemon runs; one that has run offline work knows the pace, and --trace TRACE",
        "1 s: whether it is kept is unknown",
        "on engines of its own unknown: --profile PROFILE simulates it",
    ):
        assert words in out


def test_without_vllm_all_but_the_simulation_is_told(cli: Cli, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_VLLM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    assert json.loads(done.stdout)["rows"] == 12
    first, line, last = done.stderr.strip().splitlines()
    assert (first, last) == ("0", "4")
    assert "vLLM cannot be imported here" in line


@pytest.mark.slow
def test_a_daemon_without_a_pace_says_so_and_nothing_reaches_it(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    rig.write_rows(texts())
    rig.write_job(WITH_DEADLINE)
    rig.ask("up", "-d")
    found = rig.ask("submit", "job.yaml", "--dry-run")

    assert (found["eta_s"], found["is_deadline_kept"]) == (None, None)
    assert found["eta_rests_on"].startswith("the daemon has seen no offline work of this model")
    assert rig.ask("status")["jobs"] == []
    assert list((rig.home / "inputs").iterdir()) == []


@pytest.mark.nightly  # The pace is known once engines were full for a quarter of a minute.
def test_a_daemon_with_a_pace_tells_when_jobs_will_be_done_and_what_they_cost(
    rig: DeploymentRig,
) -> None:
    rig.use_fake_engine("--latency-s=0.2", window={"requests": 2})
    many = rig.submit_rows(*(f"{i} {text}" for i, text in enumerate(texts() * 40)))
    early = rig.wait_for(many, lambda view: view["num_completed"] > 0)
    view = rig.wait_for(many, lambda view: view["eta_low_s"] is not None)
    line = " ".join(rig.call("status").stdout.split())
    rig.write_rows([f"{i} {text}" for i, text in enumerate(texts() * 10)], "few.parquet")
    rig.write_job(WITH_DEADLINE.replace("rows.parquet", "few.parquet"), "few.yaml")

    found = rig.ask("submit", "few.yaml", "--dry-run", "--price", "1.5x2")
    rig.ask("offline", "off")
    off = rig.wait_for(many, lambda view: view["num_in_flight"] == 0)
    shown = rig.call("submit", "few.yaml", "--dry-run").stdout
    rig.ask("cancel", many)

    assert early["eta_low_s"] is early["eta_high_s"] is off["eta_low_s"] is None
    assert 0 < view["eta_low_s"] < view["eta_s"] < view["eta_high_s"]
    assert re.search(r"\d+m\d\ds \(\d+m\d\ds to \d+m\d\ds\)", line)
    assert found["eta_source"] == "daemon"
    assert 0 <= found["eta_low_s"] <= found["eta_s"] <= found["eta_high_s"]
    # Rows take 0.2 s, and two run at once: 120 take 12 s, and the deadline is after 1 s.
    assert (found["deadline_s"], found["is_deadline_kept"]) == (1.0, False)
    assert "1 job running now" in found["eta_rests_on"]
    for words in (
        "on 1 engine",
        "missed by",
        "beside today's load",
        "offline work is switched off",
    ):
        assert words in shown
    assert (found["engine_hours_source"], found["gpus_per_engine"]) == ("daemon", 2)
    assert found["gpu_hours"] == pytest.approx(2 * found["engine_hours"])
    assert found["cost_alone"] == pytest.approx(1.5 * found["gpu_hours"])
    assert len(rig.ask("status")["jobs"]) == 1
