"""Derive the committed tables from the real data sets.

    python -m benchmarks.data.derive FOLDER

FOLDER holds `loogle/`, `qmsum/` and `azure_llm_2023/` with the upstream files, gzip-compressed, and
`toolbench/` and `nextqa/`, compressed or not. No text is kept: only how long each piece is and
which rows share it. A token is four characters, or for the two tables of shared prefixes four bytes
of UTF-8, the pool's first guess: the LooGLE documents then have 22,602 on average; table 1 of Echo
has prompts of 23,474. Rows stand in the order of the files, texts are put together as
`jobs/toolbench.yaml` and `jobs/nextqa.yaml` do.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from batchrun.jobs.prompts.tokens import DEFAULT_BYTES_PER_TOKEN as PER_TOKEN
from batchrun.samples.generators import SYSTEM_PROMPT
from batchrun.samples.importers import (
    COLUMNS,
    NEXTQA,
    csv_records,
    find_file,
    read_toolbench,
    require_file,
)
from batchrun.simulator.traces.reading import read_trace
from benchmarks.data import ARRIVALS, DOCUMENTS, TOOLS, VIDEOS

FROM_S, UNTIL_S = 120.0, 1320.0
"""The part of the trace that is kept; it begins with two slow minutes."""
LOOGLE_FILES = ("shortdep_qa", "longdep_qa", "shortdep_cloze")
QMSUM_FILES = ("qmsum_train", "qmsum_val", "qmsum_test")
SOURCES: dict[Path, object] = {
    DOCUMENTS: [
        "LooGLE test sample, github.com/bigai-nlco/LooGLE at 6734382, MIT",
        "QMSum, github.com/Yale-LILY/QMSum at 83d7768, MIT",
    ],
    ARRIVALS: "AzureLLMInferenceTrace_conv, github.com/Azure/AzurePublicDataset at b469a11, "
    f"CC BY 4.0: seconds {FROM_S:g} to {UNTIL_S:g}",
    TOOLS: [
        "StableToolBench solvable queries, github.com/THUNLP-MT/StableToolBench at aa4ed9f, "
        "Apache-2.0",
        "ToolBench evaluation set, github.com/OpenBMB/ToolBench at d56fdd8, Apache-2.0",
    ],
    VIDEOS: ["NExT-QA multiple choice, validation set, github.com/doc-doc/NExT-QA at 6b92588, MIT"],
}

Document = tuple[int, list[list[int]]]
"""(document tokens, [[question tokens, answer tokens], ...])"""
Table = dict[str, Any]


def main() -> int:
    """Write all tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    loogle = _loogle([folder / f"loogle/{name}.jsonl.gz" for name in LOOGLE_FILES])
    qmsum = [d for name in QMSUM_FILES for d in _qmsum(folder / f"qmsum/{name}.jsonl.gz")]
    _write(DOCUMENTS, {"loogle": loogle, "qmsum": qmsum})
    trace = folder / "azure_llm_2023/AzureLLMInferenceTrace_conv.csv.gz"
    _write(ARRIVALS, {"span_s": UNTIL_S - FROM_S, **_arrivals(trace)})
    _write(TOOLS, toolbench(folder / "toolbench"))
    _write(VIDEOS, nextqa(folder))
    return 0


def toolbench(folder: Path) -> Table:
    """The tokens of the system prompt and of each distinct tool document, and per row those of the
    query followed by the numbers of its documents in the order of the prompt."""
    documents: dict[str, int] = {}
    rows: list[list[int]] = []
    for _, _, tools, query, _ in read_toolbench(folder):
        texts = [json.dumps(tool, ensure_ascii=False) for tool in json.loads(str(tools))]
        numbers = [documents.setdefault(text, len(documents)) for text in texts]
        rows.append([_tokens(str(query).encode()), *numbers])
    return {
        "system_tokens": _tokens(SYSTEM_PROMPT.encode()),
        "document_tokens": [_tokens(text.encode()) for text in documents],
        "rows": rows,
    }


def nextqa(folder: Path) -> Table:
    """The frames of each video, and per row its video and the tokens of question and options."""
    path = find_file(folder, NEXTQA, "mc_val.csv") or require_file(folder, NEXTQA, "val.csv")
    frames: dict[str, int] = {}
    rows: list[list[int]] = []
    for _, record in csv_records(path, COLUMNS):
        frames.setdefault(record["video"], int(record["frame_count"]))
        options = "\n".join(f"{letter}. {record[f'a{i}']}" for i, letter in enumerate("ABCDE"))
        question = f"Question: {record['question']}?\n{options}\nAnswer with one letter:"
        rows.append([list(frames).index(record["video"]), _tokens(question.encode())])
    return {"frames": list(frames.values()), "rows": rows}


def _loogle(paths: Sequence[Path]) -> list[Document]:
    """Each document once, with its questions of every task.

    `qa_pairs` is the text of a Python literal.
    """
    documents: dict[str, Document] = {}
    for path in paths:
        for record in pl.read_ndjson(path, infer_schema_length=None).iter_rows(named=True):
            document = documents.setdefault(record["title"], (_tokens(record["input"]), []))
            for pair in ast.literal_eval(record["qa_pairs"]):
                answer = pair["A"]
                parts = answer.values() if isinstance(answer, dict) else [answer]
                document[1].append([_tokens(pair["Q"]), _tokens(", ".join(map(str, parts)))])
    return list(documents.values())


def _qmsum(path: Path) -> Iterator[Document]:
    for record in pl.read_ndjson(path, infer_schema_length=None).iter_rows(named=True):
        turns = (f"{t['speaker']}: {t['content']}" for t in record["meeting_transcripts"])
        queries = record["general_query_list"] + record["specific_query_list"]
        lengths = [[_tokens(query["query"]), _tokens(query["answer"])] for query in queries]
        yield _tokens("\n".join(turns)), lengths


def _arrivals(path: Path) -> dict[str, list[int]]:
    """Milliseconds from each call to the one before it, and both lengths."""
    trace = read_trace(path).between(FROM_S, UNTIL_S)
    # Of whole microseconds, as the table was first made.
    arrivals_ms = np.rint(np.floor(1e6 * trace.arrival_s + 0.1) / 1e3).astype(int)
    return {
        "gap_ms": np.diff(arrivals_ms, prepend=0).tolist(),
        "prompt_tokens": trace.num_prompt_tokens.tolist(),
        "output_tokens": trace.num_output_tokens.tolist(),
    }


def _tokens(text: str | bytes) -> int:
    return max(1, round(len(text) / PER_TOKEN))


def _write(path: Path, table: Table) -> None:
    fields = {"source": SOURCES[path], **table}
    lines = (f" {json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in fields.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    raise SystemExit(main())
