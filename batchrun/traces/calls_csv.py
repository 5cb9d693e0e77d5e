"""Public traces with a line of csv for each call: Azure's and BurstGPT's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from batchrun.errors import DataError
from batchrun.traces.tables import CsvLayout, instants, read_calls, seconds
from batchrun.traces.trace import Trace

AZURE = CsvLayout("TIMESTAMP", ("ContextTokens", "GeneratedTokens"), instants)
"""Azure LLM inference traces of 2023 and 2024: the later ones write a zone behind the time."""
BURSTGPT = CsvLayout("Timestamp", ("Request tokens", "Response tokens"), seconds)
"""BurstGPT, all releases; the later ones have columns more, which are ignored."""


def read_calls_csv(path: Path, layout: CsvLayout) -> Trace:
    """The trace. Raises DataError.

    Calls that failed stand there with 0 tokens; no engine worked on them, so they are left out.
    """
    calls = read_calls(path, layout)
    is_whole = np.minimum(calls.num_prompt_tokens, calls.num_output_tokens) > 0
    if not is_whole.any():
        raise DataError(f"{path}: no call in it has prompt and output tokens")
    return Trace.of(
        calls.at_s[is_whole],
        calls.num_prompt_tokens[is_whole],
        calls.num_output_tokens[is_whole],
        source=path.name,
    )
