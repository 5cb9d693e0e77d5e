"""Jobs shaped like LooGLE, ToolBench, NExT-QA and QMSum: lengths counted in the data, random texts.

A row is a path of segments: a document and a question; a system prompt, tool documents and a query;
a video and a question. Rows whose paths begin with the same segments share that prefix token by
token, and no more. The virtual engine's `Job` knows a document and a question: all shared segments
of a row are its document, and documents that begin alike begin with the same tokens, so their
blocks have the same hashes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from batchrun.pool.prefix_keys import IntArray
from benchmarks.data import DOCUMENTS, TOOLS, VIDEOS
from benchmarks.scenarios import Job, JobRow, Order, TokenIds, draw_token_ids

ALL_FOUR = "all four"

JOBS: Mapping[str, Callable[[], Sequence[ShapedJob]]] = {
    "loogle": lambda: [loogle()],
    "toolbench": lambda: [toolbench()],
    "nextqa": lambda: [nextqa(60)],
    "qmsum": lambda: [qmsum(40)],
    ALL_FOUR: lambda: [loogle(), toolbench(), nextqa(30), qmsum(20)],
}
"""What runs at the same time, by name; more rows than the daemon's window holds, and so few that
one core runs them on the virtual engine in under a minute."""


MAX_PREFIX_TOKENS = 32_000
"""A few meetings and videos are longer than the engine's context allows; they are left out."""
TOKENS_PER_FRAME = 8
"""A prompt then has 9,890 tokens on average (deviation 5,960); Preble, table 1: 9,865 (5,976)."""
VIDEO_OUTPUT_TOKENS = 8
"""`max_tokens` of jobs/nextqa.yaml."""
TOOL_OUTPUT_TOKENS = 64
"""`max_tokens` of jobs/toolbench.yaml."""

SegmentRow = tuple[Sequence[int], int, int]
"""(numbers of the shared segments, own tokens, output tokens)."""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTable:
    """The rows of a data set.

    Row i shares the segments `paths[starts[i] : starts[i + 1]]`, outermost first; `tokens[s]` is
    the length of segment s. `own_tokens[i]` follow, and `output_tokens[i]` are generated.
    """

    tokens: IntArray
    paths: IntArray
    starts: IntArray
    own_tokens: IntArray
    output_tokens: IntArray

    @classmethod
    def of(cls, tokens: Sequence[int], rows: Iterable[SegmentRow]) -> SegmentTable:
        """The table of these rows; none whose shared segments exceed `MAX_PREFIX_TOKENS`."""
        kept = [row for row in rows if sum(tokens[s] for s in row[0]) <= MAX_PREFIX_TOKENS]
        paths = [segment for path, _, _ in kept for segment in path]
        ends = np.cumsum([len(path) for path, _, _ in kept])
        own, output = (np.array([row[i] for row in kept], dtype=np.int64) for i in (1, 2))
        starts = np.concatenate(([0], ends))
        return cls(np.array(tokens), np.array(paths), starts, own, output)

    def path(self, row: int) -> tuple[int, ...]:
        """The shared segments of a row."""
        return tuple(self.paths[self.starts[row] : self.starts[row + 1]].tolist())

    @property
    def roots(self) -> IntArray:
        """The outermost segment of each row."""
        roots: IntArray = self.paths[self.starts[:-1]]
        return roots


@dataclass(frozen=True, slots=True, eq=False)
class ShapedJob:
    """A `JobSource`: all rows of a table, or those of `num_roots` outermost segments drawn from it.

    The rows stand in the order of the data set, or shuffled by the seed. `num_copies` data sets of
    these lengths follow each other, each with texts of its own. Jobs of different names share no
    text.
    """

    name: str
    table: SegmentTable
    num_roots: int | None = None
    num_copies: int = 1

    def draw(self, seed: int, order: Order) -> Job:
        """The job of a run."""
        rng = random.Random(f"{self.name} {seed}")
        drawn = self._drawn_rows(rng)
        job = joined([self._draw_copy(drawn, rng) for _ in range(self.num_copies)])
        rows = list(job.rows)
        if order is Order.SHUFFLED:
            rng.shuffle(rows)
        return Job(job.documents, rows)

    def _draw_copy(self, drawn: Sequence[int], rng: random.Random) -> Job:
        texts: dict[int, TokenIds] = {}
        documents: dict[tuple[int, ...], int] = {}
        contents: list[TokenIds] = []
        rows: list[JobRow] = []
        for row in drawn:
            path = self.table.path(row)
            document = documents.setdefault(path, len(documents))
            if document == len(contents):
                contents.append(np.concatenate([self._text(s, texts, rng) for s in path]))
            question = draw_token_ids(rng, int(self.table.own_tokens[row]))
            num_output_tokens = int(self.table.output_tokens[row])
            rows.append(JobRow(len(rows), document, question, num_output_tokens))
        return Job(contents, rows)

    def _drawn_rows(self, rng: random.Random) -> list[int]:
        roots = self.table.roots
        every = np.unique(roots).tolist()
        drawn = every if self.num_roots is None else rng.sample(every, self.num_roots)
        rows: list[int] = np.flatnonzero(np.isin(roots, drawn)).tolist()
        return rows

    def _text(self, segment: int, texts: dict[int, TokenIds], rng: random.Random) -> TokenIds:
        if segment not in texts:
            texts[segment] = draw_token_ids(rng, int(self.table.tokens[segment]))
        return texts[segment]


def loogle(num_copies: int = 1) -> ShapedJob:
    """14 documents of 22,600 tokens on average, 217 questions."""
    return ShapedJob("loogle", _document_table("loogle"), num_copies=num_copies)


def qmsum(num_meetings: int | None = None) -> ShapedJob:
    """230 meetings of 13,300 tokens on average, with about 8 questions each."""
    return ShapedJob("qmsum", _document_table("qmsum"), num_meetings)


def toolbench() -> ShapedJob:
    """1,358 queries below one system prompt; 1,111 lists of the documents of 4,596 tools."""
    table = _read(TOOLS)
    tokens = [table["system_tokens"], *table["document_tokens"]]
    rows = [
        ([0, *(document + 1 for document in documents)], query, TOOL_OUTPUT_TOKENS)
        for query, *documents in table["rows"]
    ]
    return ShapedJob("toolbench", SegmentTable.of(tokens, rows))


def nextqa(num_videos: int | None = None) -> ShapedJob:
    """570 videos with about 9 questions each, whose rows lie apart in the file."""
    table = _read(VIDEOS)
    tokens = [TOKENS_PER_FRAME * frames for frames in table["frames"]]
    rows = [([video], question, VIDEO_OUTPUT_TOKENS) for video, question in table["rows"]]
    return ShapedJob("nextqa", SegmentTable.of(tokens, rows), num_videos)


def prompt_of(job: Job, row: JobRow) -> TokenIds:
    """The token ids of a row's prompt."""
    return np.concatenate((job.documents[row.document], row.question))


def prompts_of(job: Job) -> Iterator[TokenIds]:
    """The prompts of all rows, in their order."""
    return (prompt_of(job, row) for row in job.rows)


def joined(jobs: Sequence[Job]) -> Job:
    """One job of several, the rows of one after those of the other, documents and rows numbered
    again: what an engine sees of jobs that run at the same time."""
    documents: list[TokenIds] = []
    rows: list[JobRow] = []
    for job in jobs:
        first_document, first_row = len(documents), len(rows)
        documents += job.documents
        rows += [
            JobRow(
                first_row + row.number,
                first_document + row.document,
                row.question,
                row.num_output_tokens,
            )
            for row in job.rows
        ]
    return Job(documents, rows)


def picked(job: Job, order: Sequence[int] | IntArray) -> Job:
    """The job with its rows in this order."""
    return Job(job.documents, [job.rows[i] for i in order])


def _document_table(name: str) -> SegmentTable:
    documents = _read(DOCUMENTS)[name]
    rows = [
        ([number], question, output)
        for number, (_, questions) in enumerate(documents)
        for question, output in questions
    ]
    return SegmentTable.of([tokens for tokens, _ in documents], rows)


def _read(path: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(path.read_text())
    return table
