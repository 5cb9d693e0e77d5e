"""Calls and jobs whose lengths were counted in real data, in place of a generator's."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from batchrun.vllm_plugin.virtual.workload import Job, JobRow, OnlineCall, Order, draw_token_ids


@dataclass(frozen=True, slots=True, eq=False)
class CallTable:
    """Online calls of a recorded trace, read in a circle.

    `arrivals_s` rise from 0 to less than `span_s`, in recorded seconds. The clock runs
    `time_scale` times slower than the record, which thins the load and keeps its form (as Echo
    scales its trace, section 7.1). Seed s begins s windows of `window_s` slowed seconds into the
    circle.
    """

    arrivals_s: Sequence[float]
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    span_s: float
    time_scale: float = 1.0
    window_s: float = 200.0

    def draw(self, duration_s: float, seed: int) -> list[OnlineCall]:
        """The calls of `duration_s` seconds from where the seed begins; their clock starts at 0."""
        circle_s = self.span_s * self.time_scale
        start_s = (seed * self.window_s) % circle_s
        calls: list[OnlineCall] = []
        for turn in range(math.ceil((start_s + duration_s) / circle_s)):
            for i, recorded_s in enumerate(self.arrivals_s):
                at_s = turn * circle_s + recorded_s * self.time_scale - start_s
                if 0 <= at_s < duration_s:
                    calls.append(OnlineCall(at_s, self.prompt_tokens[i], self.output_tokens[i]))
        return calls


@dataclass(frozen=True, slots=True)
class DocumentLengths:
    """One document: its tokens, and those of each question and answer about it."""

    num_tokens: int
    questions: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class JobTable:
    """A job with one row per question of the given documents."""

    documents: Sequence[DocumentLengths]

    def draw(self, seed: int, order: Order) -> Job:
        """The job with token ids and, if shuffled, an order of its seed."""
        rng = random.Random(seed)
        rows: list[JobRow] = []
        for number, document in enumerate(self.documents):
            for num_question_tokens, num_output_tokens in document.questions:
                question = draw_token_ids(rng, num_question_tokens)
                rows.append(JobRow(len(rows), number, question, num_output_tokens))
        if order is Order.SHUFFLED:
            rng.shuffle(rows)
        return Job([draw_token_ids(rng, d.num_tokens) for d in self.documents], rows)
