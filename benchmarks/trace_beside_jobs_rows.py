"""What `benchmarks.trace_beside_jobs` sends: a recorded trace's calls with real chat prompts, and
rounds of three jobs of real texts, whose rows have no `max_tokens`.

The tiny model's answers are noise and end by chance: `logit_bias` of its two end tokens makes that
likely enough for answers of some ten tokens, and nobody knows of a row how many.
"""

from __future__ import annotations

import gzip
import json
from ast import literal_eval
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.engine.tiny_model import END_OF_TEXT_ID, TURN_END_ID
from batchrun.samples.generators import SYSTEM_PROMPT
from batchrun.simulator.replay import CallArrival
from batchrun.simulator.traces.reading import read_trace
from batchrun.simulator.traces.trace import scale_time
from benchmarks.forecast import AZURE
from benchmarks.text_jobs import MODEL

CHATS = (
    "chat/ShareGPT_V3_filtered_1000.json.gz",
    "chat/sg_90k_part1_html_cleaned_lang_first_sampled_sorted.json.gz",
)
DOCUMENTS = "loogle/shortdep_qa.jsonl.gz"
CALL_CHARACTERS, ROW_CHARACTERS, SHORT_CHARACTERS = 2_000, 1_200, 400
"""Prompts of calls, of rows behind a system prompt, and of short rows are cut there."""
EXCERPT_CHARACTERS, QUESTIONS = 9_000, 6
BEGIN_S = 600.0
"""The trace is taken from there on: it begins with hardly a call."""
MOST_ANSWER_TOKENS = 400
"""Longer answers of the trace are cut: one of them would be an eighth of the shortest run."""
KINDS = ("documents", "short", "system")

Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class JobKind:
    """A prompt over the columns of its rows; `bias` is that of the end tokens."""

    messages: Sequence[Row]
    bias: float
    num_rows: int


JOBS = {
    "documents": JobKind(
        [{"role": "user", "content": "{{ text }}\n\nQuestion: {{ question }}\nAnswer:"}], 4.5, 150
    ),
    "short": JobKind([{"role": "user", "content": "{{ text }}"}], 3.0, 300),
    "system": JobKind(
        [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "{{ text }}"}],
        3.5,
        200,
    ),
}
"""Rows of a round of the smallest size."""


@dataclass(frozen=True)
class RealTexts:
    """The texts in the folder of data sets."""

    data: Path

    @cached_property
    def chats(self) -> list[str]:
        """The first turns of chats, in an order of no meaning."""
        found: list[str] = []
        for name in CHATS:
            with gzip.open(self.data / name) as file:
                found += [chat["conversations"][0]["value"] for chat in json.load(file)]
        Random(0).shuffle(found)
        return [text for text in found if text.strip()]

    @cached_property
    def documents(self) -> list[tuple[str, list[str]]]:
        """Texts with the questions about them."""
        with gzip.open(self.data / DOCUMENTS) as file:
            lines = [json.loads(line) for line in file]
        return [
            (line["input"], [pair["Q"] for pair in literal_eval(line["qa_pairs"])])
            for line in lines
        ]

    def calls(self, calls_per_s: float, from_s: float, seconds: float) -> list[CallArrival]:
        """The trace at this mean rate, from one instant on; it lasts for four hours at 1 a second.
        Raises DataError beyond."""
        trace = read_trace(self.data / AZURE)
        slowness = trace.rate_per_s / calls_per_s
        slowed = scale_time(trace, slowness)
        begin_s = slowness * BEGIN_S + from_s
        part = slowed.between(begin_s, begin_s + seconds)
        first = int(np.searchsorted(slowed.arrival_s, begin_s))
        prompts = islice(cycle(self.chats), first, None)
        lengths = np.minimum(part.num_output_tokens, MOST_ANSWER_TOKENS).tolist()
        return [
            CallArrival(at_s, prompt[:CALL_CHARACTERS], num_tokens)
            for at_s, prompt, num_tokens in zip(
                part.arrival_s.tolist(), prompts, lengths, strict=False
            )
        ]

    def rows(self, kind: str, number: int, num_rows: int) -> list[Row]:
        """The rows of a round, shuffled; rounds share no prompt, since each names its own."""
        rng = Random(f"{kind} {number}")
        made = self._excerpts(number, rng) if kind == "documents" else self._turns(kind, number)
        rows = [
            {"id": f"{kind}-{number}-{n}", **row} for n, row in enumerate(islice(made, num_rows))
        ]
        rng.shuffle(rows)
        return rows

    def _excerpts(self, number: int, rng: Random) -> Iterator[Row]:
        for place, (text, questions) in enumerate(cycle(self.documents)):
            begin = rng.randrange(max(1, len(text) - EXCERPT_CHARACTERS))
            excerpt = text[begin : begin + EXCERPT_CHARACTERS]
            for question in rng.sample(questions, min(QUESTIONS, len(questions))):
                yield {"text": f"Excerpt {number}-{place}.\n{excerpt}", "question": question}

    def _turns(self, kind: str, number: int) -> Iterator[Row]:
        most = SHORT_CHARACTERS if kind == "short" else ROW_CHARACTERS
        for place, text in enumerate(islice(cycle(self.chats), 131 * number, None)):
            yield {"text": f"{number}-{place}: {text[:most]}"}


@dataclass(frozen=True, slots=True)
class Round:
    """One job of a kind: its files in `folder`, and what its output must hold."""

    folder: Path
    kind: str
    number: int
    num_rows: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number}"

    @property
    def job_file(self) -> Path:
        return self.folder / f"{self.name}.yaml"

    @property
    def input_path(self) -> Path:
        return self.folder / f"{self.name}.parquet"

    @property
    def output_path(self) -> Path:
        return self.folder / f"{self.name}-answers.parquet"

    def write(self, texts: RealTexts) -> None:
        """The rows and the job file."""
        job = JOBS[self.kind]
        rows = texts.rows(self.kind, self.number, self.num_rows)
        pq.write_table(pa.Table.from_pylist(rows), self.input_path)
        bias = {str(token): job.bias for token in (END_OF_TEXT_ID, TURN_END_ID)}
        document = {
            "name": self.name,
            "model": MODEL,
            "input": {"path": self.input_path.name, "id": "id", "messages": job.messages},
            "request": {"temperature": 1, "logit_bias": bias},
            "output": {"path": self.output_path.name},
        }
        self.job_file.write_text(json.dumps(document))

    def account(self) -> dict[str, Any]:
        """Of the output's rows, by id: those missing, those there more than once, those that no
        input row has, and those with an error."""
        table = pq.read_table(self.output_path)
        seen = Counter(table["id"].to_pylist())
        wanted = set(pq.read_table(self.input_path, columns=["id"])["id"].to_pylist())
        return {
            "rows_missing": len(wanted - seen.keys()),
            "rows_repeated": sum(seen.values()) - len(seen),
            "rows_unknown": len(seen.keys() - wanted),
            "rows_failed": sum(error is not None for error in table["error"].to_pylist()),
        }

    def remove(self) -> None:
        """Its files: a run of hours keeps no more than those of the rounds that run."""
        for path in (self.job_file, self.input_path, self.output_path):
            path.unlink(missing_ok=True)
