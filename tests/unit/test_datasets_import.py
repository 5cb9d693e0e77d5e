"""Importers: both layouts of each data set, and one line for everything that is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchrun.errors import DataError, InputError
from batchrun.samples.dataset import SCHEMAS, DatasetName
from batchrun.samples.importers import PARTS, import_dataset

QA = [{"Q": "Who?", "A": "Mara's son", "S": "It was Mara's son."}]
CLOZE = [{"Q": "<mask-0> came.", "A": {"<mask-0>": "Ana"}, "S": "Ana came."}]
CSV_HEADER = "video,frame_count,width,height,question,answer,qid,type,a0,a1,a2,a3,a4\n"
CSV_ROWS = "77,2000,640,480,why,0,6,CH,a,b,c,d,e\n77,2000,640,480,how,4,7,CH,a,b,c,d,e\n"

LONG_NUMBER = "9" * 5_000
SURROGATE = '{"8": {"query": "q", "api_list": ["\\ud83d"]}}'

Record = dict[str, str]


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)


def loogle_line(pairs: object, *, title: str = "T", text: str = "A long text.") -> str:
    record = {"input": text, "title": title, "qa_pairs": str(pairs), "output": "none"}
    return json.dumps(record) + "\n"


def put_loogle(folder: Path, suffix: str = "") -> None:
    put(folder / f"shortdep_qa.jsonl{suffix}", loogle_line(QA) + loogle_line(QA * 2, text="B"))
    put(folder / f"longdep_qa.jsonl{suffix}", loogle_line(QA))
    put(folder / f"shortdep_cloze.jsonl{suffix}", loogle_line(CLOZE, text="C"))


def put_solvable(folder: Path, suffix: str = "") -> None:
    for number, part in enumerate(PARTS):
        query = {"query": f"Q{number % 5}", "query_id": number, "api_list": [{"api_name": part}]}
        put(folder / f"{part}.json{suffix}", json.dumps([query]))


def put_evaluation(folder: Path, suffix: str = "") -> None:
    for number, part in enumerate(PARTS):
        query = {
            "query": f"Q{number + 3}",
            "available_tools": [{"name": part}],
            "answer": {"final_answer": f"A{number}"},
        }
        put(folder / f"{part}.json{suffix}", json.dumps({str(number): query}))


def imported(name: DatasetName, source: Path, *, limit: int | None = None) -> list[Record]:
    target = source.parent / f"{name}-imported.parquet"
    import_dataset(name, source, target, limit=limit)
    assert pq.read_schema(target).equals(SCHEMAS[name])
    rows: list[Record] = pq.read_table(target).to_pylist()
    return rows


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


@pytest.mark.parametrize(("folder", "suffix"), [("", ".gz"), ("LooGLE-testdata", "")])
def test_loogle_gives_one_row_per_question(source: Path, folder: str, suffix: str) -> None:
    put_loogle(source / folder, suffix)
    rows = imported("loogle", source)
    assert [row["task"] for row in rows] == ["shortdep_qa"] * 3 + ["longdep_qa", "shortdep_cloze"]
    assert len({row["id"] for row in rows}) == 5
    assert rows[0]["document_id"] == rows[3]["document_id"] != rows[1]["document_id"]
    assert (rows[0]["document"], rows[0]["answer"]) == ("A long text.", "Mara's son")
    assert json.loads(rows[4]["answer"]) == {"<mask-0>": "Ana"}


@pytest.mark.parametrize(
    ("folders", "suffix"),
    [
        (("stabletoolbench", "toolbench_evalset"), ".gz"),
        (
            (
                "StableToolBench/solvable_queries/test_instruction",
                "ToolBench/toolbench/tooleval/results/default_evalset/gpt-3.5-turbo_CoT",
            ),
            "",
        ),
    ],
)
def test_toolbench_gives_every_query_once(
    source: Path, folders: tuple[str, str], suffix: str
) -> None:
    put_solvable(source / folders[0], suffix)
    put_evaluation(source / folders[1], suffix)
    rows = imported("toolbench", source)
    assert [row["query"] for row in rows] == [f"Q{number}" for number in range(9)]
    assert json.loads(rows[0]["tools"]) == [{"api_name": "G1_instruction"}]
    assert (rows[0]["answer"], rows[-1]["answer"]) == ("", "A5")
    assert len({row["id"] for row in rows}) == 9


def test_a_checkout_of_one_toolbench_project_is_enough(source: Path) -> None:
    put_evaluation(source / "toolbench/tooleval/results/default_evalset/gpt-3.5-turbo_CoT")
    assert len(imported("toolbench", source)) == 6


@pytest.mark.parametrize("file", ["mc_val.csv.gz", "dataset/nextqa/val.csv"])
def test_nextqa_gives_questions_with_a_stand_in_for_the_video(source: Path, file: str) -> None:
    put(source / file, CSV_HEADER + CSV_ROWS)
    rows = imported("nextqa", source)
    assert [row["id"] for row in rows] == ["77-6", "77-7"]
    assert [row["answer"] for row in rows] == ["A", "E"]
    assert rows[0]["video"] == rows[1]["video"]
    assert rows[0]["a4"] == "e"


def test_a_video_is_as_long_as_its_frames_say(source: Path) -> None:
    other = CSV_ROWS.replace("77,2000", "78,200")
    put(source / "mc_val.csv", CSV_HEADER + CSV_ROWS + other)
    target = source.parent / "a.parquet"
    import_dataset("nextqa", source, target, video_tokens=2_000)
    sizes = [len(text) for text in pq.read_table(target)["video"].to_pylist()]
    assert sizes[0] == pytest.approx(2_000 * 4.28, rel=0.05)
    assert sizes[2] == pytest.approx(200 * 4.28, rel=0.2)


def test_a_limit_keeps_the_first_rows(source: Path) -> None:
    put_loogle(source)
    assert len(imported("loogle", source, limit=2)) == 2
    assert len(imported("loogle", source, limit=10**30)) == 5


@pytest.mark.parametrize(
    ("name", "file", "text", "message"),
    [
        ("loogle", "longdep_qa.jsonl", "{]\n", r"longdep_qa\.jsonl:1: is not JSON"),
        ("loogle", "longdep_qa.jsonl", loogle_line(QA) + "[]\n", r"jsonl:2: is not a JSON object"),
        ("loogle", "longdep_qa.jsonl", loogle_line("f()"), r"jsonl:1: qa_pairs is not"),
        ("loogle", "longdep_qa.jsonl", loogle_line([{"A": "x"}]), r"jsonl:1: has no text 'Q'"),
        ("loogle", "longdep_qa.jsonl", '{"title": "T"}\n', r"jsonl:1: has no text 'input'"),
        ("nextqa", "mc_val.csv", "video,qid\n", r"mc_val\.csv:1: has no column 'frame_count'"),
        ("nextqa", "mc_val.csv", CSV_HEADER + "1,2\n", r"csv:2: has not as many fields"),
        ("nextqa", "mc_val.csv", CSV_HEADER + CSV_ROWS.replace(",0,6", ",9,6"), "answer is 9"),
        ("nextqa", "mc_val.csv", CSV_HEADER + CSV_ROWS.replace("2000", "many"), "frame_count is"),
        ("toolbench", "stabletoolbench/G1_tool.json", "{\n!", r"G1_tool\.json:2: is not JSON"),
        (
            "loogle",
            "longdep_qa.jsonl",
            loogle_line(QA, text="\ud83d"),
            "jsonl:1: holds half of a c",
        ),
        ("loogle", "longdep_qa.jsonl", loogle_line([QA[0] | {"A": {"a": {1}}}]), "jsonl:1: cannot"),
        ("loogle", "longdep_qa.jsonl", f'{{"input": {LONG_NUMBER}}}\n', "jsonl:1: cannot be read"),
        ("nextqa", "mc_val.csv", CSV_HEADER + CSV_ROWS.replace("2000", LONG_NUMBER), "frame_count"),
        ("toolbench", "stabletoolbench/G1_tool.json", SURROGATE, "query 8: holds half of a char"),
        ("toolbench", "stabletoolbench/G1_tool.json", "[{}]", "entry 0: has no 'query_id'"),
        ("toolbench", "stabletoolbench/G1_tool.json", '{"8": {}}', "query 8: has no text 'query'"),
    ],
)
def test_a_bad_record_is_one_line_with_file_and_place(
    source: Path, name: DatasetName, file: str, text: str, message: str
) -> None:
    put_loogle(source)
    put_solvable(source / "stabletoolbench")
    put(source / file, text)
    with pytest.raises(DataError, match=message) as caught:
        imported(name, source)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in source.parent.iterdir()] == ["source"]


@pytest.mark.parametrize("name", ["loogle", "toolbench", "nextqa"])
def test_a_wrong_folder_is_named_with_what_it_lacks(source: Path, name: DatasetName) -> None:
    with pytest.raises(DataError, match="is it the right folder"):
        imported(name, source)
    with pytest.raises(DataError, match="is not a folder"):
        imported(name, source / "missing")


def test_a_missing_part_of_toolbench_is_named(source: Path) -> None:
    put_solvable(source / "stabletoolbench")
    (source / "stabletoolbench" / "G2_category.json").unlink()
    with pytest.raises(DataError, match=r"G2_category\.json"):
        imported("toolbench", source)


def test_a_file_that_is_cut_short_is_one_clear_line(source: Path) -> None:
    put_loogle(source, ".gz")
    path = source / "longdep_qa.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(DataError, match=r"longdep_qa\.jsonl\.gz: is not a whole gzip file"):
        imported("loogle", source)


def test_bytes_that_are_not_text_are_one_clear_line(source: Path) -> None:
    (source / "mc_val.csv").write_bytes(b"video,\xff\xfe\n")
    with pytest.raises(DataError, match=r"mc_val\.csv: is not UTF-8"):
        imported("nextqa", source)


def test_an_import_that_fails_keeps_the_file_that_was_there(source: Path) -> None:
    target = source.parent / "a.parquet"
    put_loogle(source)
    import_dataset("loogle", source, target)
    before = target.read_bytes()
    put(source / "shortdep_cloze.jsonl", "{}\n")
    with pytest.raises(DataError):
        import_dataset("loogle", source, target)
    assert target.read_bytes() == before


@pytest.mark.parametrize("options", [{"limit": 0}, {"video_tokens": 0}])
def test_options_below_one_are_refused(source: Path, options: dict[str, int]) -> None:
    with pytest.raises(InputError, match="give 1 or more"):
        import_dataset("nextqa", source, source / "a.parquet", **options)  # type: ignore[arg-type]
