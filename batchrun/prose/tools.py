"""Made-up documentation of web tools, in the JSON form that function-calling prompts carry."""

from __future__ import annotations

import json
from random import Random

from batchrun.prose import words
from batchrun.prose.text import fill, skewed

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
