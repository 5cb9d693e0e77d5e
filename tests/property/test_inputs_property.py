"""Whatever text the rows hold, every format gives it back, in order and at random."""

from __future__ import annotations

import csv
import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.errors import DataError
from batchrun.jobs.batch import BatchLines
from batchrun.jobs.inputs.input_data import check_ids, open_input
from batchrun.jobs.inputs.rows import Row
from batchrun.jobs.spec import InputSpec

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=40)
CHAT = "/v1/chat/completions"
SPACES = st.text(" \t\r", max_size=9) | st.integers(4_000, 9_000).map(" ".__mul__)
ODD = st.text(" \t\r\v\f\0\x1c\x85\xa0\u2028\ufeff", max_size=6)
VALUES = st.lists(TEXT, min_size=1, max_size=40)


def write_rows(path: Path, rows: list[Row]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), quoting=csv.QUOTE_ALL)
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.csv"])
@settings(max_examples=40, deadline=None)
@given(values=VALUES, picks=st.lists(st.integers(0, 10_000), max_size=20))
def test_rows_come_back_as_they_were_written(
    name: str, values: list[str], picks: list[int]
) -> None:
    rows: list[Row] = [{"id": f"r{i}", "text": text} for i, text in enumerate(values)]
    wanted = [pick % len(rows) for pick in picks]
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder, name), rows)
        with open_input(InputSpec(path=(str(Path(folder, name)),), id="id")) as data:
            check_ids(data)
            in_order = [row for _, part in data.iter_rows(max_bytes=100) for row in part]
            assert in_order == rows
            assert data.read_rows(wanted) == [rows[row] for row in wanted]


def request(custom_id: str) -> str:
    body = {"model": "m", "messages": []}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body})


@settings(max_examples=200, deadline=None)
@given(
    between=st.lists(SPACES | st.lists(SPACES).map("\n".join), min_size=1, max_size=20),
    before=SPACES,
    end=st.sampled_from(["", "\n", "\n  \t  \r", "\n\n"]),
)
def test_a_valid_batch_has_the_requests_that_are_read_of_it(
    between: list[str], before: str, end: str
) -> None:
    ids = [f"r{number}" for number in range(len(between))]
    pairs = zip(between, ids, strict=True)
    lines = [part for blank, name in pairs for part in (blank, before + request(name) + before)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "in.jsonl")
        path.write_text("\n".join(lines) + end, newline="")
        found = BatchLines(CHAT, {"m"})
        found.read(path)
        with open_input(InputSpec(path=(str(path),), format="openai-batch")) as data:
            read = [row["custom_id"] for _, rows in data.iter_rows() for row in rows]
            assert (found.errors, found.num_requests) == ([], data.num_rows)
            assert read == [row["custom_id"] for row in data.read_rows(range(data.num_rows))] == ids


@settings(max_examples=200, deadline=None)
@given(odd=SPACES | ODD)
def test_a_line_is_read_if_it_was_validated_as_one(odd: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "in.jsonl")
        path.write_text(f"{request('a')}\n{odd}\n{request('b')}\n", "utf-8", newline="")
        found = BatchLines(CHAT, {"m"})
        found.read(path)
        try:
            with open_input(InputSpec(path=(str(path),), format="openai-batch")) as data:
                num_read = data.num_rows
        except DataError:
            num_read = None
        assert num_read == (None if found.errors else found.num_requests)
