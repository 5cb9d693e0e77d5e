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

from batchrun.inputs import Row, check_ids, open_input
from batchrun.jobspec import InputSpec

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=40)
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
