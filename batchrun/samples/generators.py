"""Generated data sets: text of our own in the shape of the real ones.

Long texts are drawn from sentences made once. LooGLE is several questions on one long document,
NExT-QA multiple-choice questions on one video (prose stands in for the video's tokens), ToolBench
one system prompt, tool documentation and a query.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import NamedTuple

from batchrun.errors import InputError
from batchrun.samples.dataset import (
    PROSE_BYTES_PER_TOKEN,
    SCHEMAS,
    SHAPES,
    SHUFFLED_GROUPS,
    TOOL_BYTES_PER_TOKEN,
    DatasetName,
    Row,
    SamplePlan,
    Scale,
    WrittenDataset,
    plan_sample,
    write_rows,
)
from batchrun.samples.prose import fill, person_name, place_name, sentence_pool, tool_json
from batchrun.types import ProgressSink

NUM_SENTENCES = 8_192
NUM_TOOLS = 2_048
PARAGRAPH_SENTENCES = 7


class TextSource:
    """Sentences and tools to draw from. The same seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self._sentences = sentence_pool(Random(f"{seed} sentences"), NUM_SENTENCES)
        rng = Random(f"{seed} tools")
        self._tools = [tool_json(rng) for _ in range(NUM_TOOLS)]

    def sentences(self, rng: Random, num_tokens: float) -> list[str]:
        """Sentences of `num_tokens` tokens in all, to the nearest sentence; at least one."""
        return _take(rng, self._sentences, num_tokens * PROSE_BYTES_PER_TOKEN)

    def tool_list(self, rng: Random, num_tokens: float) -> str:
        """A JSON list of tools of about `num_tokens` tokens; at least one tool."""
        tools = _take(rng, self._tools, num_tokens * TOOL_BYTES_PER_TOKEN)
        return "[" + ", ".join(tools) + "]"


def paragraphs(sentences: list[str]) -> str:
    """One text of the sentences, with a blank line after every seventh."""
    starts = range(0, len(sentences), PARAGRAPH_SENTENCES)
    return "\n\n".join(" ".join(sentences[at : at + PARAGRAPH_SENTENCES]) for at in starts)


def _take(rng: Random, pool: list[str], size_bytes: float) -> list[str]:
    """Random items of `pool` whose sizes, one separator each, add up to nearly `size_bytes`."""
    drawn: list[str] = []
    total_bytes = 0
    while not drawn or total_bytes < size_bytes:
        some = rng.choices(pool, k=max(4, int(size_bytes - total_bytes) // 64))
        drawn += some
        total_bytes += sum(map(len, some)) + len(some)
    ends = list(accumulate(len(item) + 1 for item in drawn))
    count = bisect_left(ends, size_bytes)
    before = ends[count - 1] if count else 0
    if ends[count] - size_bytes < size_bytes - before:
        count += 1
    return drawn[: max(1, count)]


TITLES = ("The {noun} of {{place}}", "{adj} {nouns} in {{place}}", "How {{place}} came to {verb}")
CLOZE_TOKENS = 300
FACTS = (
    ("{person} opened the {noun} at {place} in {year}.", "Who opened the {noun} at {place}?"),
    ("{person} led the {noun} of {place} until {year}.", "Who led the {noun} of {place}?"),
    ("It was {person} who paid for the {noun} in {place}.", "Who paid for the {noun} in {place}?"),
)
"""A statement that is put into the document, and the question that it answers."""


class _Question(NamedTuple):
    evidence: str
    question: str
    answer: str
    task: str


SUMMARY = _Question("", "Write a short summary of the text.", "", "longdep_summarization")


def loogle_rows(plan: SamplePlan, source: TextSource) -> Iterator[Row]:
    """Rows in the order of the plan; a document is made once per window of the plan."""

    @lru_cache(maxsize=SHUFFLED_GROUPS)
    def document(group: int) -> tuple[str, str, list[_Question]]:
        return _document(plan, source, group)

    for group, number, _ in plan.rows():
        title, text, questions = document(group)
        row_id, document_id = f"loogle-{group:05}-{number:03}", f"document-{group:05}"
        _, question, answer, task = questions[number]
        yield row_id, document_id, title, text, question, answer, task


def _document(plan: SamplePlan, source: TextSource, group: int) -> tuple[str, str, list[_Question]]:
    """(title, text, questions) of a document."""
    rng = Random(f"{plan.seed} document {group}")
    place = f"{place_name(rng)} {group + 1}"
    title = fill(rng.choice(TITLES), rng).format(place=place)
    title = title[0].upper() + title[1:]
    questions = [_question(rng, source) for _ in range(int(plan.group_rows[group]))]
    if len(questions) == 1:
        questions = [SUMMARY]
    sentences = source.sentences(rng, float(plan.shared_tokens[group]))
    for question in questions:
        if question.evidence:
            sentences[rng.randrange(len(sentences))] = question.evidence
    return title, f"{title}\n\n{paragraphs(sentences)}", questions


def _question(rng: Random, source: TextSource) -> _Question:
    if rng.random() < 0.45:
        return _cloze(rng, source)
    person, place, year = person_name(rng), place_name(rng), rng.randint(1620, 2020)
    statement, question = rng.choice(FACTS)
    noun = fill("{noun}", rng)
    values = {"person": person, "place": place, "year": year, "noun": noun}
    task = rng.choice(("shortdep_qa", "longdep_qa"))
    return _Question(statement.format(**values), question.format(**values), person, task)


def _cloze(rng: Random, source: TextSource) -> _Question:
    people = {f"<mask-{number}>": person_name(rng) for number in range(rng.randint(1, 3))}
    facts = [fill(f"{mask} {{past}} the {{noun}} of {{place}}.", rng) for mask in people]
    text = " ".join(facts + source.sentences(rng, CLOZE_TOKENS - 20 * len(facts)))
    evidence = facts[0].replace("<mask-0>", people["<mask-0>"])
    question = f"{text} What are the masked entities?"
    return _Question(evidence, question, json.dumps(people), "shortdep_cloze")


QUESTIONS = (
    "why did the {adj} {noun} {verb} the {noun} {prep} the {noun}",
    "what does the {noun} do after the {noun} has {past} the {adj} {noun}",
    "how do the {nouns} {verb} the {noun} at the end of the video",
)
OPTION = "{verb} the {adj} {noun} {prep} the {noun}"
LETTERS = "ABCDE"


def nextqa_rows(plan: SamplePlan, source: TextSource) -> Iterator[Row]:
    """Rows in the order of the plan; a video is made once per window of the plan."""

    @lru_cache(maxsize=SHUFFLED_GROUPS)
    def video(group: int) -> str:
        rng = Random(f"{plan.seed} video {group}")
        return video_text(f"{group:05}", float(plan.shared_tokens[group]), rng, source)

    for group, number, _ in plan.rows():
        rng = Random(f"{plan.seed} question {group} {number}")
        yield (
            f"nextqa-{group:05}-{number:03}",
            f"video-{group:05}",
            video(group),
            fill(rng.choice(QUESTIONS), rng),
            *(fill(OPTION, rng) for _ in LETTERS),
            rng.choice(LETTERS),
        )


def video_text(video_id: str, num_tokens: float, rng: Random, source: TextSource) -> str:
    """A text of about `num_tokens` tokens that no other `video_id` begins with."""
    return f"video {video_id}\n\n{paragraphs(source.sentences(rng, num_tokens))}"


OPENINGS = (
    "I am working on a {noun} for {place} and need your help.",
    "My {noun} would like to {verb} a {adj} {noun} next week.",
    "We plan to {verb} the {nouns} of {person}.",
)
REQUESTS = (
    "Please find the {noun} and tell me which {nouns} are {adj}.",
    "Can you {verb} the {noun} and list {number} {nouns} for me?",
)

SYSTEM_PROMPT = """\
You are an assistant that solves tasks with the tools that are listed below. Each tool is \
described in JSON: its name, what it does, and the parameters that it takes. Read the task, \
decide which tools you need, and call them one at a time. Give every required parameter and no \
parameter that the tool does not know. If a call fails, read the error and try another way; \
never make the same call twice. If no tool can help, say so and explain what is missing. Use \
only what the tools return and what the user wrote; do not invent facts. Begin each step with \
a short thought about what is known so far and what is still to be found out. Then write the \
name of the tool and its arguments as one JSON object. When you have all that the user asked \
for, finish with a complete answer in plain words. These are the tools that you may use:"""
"""The same for every row, generated or imported."""


def toolbench_rows(plan: SamplePlan, source: TextSource) -> Iterator[Row]:
    """Rows in the order of the plan; a tool list is made once per window of the plan."""

    @lru_cache(maxsize=SHUFFLED_GROUPS)
    def tools(group: int) -> str:
        rng = Random(f"{plan.seed} tools {group}")
        return source.tool_list(rng, float(plan.shared_tokens[group]))

    for group, number, tail_tokens in plan.rows():
        rng = Random(f"{plan.seed} query {group} {number}")
        opening, request = fill(rng.choice(OPENINGS), rng), fill(rng.choice(REQUESTS), rng)
        context = source.sentences(rng, tail_tokens - 35)
        query = " ".join((opening, *context, request))
        yield f"toolbench-{group:06}-{number:04}", SYSTEM_PROMPT, tools(group), query, ""


ROW_MAKERS = {"loogle": loogle_rows, "toolbench": toolbench_rows, "nextqa": nextqa_rows}


def write_sample(
    name: DatasetName,
    path: Path,
    *,
    scale: Scale = "small",
    rows: int | None = None,
    seed: int = 1,
    progress: ProgressSink | None = None,
) -> WrittenDataset:
    """Write a generated sample of the data set `name` to the Parquet file `path`.

    `scale` "full" has the sizes of Preble's table 1, "small" is for a CPU; `rows` changes the
    number of rows and leaves their lengths. The same arguments give the same rows. Memory does
    not grow with the size of the file. Raises InputError.
    """
    plan = sample_plan(name, scale=scale, rows=rows, seed=seed)
    made = ROW_MAKERS[name](plan, TextSource(seed))
    return write_rows(
        path, SCHEMAS[name], made, total_rows=len(plan.tail_tokens), progress=progress
    )


def sample_plan(name: DatasetName, *, scale: Scale, rows: int | None, seed: int) -> SamplePlan:
    """The sizes of the rows that `write_sample` with the same arguments writes."""
    if rows is not None and rows < 1:
        raise InputError(f"rows: {rows} is not a number of rows; give 1 or more")
    shape = SHAPES[name, scale]
    return plan_sample(shape, num_rows=rows or shape.num_rows, seed=seed)
