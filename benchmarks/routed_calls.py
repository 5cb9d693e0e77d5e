"""Calls of eight workloads for routers, drawn from a seed: real lengths and real sharing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchrun.simulator.offline_jobs import mixed
from batchrun.simulator.traces.reading import read_trace
from batchrun.simulator.traces.trace import Trace
from benchmarks.data import ARRIVALS
from benchmarks.light_engines import UNIT_TOKENS, LightCall
from benchmarks.scenarios import read_table

Floats = NDArray[np.float64]
ROOT = ARRIVALS.parent
FOLDER = Path("../shared/datasets")
"""Where the public files lie that no table was made of."""


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


def hot(rng: np.random.Generator, rate: float, duration_s: float) -> list[LightCall]:
    """Half of the calls share one prompt of 8,000 tokens, the others share nothing."""
    salt = int(rng.integers(1 << 40))
    calls = []
    for at_s in poisson(rng, rate, duration_s).tolist():
        is_hot = rng.random() < 0.5
        parts = [(salt, 8_000), (_own(rng), 60)] if is_hot else [(_own(rng), 500)]
        calls.append(_call(rng, at_s, parts, 100 if is_hot else 200))
    return calls


def _own(rng: np.random.Generator) -> int:
    return int(rng.integers(1 << 62)) | (1 << 62)


def _call(
    rng: np.random.Generator, at_s: float, parts: Sequence[tuple[int, int]], answer: int
) -> LightCall:
    tokens = sum(num for _, num in parts)
    output = max(1, round(rng.normal(answer, answer / 4)))
    return LightCall(at_s, tokens, output, chain(parts))


def mooncake(rng: np.random.Generator, rate: float, duration_s: float) -> list[LightCall]:
    """A window of the Mooncake conversation trace, prompts of at most 30 k tokens, its clock scaled
    to the rate; needs the public file."""
    trace = _mooncake()
    fits = np.flatnonzero(trace.num_prompt_tokens + trace.num_output_tokens <= 30_000)
    at_s = trace.arrival_s[fits] + rng.uniform(0, 3, len(fits))
    order = np.argsort(at_s)
    fits, at_s = fits[order], at_s[order]
    scale = len(fits) / (at_s[-1] - at_s[0]) / rate
    start = rng.integers(0, max(1, len(fits) - int(rate * duration_s * 1.3)))
    calls = []
    for i, when_s in zip(fits[start:], (at_s[start:] - at_s[start]) * scale, strict=True):
        if when_s >= duration_s:
            break
        tokens = int(trace.num_prompt_tokens[i])
        assert trace.prefix is not None
        blocks = trace.prefix.of_request(int(i)).tolist()
        parts = [(block + 1, 512) for block in blocks[: tokens // 512]]
        parts.append((_own(rng), tokens - 512 * len(parts)))
        units = chain(parts)
        calls.append(LightCall(float(when_s), tokens, int(trace.num_output_tokens[i]), units))
    return calls


@cache
def _mooncake() -> Trace:
    return read_trace(FOLDER / "mooncake/conversation_trace.jsonl.gz")


def mixed_calls(rng: np.random.Generator, rate: float, duration_s: float) -> list[LightCall]:
    """Tool lists and videos at once, as Preble's figure 8 mixes them: two of three are tools."""
    tools = toolbench(rng, rate * 2 / 3, duration_s)
    videos = nextqa(rng, rate / 3, duration_s)
    return sorted([*tools, *videos], key=lambda call: call.arrival_at_s)


Draw = Callable[[np.random.Generator, float, float], list[LightCall]]


@dataclass(frozen=True, slots=True)
class Workload:
    """How its calls are drawn, their rate near the knee of four engines, and their bounds."""

    draw: Draw
    rate_per_s: float
    ttft_s: float = 1.0
    tpot_s: float = 0.05


WORKLOADS = {
    "toolbench": Workload(toolbench, 100.0),
    "loogle": Workload(loogle, 6.0, 5.0, math.inf),
    "nextqa": Workload(nextqa, 12.0, 5.0, math.inf),
    "azure": Workload(azure_lengths, 22.0),
    "sharegpt": Workload(sharegpt, 120.0),
    "mooncake": Workload(mooncake, 2.5, 5.0, math.inf),
    "hot": Workload(hot, 40.0),
    "mixed": Workload(mixed_calls, 24.0, 5.0, math.inf),
}
