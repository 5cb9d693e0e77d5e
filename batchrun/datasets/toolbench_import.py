"""The real ToolBench queries: StableToolBench's solvable ones, and ToolBench's evaluation set.

The first are lists of queries with `api_list`; the second are maps from a query's number to its
record with `available_tools` and a recorded answer. A query that occurs again is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from batchrun.datasets.sources import (
    Record,
    as_record,
    find_file,
    json_document,
    require_file,
    text_field,
)
from batchrun.datasets.toolbench_sample import SYSTEM_PROMPT
from batchrun.datasets.writer import Row
from batchrun.errors import DataError

PARTS = (
    "G1_instruction",
    "G1_category",
    "G1_tool",
    "G2_instruction",
    "G2_category",
    "G3_instruction",
)
_SOLVABLE = "solvable_queries/test_instruction"
_EVALUATION = "toolbench/tooleval/results/default_evalset/gpt-3.5-turbo_CoT"
SOLVABLE_FOLDERS = (
    "stabletoolbench",
    _SOLVABLE,
    f"StableToolBench/{_SOLVABLE}",
    "toolbench/stabletoolbench",
)
EVALUATION_FOLDERS = (
    "toolbench_evalset",
    _EVALUATION,
    f"ToolBench/{_EVALUATION}",
    "toolbench/toolbench_evalset",
)


def read_toolbench(source: Path) -> Iterator[Row]:
    """Rows of `source`: a checkout of either project, or a folder that holds both."""
    seen: set[str] = set()
    for path, prefix, tools_key in _files(source):
        for number, record in _records(path):
            where = f"{path}: query {number}"
            query = text_field(record, "query", where)
            if query in seen:
                continue
            seen.add(query)
            tools = record.get(tools_key)
            if not isinstance(tools, list):
                raise DataError(f"{where}: has no list {tools_key!r}")
            part = path.name.partition(".")[0]
            row_id = f"{prefix}-{part}-{number}"
            documentation = json.dumps(tools, ensure_ascii=False)
            yield row_id, SYSTEM_PROMPT, documentation, query, _answer(record)


def _files(source: Path) -> Iterator[tuple[Path, str, str]]:
    """Path, prefix of ids, key of the tools; a collection of which the first part is there."""
    has_evaluation = find_file(source, EVALUATION_FOLDERS, f"{PARTS[0]}.json") is not None
    has_solvable = find_file(source, SOLVABLE_FOLDERS, f"{PARTS[0]}.json") is not None
    if has_solvable or not has_evaluation:
        for part in PARTS:
            yield require_file(source, SOLVABLE_FOLDERS, f"{part}.json"), "solvable", "api_list"
    if has_evaluation:
        for part in PARTS:
            path = require_file(source, EVALUATION_FOLDERS, f"{part}.json")
            yield path, "evaluation", "available_tools"


def _records(path: Path) -> Iterator[tuple[str, Record]]:
    """Number and record of each query, from a list or a map of them."""
    document = json_document(path)
    if isinstance(document, list):
        for index, value in enumerate(document):
            record = as_record(value, f"{path}: entry {index}")
            if "query_id" not in record:
                raise DataError(f"{path}: entry {index}: has no 'query_id'")
            yield str(record["query_id"]), record
        return
    for number, value in as_record(document, str(path)).items():
        yield number, as_record(value, f"{path}: query {number}")


def _answer(record: Record) -> str:
    """The recorded final answer; empty where there is none."""
    answer = record.get("answer")
    final = answer.get("final_answer") if isinstance(answer, dict) else None
    return final if isinstance(final, str) else ""
