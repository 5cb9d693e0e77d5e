"""Calls of seven workloads for routers, drawn from a seed: real lengths and real sharing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchrun.simulator.offline_jobs import mixed
from benchmarks.data import ARRIVALS
from benchmarks.light_engines import UNIT_TOKENS, LightCall
from benchmarks.scenarios import read_table

Floats = NDArray[np.float64]
ROOT = ARRIVALS.parent


def chain(parts: Sequence[tuple[int, int]]) -> NDArray[np.uint64]:
    """Chained keys of the full units of a prompt that is made of (key, tokens) parts."""
    tokens = sum(num for _, num in parts)
    ends = np.cumsum([num for _, num in parts])
    starts = np.arange(tokens // UNIT_TOKENS) * UNIT_TOKENS
    part_of = np.searchsorted(ends, starts + UNIT_TOKENS - 1, side="right")
    keys = np.array([key for key, _ in parts], np.uint64)[part_of]
    numbers = mixed(keys, np.arange(len(keys)))
    # The chain: a unit's key holds all before it.
    found: NDArray[np.uint64] = np.bitwise_xor.accumulate(numbers) if len(numbers) else numbers
    return found


def poisson(rng: np.random.Generator, rate_per_s: float, duration_s: float) -> Floats:
    """Arrivals of a Poisson process."""
    num = int(rate_per_s * duration_s * 1.5) + 50
    at_s = np.cumsum(rng.exponential(1 / rate_per_s, num))
    found: Floats = at_s[at_s < duration_s]
    return found


def azure(rng: np.random.Generator, rate_per_s: float, duration_s: float) -> Floats:
    """Arrivals of the Azure conversation trace, its clock scaled to the rate, from anywhere."""
    trace = read_table(ARRIVALS)
    at_s = np.array(list(accumulate(trace["gap_ms"])), float) / 1e3
    scale = len(at_s) / trace["span_s"] / rate_per_s
    at_s, span_s = at_s * scale, trace["span_s"] * scale
    turns = int(duration_s / span_s) + 2
    whole = np.concatenate([at_s + turn * span_s for turn in range(turns)])
    start_s = rng.uniform(0, span_s)
    moved = whole - start_s
    found: Floats = moved[(moved >= 0) & (moved < duration_s)]
    return found


def toolbench(rng: np.random.Generator, rate: float, duration_s: float) -> list[LightCall]:
    """Tool lists behind one system prompt, Zipf 1.1; answers of 43 tokens."""
    table: dict[str, Any] = read_table(ROOT / "toolbench_prefixes.json")
    lists = sorted({tuple(tools) for _, *tools in table["rows"]})
    rng.shuffle(lists)
    tokens = table["document_tokens"]
    weights = 1 / np.arange(1, len(lists) + 1) ** 1.1
    weights /= weights.sum()
    salt = int(rng.integers(1 << 40))
    calls = []
    for at_s in poisson(rng, rate, duration_s).tolist():
        tools = lists[int(rng.choice(len(lists), p=weights))]
        own = max(16, int(rng.normal(60, 20)))
        documents = [(salt + 1 + int(tool), tokens[tool]) for tool in tools]
        parts = [(salt, table["system_tokens"]), *documents, (_own(rng), own)]
        calls.append(_call(rng, at_s, parts, 43))
    return calls


def loogle(
    rng: np.random.Generator, rate: float, duration_s: float, num: int = 24
) -> list[LightCall]:
    """Documents that just fill the KV of four engines; answers of 16 tokens."""
    sizes = np.clip(rng.normal(23_474, 6_105, num), 5_000, 31_000).astype(int)
    salt = int(rng.integers(1 << 40))
    calls = []
    for at_s in poisson(rng, rate, duration_s).tolist():
        document = int(rng.integers(num))
        parts = [(salt + document, int(sizes[document])), (_own(rng), 24)]
        calls.append(_call(rng, at_s, parts, 16))
    return calls


def nextqa(rng: np.random.Generator, rate: float, duration_s: float) -> list[LightCall]:
    """Videos of 8.7 k tokens, each asked about 8.6 times within about 15 s; Azure's arrivals."""
    frames = np.array(read_table(ROOT / "nextqa_prefixes.json")["frames"])
    sizes = np.maximum(600, frames * (8_700 / frames.mean())).astype(int)
    sizes = np.minimum(sizes, 30_000)
    at_s = azure(rng, rate, duration_s)
    salt = int(rng.integers(1 << 40))
    starts = azure(rng, rate / 8.6, duration_s + 60)
    slots: list[tuple[float, int]] = []
    for video, start_s in enumerate(starts.tolist()):
        for _ in range(max(1, int(rng.poisson(8.6)))):
            slots.append((start_s - 30 + rng.exponential(7.5), video))
    slots.sort()
    chosen = [video for due_s, video in slots if 0 <= due_s < duration_s]
    calls = []
    for at, video in zip(at_s.tolist(), chosen, strict=False):
        parts = [(salt + video, int(sizes[video % len(sizes)])), (_own(rng), 30)]
        calls.append(_call(rng, at, parts, 8))
    return calls


def azure_lengths(rng: np.random.Generator, rate: float, duration_s: float) -> list[LightCall]:
    """Lengths of the Azure trace, nothing shared."""
    trace = read_table(ARRIVALS)
    prompts, outputs = trace["prompt_tokens"], trace["output_tokens"]
    calls = []
    for at_s in azure(rng, rate, duration_s).tolist():
        i = int(rng.integers(len(prompts)))
        calls.append(
            LightCall(at_s, prompts[i], max(2, outputs[i]), chain([(_own(rng), prompts[i])]))
        )
    return calls


def sharegpt(rng: np.random.Generator, rate: float, duration_s: float) -> list[LightCall]:
    """Short prompts of ShareGPT's lengths with Azure's answers, nothing shared."""
    outputs = read_table(ARRIVALS)["output_tokens"]
    calls = []
    for at_s in poisson(rng, rate, duration_s).tolist():
        tokens = int(np.clip(rng.lognormal(4.0, 1.2), 8, 2000))
        answer = max(2, outputs[int(rng.integers(len(outputs)))])
        calls.append(LightCall(at_s, tokens, answer, chain([(_own(rng), tokens)])))
    return calls


def _own(rng: np.random.Generator) -> int:
    return int(rng.integers(1 << 62)) | (1 << 62)


def _call(
    rng: np.random.Generator, at_s: float, parts: Sequence[tuple[int, int]], answer: int
) -> LightCall:
    tokens = sum(num for _, num in parts)
    output = max(1, round(rng.normal(answer, answer / 4)))
    return LightCall(at_s, tokens, output, chain(parts))


Workload = Callable[[np.random.Generator, float, float], list[LightCall]]
WORKLOADS: dict[str, Workload] = {
    "toolbench": toolbench,
    "loogle": loogle,
    "nextqa": nextqa,
    "azure": azure_lengths,
    "sharegpt": sharegpt,
}
