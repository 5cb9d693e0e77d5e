"""Inputs that cannot be used: one clear line, no job, and nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_call import Cli, cli_in, line_of
from deployment_rig import JOB_FILE, DeploymentRig

LONG = "x" * 100_000_000


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Calls the command in an empty folder."""
    return cli_in(tmp_path, monkeypatch, capsys)


def write_truncated() -> None:
    write_rows({"id": ["a", "b"], "text": ["1", "2"]})
    path = Path("rows.parquet")
    path.write_bytes(path.read_bytes()[:-20])


def latin_1(*values: bytes) -> pa.Array:
    """A text column with bytes that are no UTF-8."""
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values).buffers())


def write_rows(columns: dict[str, object], *, group_rows: int = 1_000) -> None:
    pq.write_table(pa.table(columns), "rows.parquet", row_group_size=group_rows)


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "truncated": (write_truncated, "rows.parquet: the Parquet file is cut short"),
    "magic": (
        lambda: Path("rows.parquet").write_bytes(b"PK\x03\x04" + bytes(200)),
        "rows.parquet: not a Parquet file (it does not start",
    ),
    "type": (
        lambda: write_rows({
            "id": ["a"],
            "text": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        }),
        "rows.parquet: column 'text' has type",
    ),
    "bytes": (
        lambda: write_rows({"id": ["a"], "text": [b"\x00\x01"]}),
        "row 0: a value is bytes, not text",
    ),
    "UTF-8": (
        lambda: write_rows({"id": ["a"], "text": latin_1(b"caf\xe9")}),
        "row 0: column 'text' is not valid UTF-8",
    ),
    "UTF-8 of an id": (
        lambda: write_rows({"id": latin_1(b"caf\xe9"), "text": ["1"]}),
        "row 0: the id (column 'id') is not valid UTF-8",
    ),
    "100 MB": (
        lambda: write_rows({"id": ["a", "b"], "text": ["short", LONG]}),
        "rows.parquet: row 1 holds over 64 MiB",
    ),
    "no rows": (
        lambda: write_rows({"id": pa.array([], pa.string()), "text": pa.array([], pa.string())}),
        "rows.parquet: the input has no rows",
    ),
    "ids of two row groups": (
        lambda: write_rows({"id": ["a", "b", "c", "a"], "text": list("1234")}, group_rows=2),
        "row 3: id 'a' (column 'id') is also the id of ",
    ),
}
"""How each input is made, and what the line says."""


@pytest.mark.parametrize("name", BAD)
def test_a_bad_input_is_one_line_and_adds_nothing(cli: Cli, name: str) -> None:
    write, line = BAD[name]
    write()
    Path("job.yaml").write_text(JOB_FILE)

    assert line in line_of(cli("submit", "job.yaml"), 2)

    assert json.loads(cli("status", "--json")[1])["jobs"] == []
    assert list(Path("home", "inputs").glob("*")) == []
    assert not Path("out.parquet").exists()


def test_a_line_of_100_mb_is_refused_with_its_number(cli: Cli) -> None:
    row = json.dumps({"id": "b", "text": LONG})
    Path("rows.jsonl").write_text(f'{{"id": "a", "text": "short"}}\n{row}\n')
    Path("job.yaml").write_text(JOB_FILE.replace("rows.parquet", "rows.jsonl"))

    assert "rows.jsonl:2: " in line_of(cli("submit", "job.yaml"), 2)


def test_a_file_of_1000_columns_is_read_by_those_that_are_used(cli: Cli) -> None:
    others = {f"column {i}": ["?"] for i in range(998)}
    write_rows({"id": ["a"], "text": ["1"], **others})
    Path("job.yaml").write_text(JOB_FILE)

    assert cli("submit", "job.yaml")[0] == 0
    assert len(json.loads(cli("status", "--json")[1])["jobs"]) == 1


def test_a_template_that_renders_to_nothing_is_refused(cli: Cli) -> None:
    write_rows({"id": ["a", "b"], "text": ["", " "]})
    Path("job.yaml").write_text(JOB_FILE)

    line = line_of(cli("submit", "job.yaml"), 2)

    assert line == (
        "row 0, and all of the first 2 rows: the prompt is empty (a user message without content)"
    )


@pytest.mark.nightly
@pytest.mark.slow
def test_one_row_that_is_not_utf_8_fails_alone(rig: DeploymentRig) -> None:
    table = pa.table({"id": ["a", "b"], "text": latin_1(b"good", b"caf\xe9")})
    pq.write_table(table, rig.folder / "rows.parquet")
    rig.use_fake_engine()
    rig.write_job(JOB_FILE.replace("keep: [text]", "keep: []"))

    rig.ask("up", "-d")
    view = rig.wait_until_ended(str(rig.ask("submit", "job.yaml")["id"]))

    assert (view["state"], view["num_completed"], view["num_failed"]) == ("completed", 1, 1)
    assert "column 'text' is not valid UTF-8" in str(rig.output()[1]["error"])
