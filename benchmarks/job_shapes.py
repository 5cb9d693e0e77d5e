"""Jobs shaped like LooGLE, ToolBench, NExT-QA and QMSum: lengths counted in the data, random texts.

A row is a path of segments: a document and a question; a system prompt, tool documents and a query;
a video and a question. Rows whose paths begin with the same segments share that prefix token by
token, and no more. In a `Job` all shared segments of a row are its document.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from batchrun.pool.prefix_keys import IntArray
from benchmarks.data import DOCUMENTS, TOOLS, VIDEOS
from benchmarks.scenarios import Job, JobRow, Order, TokenIds, draw_token_ids, read_table

ALL_FOUR = "all four"

JOBS: Mapping[str, Callable[[], Sequence[ShapedJob]]] = {
    "loogle": lambda: [document_job("loogle")],
    "toolbench": lambda: [toolbench()],
    "nextqa": lambda: [nextqa(60)],
    "qmsum": lambda: [document_job("qmsum", 40)],
    ALL_FOUR: lambda: [document_job("loogle"), toolbench(), nextqa(30), document_job("qmsum", 20)],
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

SegmentRow = tuple[tuple[int, ...], int, int]
"""(numbers of the shared segments, outermost first; own tokens that follow; output tokens)."""


@dataclass(frozen=True, slots=True, eq=False)
class ShapedJob:
    """The rows of a data set, or those of `num_roots` outermost segments drawn from it.

    `tokens[s]` is the length of segment s. The rows stand in the order of the data set, or shuffled
    by the seed. Jobs of different names share no text.
    """

    name: str
    tokens: Sequence[int]
    rows: Sequence[SegmentRow]
    num_roots: int | None = None

    def draw(self, seed: int, order: Order) -> Job:
        """The job of a run; no rows whose shared segments exceed `MAX_PREFIX_TOKENS`."""
        rng = random.Random(f"{self.name} {seed}")
        documents: dict[tuple[int, ...], int] = {}
        texts: dict[int, TokenIds] = {}
        contents: list[TokenIds] = []
        rows: list[JobRow] = []
        for path, own_tokens, output_tokens in self._drawn_rows(rng):
            document = documents.setdefault(path, len(documents))
            if document == len(contents):
                for segment in path:
                    if segment not in texts:
                        texts[segment] = draw_token_ids(rng, self.tokens[segment])
                contents.append(np.concatenate([texts[segment] for segment in path]))
            question = draw_token_ids(rng, own_tokens)
            rows.append(JobRow(len(rows), document, question, output_tokens))
        if order is Order.SHUFFLED:
            rng.shuffle(rows)
        return Job(contents, rows)

    def _drawn_rows(self, rng: random.Random) -> list[SegmentRow]:
        tokens = self.tokens
        rows = [row for row in self.rows if sum(tokens[s] for s in row[0]) <= MAX_PREFIX_TOKENS]
        if self.num_roots is None:
            return rows
        roots = rng.sample(sorted({path[0] for path, _, _ in rows}), self.num_roots)
        return [row for row in rows if row[0][0] in roots]


def toolbench() -> ShapedJob:
    """1,358 queries below one system prompt; 1,111 lists of the documents of 4,596 tools."""
    table = read_table(TOOLS)
    tokens = [table["system_tokens"], *table["document_tokens"]]
    rows = [
        ((0, *(document + 1 for document in documents)), query, TOOL_OUTPUT_TOKENS)
        for query, *documents in table["rows"]
    ]
    return ShapedJob("toolbench", tokens, rows)


def nextqa(num_videos: int | None = None) -> ShapedJob:
    """570 videos with about 9 questions each, whose rows lie apart in the file."""
    table = read_table(VIDEOS)
    tokens = [TOKENS_PER_FRAME * frames for frames in table["frames"]]
    rows = [((video,), question, VIDEO_OUTPUT_TOKENS) for video, question in table["rows"]]
    return ShapedJob("nextqa", tokens, rows, num_videos)


def document_job(name: str, num_roots: int | None = None) -> ShapedJob:
    """`loogle`: 14 documents of 22,600 tokens on average, 217 questions; `qmsum`: 230 meetings of
    13,300 tokens on average, with about 8 questions each."""
    documents = read_table(DOCUMENTS)[name]
    rows = [
        ((number,), question, output)
        for number, (_, questions) in enumerate(documents)
        for question, output in questions
    ]
    return ShapedJob(name, [tokens for tokens, _ in documents], rows, num_roots)


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
        first, first_row = len(documents), len(rows)
        documents += job.documents
        rows += [
            replace(row, number=first_row + row.number, document=first + row.document)
            for row in job.rows
        ]
    return Job(documents, rows)


def picked(job: Job, order: Sequence[int] | IntArray) -> Job:
    """The job with its rows in this order."""
    return Job(job.documents, [job.rows[i] for i in order])
