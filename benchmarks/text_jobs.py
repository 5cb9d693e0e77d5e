"""Batch jobs of generated text for the tiny model: a Parquet file of rows and a job file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.samples.generators import TextSource, paragraphs

MODEL = "tiny"

Row = dict[str, str]
Texts = Callable[[TextSource, Random], Iterator[Row]]


@dataclass(frozen=True, slots=True)
class TextJob:
    """A job whose rows come from `texts`, drawn by its name, and have answers of one length."""

    name: str
    texts: Texts
    prompt: str
    num_rows: int
    output_tokens: int

    def write(self, folder: Path) -> Path:
        """The job file in `folder`, and beside it its rows."""
        rows = folder / f"{self.name}.parquet"
        if not rows.exists():
            drawn = islice(self.texts(_source(), Random(self.name)), self.num_rows)
            pq.write_table(pa.Table.from_pylist(list(drawn)), rows)
        job = {
            "name": self.name,
            "model": MODEL,
            "input": {"path": rows.name, "messages": [{"role": "user", "content": self.prompt}]},
            "request": {"temperature": 0, "ignore_eos": True, "max_tokens": self.output_tokens},
            "output": {"path": f"{self.name}-answers.parquet"},
        }
        path = folder / f"{self.name}.yaml"
        path.write_text(json.dumps(job))
        return path


@cache
def _source() -> TextSource:
    return TextSource(0)


def documents(source: TextSource, rng: Random) -> Iterator[Row]:
    """Two questions about each document of about 3,000 tokens."""
    while True:
        document = paragraphs(source.sentences(rng, rng.uniform(2_500, 3_500)))
        for _ in range(2):
            yield {"document": document, "question": " ".join(source.sentences(rng, 40))}


def reviews(source: TextSource, rng: Random) -> Iterator[Row]:
    """Texts of 1,500 to 2,500 tokens, to be judged by one instruction of about 300 tokens."""
    instruction = paragraphs(source.sentences(rng, 300))
    while True:
        text = paragraphs(source.sentences(rng, rng.uniform(1_500, 2_500)))
        yield {"instruction": instruction, "text": text}


def texts(column: str, least_tokens: int, most_tokens: int) -> Texts:
    """Texts of so many tokens, in that column, that share nothing."""

    def rows(source: TextSource, rng: Random) -> Iterator[Row]:
        while True:
            sentences = source.sentences(rng, rng.uniform(least_tokens, most_tokens))
            yield {column: paragraphs(sentences)}

    return rows


@dataclass(frozen=True, slots=True)
class DocumentSet:
    """Questions about documents, shuffled. The pair is the bounds of a uniform draw."""

    num_documents: int = 30
    document_tokens: tuple[int, int] = (6_000, 12_000)
    num_questions: int = 8
    output_tokens: int = 16

    def job(self, name: str) -> TextJob:
        """The set of that name: other names have other texts."""
        prompt = "{{ document }}\n\nQuestion: {{ question }}\nAnswer:"
        num_rows = self.num_documents * self.num_questions
        return TextJob(name, self._rows, prompt, num_rows, self.output_tokens)

    def _rows(self, source: TextSource, rng: Random) -> Iterator[Row]:
        rows: list[Row] = []
        for _ in range(self.num_documents):
            document = paragraphs(source.sentences(rng, rng.uniform(*self.document_tokens)))
            for _ in range(self.num_questions):
                rows.append({"document": document, "question": source.sentences(rng, 1)[0]})
        rng.shuffle(rows)
        return iter(rows)
