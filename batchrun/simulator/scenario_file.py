"""What a scenario file says: strict YAML, every problem with file, line and key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from batchrun.durations import parse_duration_s
from batchrun.errors import ConfigError
from batchrun.jobspec import Weight
from batchrun.yaml_lines import read_document, validate_document

REFERENCE = "a100-8b"
"""Llama-3.1-8B in bf16 on an A100-40GB, by its data sheet: steps without a profile."""

Text = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Seconds = Annotated[float, BeforeValidator(parse_duration_s)]
Count = Annotated[int, Field(ge=1, strict=True)]
Share = Annotated[float, Field(ge=0, lt=1)]
Pair = Annotated[tuple[Count, Count], Field()]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class EnginesSpec(_Strict):
    """The engines, all alike. `steps`: a profile of `batchrun calibrate`, or `a100-8b`.

    `kv_blocks` and `block_tokens` are the profile's unless given; else 8,600 blocks of 16 tokens.
    `steps_in_flight`: 2 where vLLM schedules a step ahead, as on a GPU, 1 on a CPU.
    """

    count: Annotated[Count, Field(le=1024)] = 1
    steps: Text = REFERENCE
    policy: Literal["vllm", "bs", "bs+e", "bs+e+s", "echo"] = "echo"
    kv_blocks: Annotated[int, Field(ge=2, le=100_000_000, strict=True)] | None = None
    block_tokens: Annotated[Count, Field(le=4096)] | None = None
    token_budget: Annotated[Count, Field(le=1_000_000)] = 2048
    max_num_seqs: Annotated[Count, Field(le=100_000)] = 256
    steps_in_flight: Literal[1, 2] = 2
    max_model_len: Annotated[int, Field(ge=2, le=131_072, strict=True)] = 32_768


class SloSpec(_Strict):
    """What online users were promised."""

    ttft: Seconds = 1.0
    tpot: Seconds = 0.05


class LengthSpec(_Strict):
    """Log-normal lengths around `median`, within `least` and `most`."""

    median: Annotated[float, Field(gt=0)]
    sigma: Annotated[float, Field(ge=0, le=5)]
    least: Count = 1
    most: Count


class GeneratorSpec(_Strict):
    """Poisson arrivals: `rate` a second, swinging by the share `swing` once every `swing_period`,
    and `burst_factor` times as many in the first `burst_length` of every `burst_period`."""

    rate: Annotated[float, Field(gt=0, le=100_000)]
    swing: Share = 0.0
    swing_period: Seconds = 86_400.0
    burst_factor: Annotated[float, Field(ge=1, le=1000)] = 1.0
    burst_length: Seconds = 8.0
    burst_period: Seconds = 90.0
    prompt_tokens: LengthSpec = LengthSpec(median=200, sigma=1.0, least=8, most=2000)
    output_tokens: LengthSpec = LengthSpec(median=148, sigma=0.8, least=4, most=800)


class OnlineSpec(_Strict):
    """The online calls: a `trace` file, or a `generator`."""

    trace: Text | None = None
    generator: GeneratorSpec | None = None


class WindowsSpec(_Strict):
    """Run the duration in short: `count` windows of this length, one from each part of it."""

    count: Annotated[Count, Field(le=10_000)]
    length: Seconds = 300.0


class ShapeSpec(_Strict):
    """Questions about documents; each pair is the bounds of a uniform draw."""

    documents: Annotated[Count, Field(le=1_000_000)]
    document_tokens: Pair
    questions: Pair = (1, 1)
    question_tokens: Pair = (15, 60)
    output_tokens: Pair = (4, 32)


class SimulatedJob(_Strict):
    """A job: a job `file`, or a `shape`. `after`: when it is submitted, from the start.

    `weight` and `deadline` are the file's unless given. `output_tokens` are bounds of the answers
    of a file's rows; without them every answer has the length that the daemon expects.
    """

    name: Text | None = None
    file: Text | None = None
    shape: ShapeSpec | None = None
    after: Annotated[float, Field(ge=0)] | Seconds = 0.0
    weight: Weight | None = None
    deadline: Seconds | None = None
    output_tokens: Pair | None = None


class ScenarioFile(_Strict):
    """The keys of a scenario file; durations as in job files (`90s`, `10m`, `24h`)."""

    name: Text
    duration: Seconds
    seed: Annotated[int, Field(ge=0, le=2**31, strict=True)] = 0
    engines: EnginesSpec = EnginesSpec()
    slo: SloSpec = SloSpec()
    online: OnlineSpec | None = None
    windows: WindowsSpec | None = None
    jobs: tuple[SimulatedJob, ...] = ()


def load_scenario(path: Path) -> ScenarioFile:
    """Reads a scenario file. Raises ConfigError with one line: file, line, key, what is wrong."""
    document = read_document(path, ConfigError)
    scenario = validate_document(document, ScenarioFile, ConfigError)
    for key, text in _problems(scenario):
        raise ConfigError(f"{document.where(key)}: {text}")
    return scenario


def _problems(scenario: ScenarioFile) -> Iterator[tuple[str, str]]:
    online = scenario.online
    if online is not None and (online.trace is None) == (online.generator is None):
        yield "online", "needs one of 'trace' and 'generator'"
    if online is None and not scenario.jobs:
        yield "", "nothing to simulate: give 'online', 'jobs' or both"
    windows = scenario.windows
    if windows is not None and windows.count * windows.length > scenario.duration:
        yield "windows", "its windows are longer than the duration together"
    for index, job in enumerate(scenario.jobs):
        key = f"jobs[{index}]"
        if (job.file is None) == (job.shape is None):
            yield key, "needs one of 'file' and 'shape'"
        if job.shape is not None and job.output_tokens is not None:
            yield f"{key}.output_tokens", "is for a job file; a shape has its own"
        yield from _pairs(job, key)


def _pairs(job: SimulatedJob, key: str) -> Iterator[tuple[str, str]]:
    bounds = {f"{key}.output_tokens": job.output_tokens}
    if job.shape is not None:
        names = ("document_tokens", "questions", "question_tokens", "output_tokens")
        bounds |= {f"{key}.shape.{name}": getattr(job.shape, name) for name in names}
    for name, pair in bounds.items():
        if pair is not None and pair[0] > pair[1]:
            yield name, f"the first bound is above the second ({pair[0]} > {pair[1]})"
