"""Calls of other kinds for `benchmarks.online_queue`: ShareGPT, LooGLE, agents, and those that
AccelGen (arXiv 2503.13737, section 5.1) was measured with."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import numpy as np

from batchrun.simulator.offline_jobs import LogNormalTokens
from batchrun.simulator.virtual.engine import VirtualEngine
from benchmarks.conversations import Conversations
from benchmarks.data import DOCUMENTS
from benchmarks.queue_calls import PLAIN, PromisedCall, alone_s
from benchmarks.records import Record
from benchmarks.routed_calls import sharegpt
from benchmarks.scenarios import AGENTS, CHAT_OUTPUT, MAX_DOCUMENT_TOKENS, read_table

OPEN_DOCUMENTS = 6
"""That callers ask about at once: about as much as 8,600 blocks hold."""
DOCUMENT = replace(PLAIN, name="document", ttft_s=5.0, tpot_s=0.1)

ALPACA = LogNormalTokens(4.0, 0.8, (8, 500)), LogNormalTokens(4.2, 0.8, (4, 2_048))
SHAREGPT = LogNormalTokens(5.0, 1.0, (8, 2_000)), CHAT_OUTPUT
BOOK_PROMPT_TOKENS = (4_096, 30_000)
"""The paper's go on to 100,000, which neither its 12 GB of KV nor this engine's context hold."""
BOOK_ANSWER = LogNormalTokens(4.6, 0.8, (4, 2_048))
LONG_SHARE, SHAREGPT_SHARE = 0.35, 0.5
"""Of all calls, and of the short ones (the paper does not say how it mixes these)."""
GROUP_TOKENS = 512
TTFT_FACTORS, TPOT_S, TPOT_FACTORS = (0.5, 1.5), 0.1875, (0.75, 1.25)
GOODPUT_LATE_S = 1.0
"""A call whose iterations are late by so much in all still counts: the reading of its T = 1 s."""


def sharegpt_calls(rate_per_s: float, duration_s: float, seed: int) -> list[PromisedCall]:
    """Short prompts of ShareGPT's lengths with Azure's answers; no classes."""
    drawn = sharegpt(np.random.default_rng(seed), rate_per_s, duration_s)
    return [PromisedCall(c.arrival_at_s, c.prompt_tokens, c.output_tokens, PLAIN) for c in drawn]


def loogle_calls(rate_per_s: float, duration_s: float, seed: int) -> list[PromisedCall]:
    """LooGLE's questions about its documents, `OPEN_DOCUMENTS` of them, as they come."""
    rng, at_s = random.Random(5_000 + seed), 0.0
    all_documents = read_table(DOCUMENTS)["loogle"]
    fit = [each for each in all_documents if each[0] <= BOOK_PROMPT_TOKENS[1]]
    documents = rng.sample(range(len(fit)), OPEN_DOCUMENTS)
    calls: list[PromisedCall] = []
    while (at_s := at_s + rng.expovariate(rate_per_s)) < duration_s:
        number = rng.choice(documents)
        tokens, questions = fit[number]
        question, answer = rng.choice(questions)
        parts = ((number, tokens),)
        calls.append(PromisedCall(at_s, tokens + question, answer, DOCUMENT, parts))
    return calls


def agent_calls(rate_per_s: float, duration_s: float, seed: int) -> list[PromisedCall]:
    """The conversations of the scenario `agents`, so many calls a second: each turn's prompt begins
    with that of the turn before, all with the same 2,000 tokens. Turns come when they come."""
    traffic = AGENTS.online
    assert isinstance(traffic, Conversations)
    rate = rate_per_s / fmean(traffic.turns)
    turns = replace(traffic, rate_per_s=rate).draw(duration_s, seed)
    prompts: list[tuple[tuple[int, int], ...]] = []
    calls: list[PromisedCall] = []
    for number, turn in enumerate(turns):
        before: tuple[tuple[int, int], ...] = ((-1, turn.num_system_tokens),)
        if turn.previous is not None:
            # What the engine answered is not told; as many other tokens take its place.
            answer = -2 - turn.previous, calls[turn.previous].num_output_tokens
            before = (*prompts[turn.previous], answer)
        prompts.append((*before, (number, turn.num_prompt_tokens)))
        tokens = sum(num for _, num in prompts[-1])
        if tokens > MAX_DOCUMENT_TOKENS:
            raise ValueError(f"the conversation of call {number} has {tokens:,} tokens")
        parts = prompts[-1]
        calls.append(PromisedCall(turn.arrival_at_s, tokens, turn.num_output_tokens, PLAIN, parts))
    return calls


def accelgen_calls(
    rate_per_s: float, duration_s: float, seed: int, mix: str = ""
) -> list[PromisedCall]:
    """Long prompts like BookCorpus's, short ones like Alpaca's and ShareGPT's, each with bounds of
    its own: TTFT is what prompts of its group of 512 tokens take alone, times 0.5 to 1.5; TPOT
    0.1875 s times 0.75 to 1.25. `mix` is the name of one kind, or the share of long prompts."""
    rng, at_s = random.Random(6_000 + seed), 0.0
    calls: list[PromisedCall] = []
    while (at_s := at_s + rng.expovariate(rate_per_s)) < duration_s:
        kind, prompt, answer = _accelgen_lengths(rng, mix)
        middle = (prompt // GROUP_TOKENS + 0.5) * GROUP_TOKENS
        ttft_s = alone_s(round(middle)) * rng.uniform(*TTFT_FACTORS)
        tpot_s = TPOT_S * rng.uniform(*TPOT_FACTORS)
        promise = replace(PLAIN, name=kind, ttft_s=ttft_s, tpot_s=tpot_s, is_told=True)
        calls.append(PromisedCall(at_s, prompt, answer, promise))
    return calls


def _accelgen_lengths(rng: random.Random, mix: str) -> tuple[str, int, int]:
    kind = mix
    if mix not in {"book", "alpaca", "sharegpt"}:
        is_long = rng.random() < (float(mix) if mix else LONG_SHARE)
        short = "sharegpt" if rng.random() < SHAREGPT_SHARE else "alpaca"
        kind = "book" if is_long else short
    if kind == "book":
        low, high = map(math.log, BOOK_PROMPT_TOKENS)
        return kind, round(math.exp(rng.uniform(low, high))), BOOK_ANSWER.draw(rng)
    prompt, answer = ALPACA if kind == "alpaca" else SHAREGPT
    return kind, prompt.draw(rng), answer.draw(rng)


def accelgen_figures(
    calls: Sequence[PromisedCall], engine: VirtualEngine, until_s: float
) -> Record:
    """The columns of its figure 11, of the calls that came until then: throughput, its goodput, the
    share of iterations and of whole answers in time, mean time to the end, and the use of the
    engine and its KV."""
    ended_tokens = num_ended = 0
    late_s: list[float] = []
    iterations: list[bool] = []
    whole: list[bool] = []
    took_s: list[float] = []
    for number, call in enumerate(calls):
        record = engine.records.get(f"call-{number}")
        if record is None or call.arrival_at_s >= until_s:
            continue
        end_s = record.finished_at_s
        times_s = list(record.token_times_s) or [engine.now_s]
        over_s = list(_over_s(call, times_s))
        late_s.append(sum(max(0.0, each) for each in over_s) if end_s else math.inf)
        iterations += [each <= 0 for each in over_s]
        took_s.append((end_s or engine.now_s) - call.arrival_at_s)
        jct_s = call.promise.ttft_s + (call.num_output_tokens - 1) * call.promise.tpot_s
        whole.append(end_s is not None and took_s[-1] <= jct_s)
        if end_s is not None and end_s < until_s:
            num_ended += 1
            ended_tokens += call.num_prompt_tokens + call.num_output_tokens
    return {
        "tokens_per_s": ended_tokens / until_s,
        "requests_per_s": num_ended / until_s,
        "accelgen_goodput_per_s": sum(each <= GOODPUT_LATE_S for each in late_s) / until_s,
        "iterations_met": fmean(iterations),
        "whole_met": fmean(whole),
        "jct_mean_s": fmean(took_s),
        "busy_share": engine.totals.busy_s / engine.now_s,
    }


def _over_s(call: PromisedCall, times_s: Sequence[float]) -> Iterator[float]:
    """By how much each iteration of a call took longer than its bound; negative: less."""
    yield times_s[0] - call.arrival_at_s - call.promise.ttft_s
    for before_s, at_s in pairwise(times_s):
        yield at_s - before_s - call.promise.tpot_s
