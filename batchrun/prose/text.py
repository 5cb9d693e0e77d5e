"""Plausible English out of word lists: the same seed gives the same text, on every machine.

Nothing here comes from a third party. A `random.Random` is handed in; its stream is stable
between Python versions.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import TypeVar

from batchrun.prose import words

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


class _Slots:
    """Fills the slots of a template: every look-up draws a fresh word."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def __getitem__(self, slot: str) -> str:
        rng = self._rng
        match slot:
            case "noun":
                return skewed(rng, words.NOUNS)
            case "nouns":
                return plural(skewed(rng, words.NOUNS))
            case "adj":
                return skewed(rng, words.ADJECTIVES)
            case "verb":
                return skewed(rng, words.VERBS)
            case "past":
                return past_tense(skewed(rng, words.VERBS))
            case "ing":
                return ing_form(skewed(rng, words.VERBS))
            case _:
                return self._rarer(slot)

    def _rarer(self, slot: str) -> str:
        rng = self._rng
        match slot:
            case "adverb":
                return skewed(rng, words.ADVERBS)
            case "prep":
                return rng.choice(words.PREPOSITIONS)
            case "person":
                return person_name(rng)
            case "place":
                return place_name(rng)
            case "counted":
                return rng.choice(words.COUNTED)
            case "year":
                return str(rng.randint(1620, 2020))
            case "number":
                return str(rng.randint(2, 900))
        raise KeyError(slot)


def fill(template: str, rng: Random) -> str:
    """`template` with a fresh word in every `{slot}`; an unknown slot is a KeyError."""
    return template.format_map(_Slots(rng))


def sentence(rng: Random) -> str:
    """One sentence, of about 19 words."""
    return fill(skewed(rng, SENTENCES), rng)


def sentence_pool(rng: Random, num_sentences: int) -> list[str]:
    """Sentences to build long texts from quickly (about 30,000 a second)."""
    return [sentence(rng) for _ in range(num_sentences)]
