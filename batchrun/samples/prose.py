"""Plausible English out of word lists: the same seed gives the same text, on every machine.

Sentences, made-up documentation of web tools in the JSON form of function-calling prompts, and the
4 MB of text on which the tiny model's tokenizer is trained. Nothing here comes from a third party.
A `random.Random` is handed in; its stream is stable between Python versions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import TypeVar

from batchrun.samples import words

_Item = TypeVar("_Item")

SENTENCES = (
    "The {adj} {noun} {past} the {noun} {prep} the {adj} {noun}.",
    "It was not the {noun} but the {noun} that {past} the {adj} {nouns} of the {noun}.",
    "Who would {verb} a {noun} that has {past} every {noun} {prep} the {noun}?",
    "If the {nouns} do not {verb} the {noun}, then all of them will {verb} some other {noun}.",
    "{person} {past} the {noun} because the {nouns} were too {adj} for the {noun}.",
    "According to {person}, the {noun} should {verb} the {nouns} before the {noun} is {past}.",
    "Most of the {nouns} had {adverb} been {past} when the {adj} {noun} came to {place}.",
    "While the {nouns} {past} the {noun}, {person} wrote that the {noun} was {adj}.",
    "After {number} {counted}, the {adj} {noun} was {past} and the {nouns} went home.",
    "The {noun} and its {nouns} are still {adj}, although they have been {past} since {year}.",
    "She {past} them {adverb}; he had {past} his {noun} for more than {number} {counted}.",
    "This {noun} is one of the {adj} {nouns} that the {noun} from {place} could {verb}.",
    "They were {ing} {prep} the {noun} with about {number} {counted} of {adj} {nouns}.",
    '"We have {past} what you {past}," said {person}, "but there is only one {adj} {noun}."',
    "For many {nouns} it can be {adj} to {verb} more than {number} {nouns} at the same time.",
    "There were {number} {counted} between the {noun} and the {adj} {noun} at {place}.",
    "In {year} the {noun} of {place} {past} a {adj} {noun}, and {person} {past} it {adverb}.",
    "Both {person} and {person} {past} to {verb} the {noun}, which cost {number} {counted}.",
)


def skewed(rng: Random, items: tuple[_Item, ...]) -> _Item:
    """One item, the first ones more often, as words are used in a language."""
    return items[int(len(items) * rng.random() ** 3)]


@cache
def past_tense(verb: str) -> str:
    """The past tense of a regular verb."""
    if verb.endswith("e"):
        return verb + "d"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    return verb + "ed"


@cache
def ing_form(verb: str) -> str:
    """The present participle of a regular verb."""
    ends_in_silent_e = verb.endswith("e") and not verb.endswith("ee")
    return (verb[:-1] if ends_in_silent_e else verb) + "ing"


@cache
def plural(noun: str) -> str:
    """The plural of a regular noun."""
    if noun in {"people", "sheep", "fish", "cattle", "police", "software", "evidence", "music"}:
        return noun
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def person_name(rng: Random) -> str:
    """A made-up first and last name."""
    first = skewed(rng, words.NAME_STARTS) + skewed(rng, words.PERSON_ENDS)
    last = skewed(rng, words.NAME_STARTS) + skewed(rng, words.NAME_MIDDLES)
    return f"{first} {last}{skewed(rng, words.PERSON_ENDS)}"


def place_name(rng: Random) -> str:
    """A made-up place."""
    start = skewed(rng, words.NAME_STARTS) + skewed(rng, words.NAME_MIDDLES)
    return start + skewed(rng, words.PLACE_ENDS)


SLOTS: dict[str, Callable[[Random], str]] = {
    "noun": lambda rng: skewed(rng, words.NOUNS),
    "nouns": lambda rng: plural(skewed(rng, words.NOUNS)),
    "adj": lambda rng: skewed(rng, words.ADJECTIVES),
    "verb": lambda rng: skewed(rng, words.VERBS),
    "past": lambda rng: past_tense(skewed(rng, words.VERBS)),
    "ing": lambda rng: ing_form(skewed(rng, words.VERBS)),
    "adverb": lambda rng: skewed(rng, words.ADVERBS),
    "prep": lambda rng: rng.choice(words.PREPOSITIONS),
    "person": person_name,
    "place": place_name,
    "counted": lambda rng: rng.choice(words.COUNTED),
    "year": lambda rng: str(rng.randint(1620, 2020)),
    "number": lambda rng: str(rng.randint(2, 900)),
}
"""What fills a slot of a template."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Every look-up draws a fresh word."""

    rng: Random

    def __getitem__(self, slot: str) -> str:
        return SLOTS[slot](self.rng)


def fill(template: str, rng: Random) -> str:
    """`template` with a fresh word in every `{slot}`; an unknown slot is a KeyError."""
    return template.format_map(_Drawn(rng))


def sentence(rng: Random) -> str:
    """One sentence, of about 19 words."""
    return fill(skewed(rng, SENTENCES), rng)


def sentence_pool(rng: Random, num_sentences: int) -> list[str]:
    """Sentences to build long texts from quickly (about 30,000 a second)."""
    return [sentence(rng) for _ in range(num_sentences)]


DESCRIPTIONS = (
    "Find every {noun} that was {past} {prep} the {adj} {noun}.",
    "Return the {adj} {noun} of a {noun}, with its {nouns} and the {noun} they belong to.",
    "Search the {nouns} by {noun}; at most {number} {counted} are listed.",
    "Use this to {verb} a {noun}. It does not {verb} the {adj} {nouns}.",
    "Get the {noun} and all {nouns} for the given {noun}, sorted by {noun}.",
)
TYPES = ("string", "string", "number", "boolean")


def _parameter(rng: Random) -> dict[str, str]:
    return {
        "type": rng.choice(TYPES),
        "description": fill(rng.choice(DESCRIPTIONS), rng),
        "example_value": skewed(rng, words.NOUNS),
    }


def tool(rng: Random) -> dict[str, object]:
    """One function: name, description, parameters; about 190 tokens as JSON."""
    topic = f"{skewed(rng, words.ADJECTIVES)}_{skewed(rng, words.NOUNS)}"
    names = [skewed(rng, words.NOUNS) for _ in range(rng.randint(1, 4))]
    return {
        "name": f"{skewed(rng, words.VERBS)}_{skewed(rng, words.NOUNS)}_for_{topic}",
        "description": fill(rng.choice(DESCRIPTIONS), rng),
        "parameters": {
            "type": "object",
            "properties": {name: _parameter(rng) for name in names},
            "required": names[:1],
        },
    }


def tool_json(rng: Random) -> str:
    """One tool as JSON text."""
    return json.dumps(tool(rng))


def tool_pool(rng: Random, num_tools: int) -> list[str]:
    """JSON texts of tools to build tool lists from quickly."""
    return [tool_json(rng) for _ in range(num_tools)]


SEED = 1
NUM_SENTENCE_PAIRS = 18_000
NUM_TOOLS = 1_000
NUM_COMMON_LINES = 4_000
NUM_LAYOUT_LINES = 1_500
ENDINGS = ("", "", "", "", "s", "er", "ness", "ment", "al", "ation", "ly", "ity")


def tokenizer_corpus() -> Iterator[str]:
    """Prose, tool documentation, common words, and the odd layouts of real documents."""
    rng = Random(SEED)
    yield from (f"{sentence(rng)} {sentence(rng)}" for _ in range(NUM_SENTENCE_PAIRS))
    yield from (tool_json(rng) for _ in range(NUM_TOOLS))
    for _ in range(NUM_COMMON_LINES):
        yield " ".join(skewed(rng, words.COMMON) for _ in range(16))
    forms = _word_forms()
    for _ in range(NUM_LAYOUT_LINES):
        yield _script_line(rng, forms)
        yield _derived_line(rng, forms)


def _word_forms() -> tuple[str, ...]:
    verbs = words.VERBS
    inflected = (*map(plural, words.NOUNS), *map(past_tense, verbs), *map(ing_form, verbs))
    return (*words.COMMON, *words.NOUNS, *verbs, *words.ADJECTIVES, *words.ADVERBS, *inflected)


def _script_line(rng: Random, forms: tuple[str, ...]) -> str:
    """Runs of spaces, capitals and typographic marks, as in a screenplay."""
    gap, indent = " " * rng.choice((1, 2, 4, 8, 12, 16, 24)), " " * rng.randint(1, 40)
    loud, word = rng.choice(forms).upper(), rng.choice(forms).capitalize()
    return f"{gap}\n{indent}{loud} {word}\n\n\u201c{word}\u201d she\u2019s \u2013 it\u2019s\u2014\n"


def _derived_line(rng: Random, forms: tuple[str, ...]) -> str:
    """Derived words, numbers and brackets, as in an article."""
    derived = " ".join(rng.choice(forms) + rng.choice(ENDINGS) for _ in range(8))
    return f"{derived} {rng.randint(1, 2500)}, ({rng.choice(forms)})."
