"""The real LooGLE files: `{task}.jsonl`, one document with all its questions a line.

`qa_pairs` is a string that holds a Python literal, not JSON; the answer to a cloze is a map.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from batchrun.datasets.sources import Record, as_record, json_lines, require_file, text_field
from batchrun.datasets.writer import Row
from batchrun.errors import DataError

TASKS = ("shortdep_qa", "longdep_qa", "shortdep_cloze")
LOOGLE = ("", "LooGLE-testdata", "loogle")
CLOZE_QUESTION = "What are the masked entities?"


def read_loogle(source: Path) -> Iterator[Row]:
    """Rows of `source`, a LooGLE checkout or a folder with the files themselves."""
    files = [(task, require_file(source, LOOGLE, f"{task}.jsonl")) for task in TASKS]
    numbers: dict[str, int] = {}
    for task, path in files:
        for line, record in json_lines(path):
            where = f"{path}:{line}"
            document = text_field(record, "input", where)
            title = text_field(record, "title", where)
            number = numbers.setdefault(document, len(numbers))
            pairs = _pairs(text_field(record, "qa_pairs", where), where)
            for index, pair in enumerate(pairs):
                question, answer = _question(pair, task, where), _loogle_answer(pair, where)
                row_id, document_id = f"{task}-{line:03}-{index:03}", f"document-{number:03}"
                yield row_id, document_id, title, document, question, answer, task


def _pairs(text: str, where: str) -> list[Record]:
    try:
        pairs = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise DataError(f"{where}: qa_pairs is not a Python list of questions") from error
    if not isinstance(pairs, list):
        raise DataError(f"{where}: qa_pairs is not a Python list of questions")
    return [as_record(pair, f"{where}: a question in qa_pairs") for pair in pairs]


def _question(pair: Record, task: str, where: str) -> str:
    question = text_field(pair, "Q", where)
    return f"{question} {CLOZE_QUESTION}" if task == "shortdep_cloze" else question


def _loogle_answer(pair: Record, where: str) -> str:
    answer = pair.get("A")
    if isinstance(answer, dict):
        return json.dumps(answer, ensure_ascii=False)
    return text_field(pair, "A", where)
