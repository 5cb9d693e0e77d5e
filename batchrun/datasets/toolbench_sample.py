"""Generated ToolBench: one system prompt, tool documentation, a query."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from random import Random

from batchrun.datasets.plan import SHUFFLED_GROUPS, PlannedRow, SamplePlan
from batchrun.datasets.texts import TextSource
from batchrun.datasets.writer import Row
from batchrun.prose import fill

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

    for row in plan.rows():
        rng = Random(f"{plan.seed} query {row.group} {row.index}")
        yield (
            f"toolbench-{row.group:06}-{row.index:04}",
            SYSTEM_PROMPT,
            tools(row.group),
            _query(rng, source, row),
            "",
        )


def _query(rng: Random, source: TextSource, row: PlannedRow) -> str:
    opening, request = fill(rng.choice(OPENINGS), rng), fill(rng.choice(REQUESTS), rng)
    context = source.sentences(rng, row.tail_tokens - 35)
    return " ".join((opening, *context, request))
