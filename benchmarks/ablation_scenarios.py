"""The scenarios of `benchmarks.ablation` and the KV sizes that they are run with."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from batchrun.simulator.virtual.scenarios import (
    CallTable,
    DocumentLengths,
    JobTable,
    Scenario,
    a100_8b,
    echo_hit_rate,
    echo_qa_long,
    echo_qa_short,
    echo_sharegpt,
    kv_pressure,
    kv_pressure_tide,
)
from benchmarks.data import ARRIVALS, DOCUMENTS

AZURE_TIME_SCALE = 2.0
"""2.6 calls a second instead of 5.2: no queue without offline work, as Echo scales its trace."""
AZURE_WINDOW_S = 200.0
"""In a circle of 2,400 s seeds 0 to 4 read other calls than one another and than their warm-ups."""
MAX_DOCUMENT_TOKENS = 32_000
"""Two meetings of QMSum are longer than the engine's context allows."""


@cache
def loogle_azure() -> Scenario:
    """All documents of LooGLE's sample and of QMSum beside conversations of the Azure trace."""
    documents, trace = _table(DOCUMENTS), _table(ARRIVALS)
    job = JobTable([
        DocumentLengths(tokens, [(question, answer) for question, answer in questions])
        for name in ("loogle", "qmsum")
        for tokens, questions in documents[name]
        if tokens <= MAX_DOCUMENT_TOKENS
    ])
    calls = CallTable(
        arrivals_s=[at_ms / 1e3 for at_ms in accumulate(trace["gap_ms"])],
        prompt_tokens=trace["prompt_tokens"],
        output_tokens=trace["output_tokens"],
        span_s=trace["span_s"],
        time_scale=AZURE_TIME_SCALE,
        window_s=AZURE_WINDOW_S,
    )
    return Scenario("loogle-azure", 180.0, calls, job)


def _table(path: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(path.read_text())
    return table


SCENARIOS: dict[str, tuple[Callable[[], Scenario], tuple[int, ...]]] = {
    "a100-8b": (a100_8b, (8600, 4300)),
    "a100-8b-stress": (lambda: a100_8b(burst_factor=6.0), (8600, 4300, 2600)),
    "kv-pressure": (kv_pressure, (4300, 3200)),
    "kv-pressure-tide": (kv_pressure_tide, (4300, 3200)),
    "loogle-azure": (loogle_azure, (8600, 4300)),
    "echo-sharegpt": (echo_sharegpt, (8600, 4300)),
    "echo-qa-short": (echo_qa_short, (8600, 4300)),
    "echo-qa-long": (echo_qa_long, (8600, 4300)),
    "echo-hit-rate": (echo_hit_rate, (8600,)),
}
"""By name: what happens, and the KV sizes in blocks that it is run with."""
