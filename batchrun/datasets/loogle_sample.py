"""Generated LooGLE: several questions on one long document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from batchrun.datasets.plan import SHUFFLED_GROUPS, SamplePlan
from batchrun.datasets.texts import TextSource, paragraphs
from batchrun.datasets.writer import Row
from batchrun.prose import fill, person_name, place_name

TITLES = ("The {noun} of {{place}}", "{adj} {nouns} in {{place}}", "How {{place}} came to {verb}")
CLOZE_TOKENS = 300
FACTS = (
    ("{person} opened the {noun} at {place} in {year}.", "Who opened the {noun} at {place}?"),
    ("{person} led the {noun} of {place} until {year}.", "Who led the {noun} of {place}?"),
    ("It was {person} who paid for the {noun} in {place}.", "Who paid for the {noun} in {place}?"),
)
"""A statement that is put into the document, and the question that it answers."""


@dataclass(frozen=True, slots=True)
class _Question:
    evidence: str
    question: str
    answer: str
    task: str


@dataclass(frozen=True, slots=True)
class _Document:
    title: str
    text: str
    questions: list[_Question]


def loogle_rows(plan: SamplePlan, source: TextSource) -> Iterator[Row]:
    """Rows in the order of the plan; a document is made once per window of the plan."""

    @lru_cache(maxsize=SHUFFLED_GROUPS)
    def document(group: int) -> _Document:
        return _document(plan, source, group)

    for row in plan.rows():
        found = document(row.group)
        asked = found.questions[row.index]
        yield (
            f"loogle-{row.group:05}-{row.index:03}",
            f"document-{row.group:05}",
            found.title,
            found.text,
            asked.question,
            asked.answer,
            asked.task,
        )


def _document(plan: SamplePlan, source: TextSource, group: int) -> _Document:
    rng = Random(f"{plan.seed} document {group}")
    place = f"{place_name(rng)} {group + 1}"
    title = fill(rng.choice(TITLES), rng).format(place=place)
    title = title[0].upper() + title[1:]
    questions = [_question(rng, source) for _ in range(int(plan.group_rows[group]))]
    if len(questions) == 1:
        questions = [_summary()]
    sentences = source.sentences(rng, float(plan.shared_tokens[group]))
    for question in questions:
        if question.evidence:
            sentences[rng.randrange(len(sentences))] = question.evidence
    return _Document(title, f"{title}\n\n{paragraphs(sentences)}", questions)


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


def _summary() -> _Question:
    return _Question("", "Write a short summary of the text.", "", "longdep_summarization")
