"""The text on which the tiny model's tokenizer is trained: 4 MB, the same each time."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from batchrun.prose import words
from batchrun.prose.text import ing_form, past_tense, plural, sentence, skewed
from batchrun.prose.tools import tool_json

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
