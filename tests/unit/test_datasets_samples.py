"""Generated samples: their form, their lengths, and how they are written."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from batchrun.errors import InputError
from batchrun.samples.dataset import SCHEMAS, DatasetName, Scale
from batchrun.samples.generators import sample_plan, write_sample

CHECKOUT = Path(__file__).parents[2]
SHARED_COLUMN = {"loogle": "document", "toolbench": "tools", "nextqa": "video"}
GROUP_COLUMN = {"loogle": "document_id", "toolbench": "tools", "nextqa": "video_id"}

Record = dict[str, str]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


def records(path: Path) -> list[Record]:
    rows: list[Record] = pq.read_table(path).to_pylist()
    return rows


def sample(
    tmp_path: Path, name: DatasetName, *, rows: int | None = None, seed: int = 1
) -> list[Record]:
    path = tmp_path / f"{name}-{rows}-{seed}.parquet"
    write_sample(name, path, rows=rows, seed=seed)
    return records(path)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_sample_has_the_schema_and_unique_ids(tmp_path: Path, name: DatasetName) -> None:
    written = write_sample(name, tmp_path / "a.parquet")
    assert pq.read_schema(written.path).equals(SCHEMAS[name])
    rows = records(written.path)
    assert len({row["id"] for row in rows}) == len(rows) == written.num_rows


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_same_seed_gives_the_same_file(tmp_path: Path, name: DatasetName) -> None:
    first = write_sample(name, tmp_path / "a.parquet", rows=40, seed=5).path
    again = write_sample(name, tmp_path / "b.parquet", rows=40, seed=5).path
    other = write_sample(name, tmp_path / "c.parquet", rows=40, seed=6).path
    assert first.read_bytes() == again.read_bytes()
    assert first.read_bytes() != other.read_bytes()


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_committed_sample_is_small_and_what_the_generator_writes(
    tmp_path: Path, name: DatasetName
) -> None:
    committed = CHECKOUT / "datasets" / f"{name}.parquet"
    assert committed.stat().st_size < 2_000_000
    assert records(committed) == sample(tmp_path, name)


@pytest.mark.parametrize("scale", ["small", "full"])
@pytest.mark.parametrize(("name", "rows"), [("loogle", 90), ("toolbench", 400), ("nextqa", 90)])
def test_texts_have_the_planned_lengths_in_tokens(
    tmp_path: Path, tokenizer: Tokenizer, name: DatasetName, rows: int, scale: Scale
) -> None:
    path = write_sample(name, tmp_path / "a.parquet", scale=scale, rows=rows).path
    plan = sample_plan(name, scale=scale, rows=rows, seed=1)
    texts = {row[GROUP_COLUMN[name]]: row[SHARED_COLUMN[name]] for row in records(path)}
    measured = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(list(texts.values())))
    assert measured == pytest.approx(int(plan.shared_tokens.sum()), rel=0.05)


@pytest.mark.parametrize("name", ["loogle", "nextqa"])
def test_prose_has_about_one_and_a_third_tokens_to_a_word(
    tmp_path: Path, tokenizer: Tokenizer, name: DatasetName
) -> None:
    text = sample(tmp_path, name, rows=1)[0][SHARED_COLUMN[name]]
    assert len(tokenizer.encode(text).ids) / len(text.split()) == pytest.approx(1.33, rel=0.05)


def test_loogle_asks_several_questions_on_each_document(tmp_path: Path) -> None:
    rows = sample(tmp_path, "loogle")
    assert sorted(Counter(row["document_id"] for row in rows).values()) == [8, 8, 8, 8]
    assert len({row["document"] for row in rows}) == 4
    assert [row["document_id"] for row in rows] != sorted(row["document_id"] for row in rows)


def test_loogle_documents_begin_differently_and_hold_the_answers(tmp_path: Path) -> None:
    rows = sample(tmp_path, "loogle", rows=64)
    assert len({row["document"][:40] for row in rows}) == len({row["document"] for row in rows})
    asked = [row for row in rows if row["task"].endswith("_qa")]
    found = [row["answer"] in row["document"] for row in asked]
    assert sum(found) > 0.9 * len(asked) > 0


def test_toolbench_shares_the_system_prompt_and_tool_lists(tmp_path: Path) -> None:
    rows = sample(tmp_path, "toolbench")
    assert len({row["system"] for row in rows}) == 1
    assert len({row["tools"] for row in rows}) == 25
    assert len({row["query"] for row in rows}) == 200
    for row in rows:
        assert {"name", "description", "parameters"} == set(json.loads(row["tools"])[0])


def test_nextqa_has_one_video_text_per_video(tmp_path: Path) -> None:
    videos = defaultdict(set)
    for row in sample(tmp_path, "nextqa"):
        videos[row["video_id"]].add(row["video"])
        assert row["answer"] in "ABCDE"
    assert {len(texts) for texts in videos.values()} == {1}
    assert len({text[:20] for texts in videos.values() for text in texts}) == len(videos) == 25


def test_rows_are_written_in_groups_of_bounded_size(tmp_path: Path) -> None:
    path = write_sample("loogle", tmp_path / "a.parquet", scale="full", rows=400).path
    file = pq.ParquetFile(path)
    sizes = [file.read_row_group(at).nbytes for at in range(file.num_row_groups)]
    assert len(sizes) > 3
    assert max(sizes) < 9 * 2**20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, "give 1 or more"),
        ({"file": "a.csv"}, r"must end in \.parquet"),
        ({"file": "taken/a.parquet"}, "is not a folder"),
    ],
)
def test_bad_arguments_are_one_clear_line(
    tmp_path: Path, arguments: dict[str, object], message: str
) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    values = {"file": "a.parquet", **arguments}
    path = tmp_path / str(values.pop("file"))
    with pytest.raises(InputError, match=message) as caught:
        write_sample("loogle", path, **values)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_progress_ends_with_all_rows(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []

    def sink(stage: str, done: int, total: int) -> None:
        told.append((stage, done, total))

    write_sample("nextqa", tmp_path / "a.parquet", rows=30, progress=sink)
    assert told[-1] == ("writing rows", 30, 30)


@pytest.mark.slow
def test_a_whole_full_scale_loogle_has_the_planned_prompts(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = write_sample("loogle", tmp_path / "a.parquet", scale="full").path
    tokens: dict[str, int] = {}
    prompt_tokens = hit_tokens = num_rows = 0
    for batch in pq.ParquetFile(path).iter_batches(64, columns=["document", "question"]):
        for row in batch.to_pylist():
            known = row["document"] in tokens
            if not known:
                tokens[row["document"]] = len(tokenizer.encode(row["document"]).ids)
            document_tokens = tokens[row["document"]]
            prompt_tokens += document_tokens + len(tokenizer.encode(row["question"]).ids)
            hit_tokens += document_tokens if known else 0
            num_rows += 1
    assert num_rows == 1951
    assert prompt_tokens / num_rows == pytest.approx(23_474, rel=0.05)
    assert hit_tokens / prompt_tokens == pytest.approx(0.91, rel=0.05)
