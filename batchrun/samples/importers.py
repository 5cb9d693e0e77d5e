"""The files of the real data sets, plain or gzip-compressed, as rows of the generated ones' schema.

- LooGLE: `{task}.jsonl`, one document with all its questions a line; `qa_pairs` is a string that
  holds a Python literal, not JSON; the answer to a cloze is a map.
- NExT-QA: the multiple-choice questions of the validation set. It has annotations only: the text of
  a video is generated, and its length goes with the video's number of frames.
- ToolBench: StableToolBench's solvable queries (lists, with `api_list`) and ToolBench's evaluation
  set (maps from a number to a record with `available_tools` and an answer). A query that occurs
  again is left out.

Errors name file and line.
"""

from __future__ import annotations

import ast
import csv
import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import TextIO

from batchrun.errors import DataError, InputError, shortened
from batchrun.samples.dataset import SCHEMAS, DatasetName, Row, WrittenDataset, write_rows
from batchrun.samples.generators import LETTERS, SYSTEM_PROMPT, TextSource, video_text
from batchrun.types import ProgressSink

MAX_LINE_CHARACTERS = 64 * 2**20
MAX_JSON_CHARACTERS = 512 * 2**20
MAX_DIGITS = 18

Record = dict[str, object]


def find_file(source: Path, folders: Sequence[str], name: str) -> Path | None:
    """`name` or `name`.gz in the first of `folders` below `source` that has it."""
    places = (source / folder / file for folder in folders for file in (name, f"{name}.gz"))
    return next((place for place in places if place.is_file()), None)


def require_file(source: Path, folders: Sequence[str], name: str) -> Path:
    """Like `find_file`; a DataError that tells where it was looked for when it is nowhere."""
    if not source.is_dir():
        raise DataError(f"{source}: is not a folder; name the one that holds the data set's files")
    found = find_file(source, folders, name)
    if found is None:
        places = " or ".join(str(Path(folder) / name) for folder in folders)
        raise DataError(f"{source}: has no {places} (nor with .gz); is it the right folder?")
    return found


def json_lines(path: Path) -> Iterator[tuple[int, Record]]:
    """Line number (from 1) and object of every line of a JSON Lines file."""
    with _opened(path) as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_CHARACTERS), ""), 1):
            if line.strip():
                yield number, as_record(_parsed(line, path, number), f"{path}:{number}")


def json_document(path: Path) -> object:
    """The one JSON value of a file."""
    with _opened(path) as file:
        text = file.read(MAX_JSON_CHARACTERS + 1)
    if len(text) > MAX_JSON_CHARACTERS:
        raise DataError(f"{path}: is larger than {MAX_JSON_CHARACTERS} characters")
    return _parsed(text, path, 1)


def csv_records(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and record of every row of a CSV file that must have `columns`."""
    with _opened(path) as file:
        reader = csv.DictReader(file, strict=True)
        try:
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise DataError(f"{path}:1: has no column {missing[0]!r}; is it the right file?")
            for record in reader:
                if None in record or None in record.values():
                    raise DataError(
                        f"{path}:{reader.line_num}: has not as many fields as the header"
                    )
                yield reader.line_num, record
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: is not CSV: {error}") from error


def text_field(record: Record, key: str, where: str) -> str:
    """The string at `key`; a DataError that begins with `where` when it is not there."""
    value = record.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where}: has no text {key!r}")
    return value


def as_record(value: object, where: str) -> Record:
    """`value` as a JSON object; a DataError that begins with `where` when it is none."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: is not a JSON object")
    return value


def json_text(value: object, where: str) -> str:
    """`value` as JSON; a DataError that begins with `where` when it has none."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: cannot be written as JSON: {error}") from error


def whole_row(where: str, *texts: str) -> Row:
    """The texts as a row; a DataError that begins with `where` when one holds half a character."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: holds half of a character: {error.reason}") from error
    return texts


def _parsed(text: str, path: Path, first_line: int) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise DataError(f"{path}:{line}: is not JSON: {error.msg}") from error
    except ValueError as error:
        raise DataError(f"{path}:{first_line}: cannot be read: {error}") from error
    except RecursionError as error:
        raise DataError(f"{path}:{first_line}: is nested too deeply") from error


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """The text of a file; whatever is wrong with its bytes is a DataError."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        # utf-8-sig: some of the CSV files begin with a byte order mark.
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text: {error.reason}") from error
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path}: is not a whole gzip file: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


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
                question, answer = text_field(pair, "Q", where), pair.get("A")
                if task == "shortdep_cloze":
                    question = f"{question} {CLOZE_QUESTION}"
                if isinstance(answer, dict):
                    answer = json_text(answer, where)
                else:
                    answer = text_field(pair, "A", where)
                row_id, document_id = f"{task}-{line:03}-{index:03}", f"document-{number:03}"
                row = row_id, document_id, title, document, question, answer, task
                yield whole_row(where, *row)


def _pairs(text: str, where: str) -> list[Record]:
    try:
        pairs = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pairs = None
    if not isinstance(pairs, list):
        raise DataError(f"{where}: qa_pairs is not a Python list of questions")
    return [as_record(pair, f"{where}: a question in qa_pairs") for pair in pairs]


COLUMNS = ("video", "frame_count", "question", "answer", "qid", "a0", "a1", "a2", "a3", "a4")
NEXTQA = ("", "dataset/nextqa", "nextqa")
LONG_VIDEO_FRAMES = 2_000
SEED = 1


def read_nextqa(source: Path, *, video_tokens: int) -> Iterator[Row]:
    """Rows of `source`, a NExT-QA checkout or a folder with `mc_val.csv` or `val.csv`.

    A video of 2,000 frames or more becomes `video_tokens` tokens, a shorter one fewer in
    proportion.
    """
    path = find_file(source, NEXTQA, "mc_val.csv") or require_file(source, NEXTQA, "val.csv")
    texts = TextSource(SEED)

    @lru_cache(maxsize=256)
    def video(video_id: str, num_frames: int) -> str:
        num_tokens = video_tokens * min(1.0, num_frames / LONG_VIDEO_FRAMES)
        return video_text(video_id, num_tokens, Random(f"{SEED} video {video_id}"), texts)

    for line, record in csv_records(path, COLUMNS):
        where = f"{path}:{line}"
        num_frames = _number(record, "frame_count", where)
        answer = _number(record, "answer", where)
        if answer >= len(LETTERS):
            raise DataError(f"{where}: answer is {answer}, not a number from 0 to 4")
        video_id = record["video"]
        options = (record[f"a{number}"] for number in range(len(LETTERS)))
        row_id = f"{video_id}-{record['qid']}"
        text = video(video_id, num_frames)
        yield row_id, video_id, text, record["question"], *options, LETTERS[answer]


def _number(record: dict[str, str], key: str, where: str) -> int:
    if not record[key].isdecimal() or len(record[key]) > MAX_DIGITS:
        raise DataError(f"{where}: {key} is {shortened(record[key])!r}, not a number")
    return int(record[key])


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
            row_id = f"{prefix}-{path.name.partition('.')[0]}-{number}"
            documentation = json_text(tools, where)
            answer = record.get("answer")
            final = answer.get("final_answer") if isinstance(answer, dict) else None
            answered = final if isinstance(final, str) else ""
            yield whole_row(where, row_id, SYSTEM_PROMPT, documentation, query, answered)


def _files(source: Path) -> Iterator[tuple[Path, str, str]]:
    """Path, prefix of ids, key of the tools; a collection of which the first part is there."""
    evaluation = EVALUATION_FOLDERS, "evaluation", "available_tools"
    solvable = SOLVABLE_FOLDERS, "solvable", "api_list"
    there = [
        each for each in (solvable, evaluation) if find_file(source, each[0], f"{PARTS[0]}.json")
    ]
    for folders, prefix, tools_key in there or [solvable]:
        for part in PARTS:
            yield require_file(source, folders, f"{part}.json"), prefix, tools_key


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


def import_dataset(
    name: DatasetName,
    source: Path,
    target: Path,
    *,
    limit: int | None = None,
    video_tokens: int = 512,
    progress: ProgressSink | None = None,
) -> WrittenDataset:
    """Write the real data set `name`, found in the folder `source`, to the Parquet file `target`.

    `source` is a checkout of the data set's home repository or a folder with its files, plain or
    gzip-compressed. `limit` keeps the first rows only. `video_tokens` is the length of a long
    video's stand-in (NExT-QA only). Raises DataError, with file and line, for a folder or record
    that is not as expected, and InputError for other bad arguments.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit: {limit} is not a number of rows; give 1 or more")
    if video_tokens < 1:
        raise InputError(f"video_tokens: {video_tokens} is not a length; give 1 or more")
    readers: dict[DatasetName, Callable[[Path], Iterator[Row]]] = {
        "loogle": read_loogle,
        "toolbench": read_toolbench,
        "nextqa": partial(read_nextqa, video_tokens=video_tokens),
    }
    rows = islice(readers[name](source), None if limit is None else min(limit, sys.maxsize))
    return write_rows(target, SCHEMAS[name], rows, progress=progress)
