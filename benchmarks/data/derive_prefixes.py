"""Derive the committed tables of shared prefixes from ToolBench and NExT-QA.

    python -m benchmarks.data.derive_prefixes FOLDER

FOLDER holds `toolbench/` and `nextqa/` with the upstream files, gzip-compressed or not. No text is
kept: only how long each piece of a prompt is and which rows share it. A token is four bytes of
UTF-8, the pool's first guess. Rows stand in the order of the files, texts are put together as
`jobs/toolbench.yaml` and `jobs/nextqa.yaml` do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from batchrun.jobs.prompts.tokens import DEFAULT_BYTES_PER_TOKEN as BYTES_PER_TOKEN
from batchrun.samples.generators import SYSTEM_PROMPT
from batchrun.samples.importers import csv_records, find_file, read_toolbench, require_file

TOOLS = Path(__file__).parent / "toolbench_prefixes.json"
VIDEOS = Path(__file__).parent / "nextqa_prefixes.json"

TOOL_SOURCES = (
    "StableToolBench solvable queries, github.com/THUNLP-MT/StableToolBench at aa4ed9f, Apache-2.0",
    "ToolBench evaluation set, github.com/OpenBMB/ToolBench at d56fdd8, Apache-2.0",
)
VIDEO_SOURCES = (
    "NExT-QA multiple choice, validation set, github.com/doc-doc/NExT-QA at 6b92588, MIT",
)
VIDEO_COLUMNS = ("video", "frame_count", "question", "a0", "a1", "a2", "a3", "a4")
VIDEO_FOLDERS = ("", "dataset/nextqa", "nextqa")

Rows = list[list[int]]


def main() -> int:
    """Write both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    _write(TOOLS, TOOL_SOURCES, toolbench(folder / "toolbench"))
    _write(VIDEOS, VIDEO_SOURCES, nextqa(folder))
    return 0


def toolbench(folder: Path) -> dict[str, int | list[int] | Rows]:
    """The tokens of the system prompt and of each distinct tool document, and per row those of the
    query followed by the numbers of its documents in the order of the prompt."""
    documents: dict[str, int] = {}
    rows: Rows = []
    for _, _, tools, query, _ in read_toolbench(folder):
        texts = [json.dumps(tool, ensure_ascii=False) for tool in json.loads(str(tools))]
        numbers = [documents.setdefault(text, len(documents)) for text in texts]
        rows.append([_tokens(str(query)), *numbers])
    return {
        "system_tokens": _tokens(SYSTEM_PROMPT),
        "document_tokens": [_tokens(text) for text in documents],
        "rows": rows,
    }


def nextqa(folder: Path) -> dict[str, int | list[int] | Rows]:
    """The frames of each video, and per row its video and the tokens of question and options."""
    path = find_file(folder, VIDEO_FOLDERS, "mc_val.csv") or require_file(
        folder, VIDEO_FOLDERS, "val.csv"
    )
    videos: dict[str, int] = {}
    frames: list[int] = []
    rows: Rows = []
    for _, record in csv_records(path, VIDEO_COLUMNS):
        number = videos.setdefault(record["video"], len(videos))
        if number == len(frames):
            frames.append(int(record["frame_count"]))
        rows.append([number, _tokens(_question(record))])
    return {"frames": frames, "rows": rows}


def _question(record: dict[str, str]) -> str:
    options = "\n".join(f"{letter.upper()}. {record[f'a{i}']}" for i, letter in enumerate("abcde"))
    return f"Question: {record['question']}?\n{options}\nAnswer with one letter:"


def _tokens(text: str) -> int:
    return max(1, round(len(text.encode()) / BYTES_PER_TOKEN))


def _write(path: Path, sources: Sequence[str], table: dict[str, int | list[int] | Rows]) -> None:
    fields = {"source": list(sources), **table}
    lines = (f" {json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in fields.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    raise SystemExit(main())
