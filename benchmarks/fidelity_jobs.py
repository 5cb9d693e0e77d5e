"""The workloads of `benchmarks.fidelity`: three kinds of batch job, each beside its own chats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.samples.generators import TextSource, paragraphs
from batchrun.simulator.replay import CallArrival, TokenRange
from benchmarks.replay import TraceShape, generate_trace

CHAT = TokenRange(mu=4.0, sigma=0.8, min_tokens=8, max_tokens=300)
ANSWER = TokenRange(mu=2.8, sigma=0.5, min_tokens=4, max_tokens=40)

Row = dict[str, str]
Texts = Callable[[TextSource, Random], Iterator[Row]]


@dataclass(frozen=True, slots=True)
class Workload:
    """A job whose rows come from `texts` and have answers of one length, beside chats."""

    name: str
    texts: Texts
    prompt: str
    num_rows: int
    output_tokens: int
    rate_per_s: float
    burst_factor: float

    def arrivals(self, duration_s: float) -> list[CallArrival]:
        """The chats; the same in every repeat."""
        shape = TraceShape(
            duration_s=duration_s,
            rate_per_s=self.rate_per_s,
            burst_factor=self.burst_factor,
            burst_period_s=30.0,
            burst_length_s=5.0,
            prompt=CHAT,
            output=ANSWER,
        )
        return generate_trace(shape, seed=1)

    def write(self, folder: Path) -> Path:
        """The job file in `folder`, and beside it its rows."""
        rows = folder / f"{self.name}.parquet"
        if not rows.exists():
            made = self.texts(TextSource(0), Random(self.name))
            drawn = [row for _, row in zip(range(self.num_rows), made, strict=False)]
            pq.write_table(pa.Table.from_pylist(drawn), rows)
        message = {"role": "user", "content": self.prompt}
        job: dict[str, Any] = {
            "name": self.name,
            "model": "tiny",
            "input": {"path": rows.name, "messages": [message]},
            "request": {"temperature": 0, "ignore_eos": True, "max_tokens": self.output_tokens},
            "output": {"path": f"{self.name}-answers.parquet"},
        }
        path = folder / f"{self.name}.yaml"
        path.write_text(json.dumps(job))
        return path


def _documents(source: TextSource, rng: Random) -> Iterator[Row]:
    """Two questions about each document of about 3,000 tokens."""
    while True:
        document = paragraphs(source.sentences(rng, rng.uniform(2_500, 3_500)))
        for _ in range(2):
            yield {"document": document, "question": " ".join(source.sentences(rng, 40))}


def _texts(source: TextSource, rng: Random) -> Iterator[Row]:
    """Texts of 1,500 to 2,500 tokens, to be judged by one instruction of about 300 tokens."""
    instruction = paragraphs(source.sentences(rng, 300))
    while True:
        text = paragraphs(source.sentences(rng, rng.uniform(1_500, 2_500)))
        yield {"instruction": instruction, "text": text}


def _notes(source: TextSource, rng: Random) -> Iterator[Row]:
    """Notes of 1,000 to 2,000 tokens."""
    while True:
        yield {"note": paragraphs(source.sentences(rng, rng.uniform(1_000, 2_000)))}


def _letters(source: TextSource, rng: Random) -> Iterator[Row]:
    """Letters of 600 to 1,400 tokens that share nothing, each to be answered."""
    while True:
        yield {"letter": paragraphs(source.sentences(rng, rng.uniform(600, 1_400)))}


WORKLOADS = (
    Workload("documents", _documents, "{{ document }}\n\n{{ question }}", 10_000, 32, 0.8, 4.0),
    Workload("reviews", _texts, "{{ instruction }}\n\n{{ text }}", 10_000, 32, 0.5, 2.0),
    Workload("letters", _letters, "{{ letter }}\n\nWrite an answer.", 14_000, 100, 1.0, 3.0),
)
PROBE = Workload("notes", _notes, "{{ note }}\n\nSum it up.", 6_000, 64, 2.0, 2.0)
"""Beside it is measured what calls take longer for real than simulated."""
