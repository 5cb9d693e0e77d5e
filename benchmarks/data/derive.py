"""Derive the committed length tables from the real data sets.

    python -m benchmarks.data.derive FOLDER

FOLDER holds `loogle/`, `qmsum/` and `azure_llm_2023/` with the upstream files, gzip-compressed. No
text is kept, only lengths. Tokens are characters / 4: the LooGLE documents then have 22,602 on
average; table 1 of Echo has prompts of 23,474.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from batchrun.simulator.traces.reading import read_trace
from benchmarks.data import ARRIVALS, DOCUMENTS

CHARACTERS_PER_TOKEN = 4
FROM_S, UNTIL_S = 120.0, 1320.0
"""The part of the trace that is kept; it begins with two slow minutes."""
LOOGLE_FILES = ("shortdep_qa", "longdep_qa", "shortdep_cloze")
QMSUM_FILES = ("qmsum_train", "qmsum_val", "qmsum_test")

LOOGLE_SOURCE = "LooGLE test sample, github.com/bigai-nlco/LooGLE at 6734382, MIT"
QMSUM_SOURCE = "QMSum, github.com/Yale-LILY/QMSum at 83d7768, MIT"
AZURE_SOURCE = (
    "AzureLLMInferenceTrace_conv, github.com/Azure/AzurePublicDataset at b469a11, CC BY 4.0: "
    f"seconds {FROM_S:g} to {UNTIL_S:g}"
)

Document = list[object]
"""[document tokens, [[question tokens, answer tokens], ...]]"""


def main() -> int:
    """Write both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    loogle = _loogle([folder / f"loogle/{name}.jsonl.gz" for name in LOOGLE_FILES])
    qmsum = [d for name in QMSUM_FILES for d in _qmsum(folder / f"qmsum/{name}.jsonl.gz")]
    _write(DOCUMENTS, {"source": [LOOGLE_SOURCE, QMSUM_SOURCE], "loogle": loogle, "qmsum": qmsum})
    trace = folder / "azure_llm_2023/AzureLLMInferenceTrace_conv.csv.gz"
    _write(ARRIVALS, {"source": AZURE_SOURCE, "span_s": UNTIL_S - FROM_S, **_arrivals(trace)})
    return 0


def _loogle(paths: Sequence[Path]) -> list[Document]:
    """Each document once, with its questions of every task.

    `qa_pairs` is the text of a Python literal.
    """
    tokens: dict[str, int] = {}
    questions: dict[str, list[list[int]]] = {}
    for path in paths:
        for record in _records(path):
            title = record["title"]
            tokens[title] = _tokens(record["input"])
            questions.setdefault(title, []).extend(
                [_tokens(pair["Q"]), _tokens(_answer(pair["A"]))]
                for pair in ast.literal_eval(record["qa_pairs"])
            )
    return [[tokens[title], questions[title]] for title in tokens]


def _answer(answer: object) -> str:
    return ", ".join(map(str, answer.values())) if isinstance(answer, dict) else str(answer)


def _qmsum(path: Path) -> Iterator[Document]:
    for record in _records(path):
        turns = (f"{t['speaker']}: {t['content']}" for t in record["meeting_transcripts"])
        queries = record["general_query_list"] + record["specific_query_list"]
        yield [
            _tokens("\n".join(turns)),
            [[_tokens(query["query"]), _tokens(query["answer"])] for query in queries],
        ]


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


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") as lines:
        yield from map(json.loads, lines)


def _tokens(text: str) -> int:
    return max(1, round(len(text) / CHARACTERS_PER_TOKEN))


def _write(path: Path, table: dict[str, object]) -> None:
    fields = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items())
    path.write_text("{\n" + ",\n".join(fields) + "\n}\n")


if __name__ == "__main__":
    raise SystemExit(main())
