"""Mooncake's traces: a JSON object for each call, with the hashes of its prompt's blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from batchrun.errors import DataError
from batchrun.traces.tables import lines_of, opened
from batchrun.traces.trace import PrefixBlocks, Trace

BLOCK_TOKENS = 512
"""Tokens in a block of the published traces."""

Tokens = Annotated[int, Meta(ge=1)]
Hash = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Call(Struct):
    """`timestamp` is in milliseconds."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[Hash] | None = None


def read_mooncake(path: Path) -> Trace:
    """The trace; `prefix` where every call has hashes. Raises DataError."""
    decoder = msgspec.json.Decoder(_Call)
    calls: list[_Call] = []
    with opened(path) as file:
        for number, line in lines_of(file, path):
            try:
                calls.append(decoder.decode(line))
            except (msgspec.DecodeError, RecursionError) as error:
                raise DataError(f"{path}: line {number}: not a call: {error}") from error
            hashes = calls[-1].hash_ids or ()
            if len(hashes) > -(-calls[-1].input_length // BLOCK_TOKENS):
                raise DataError(
                    f"{path}: line {number}: {len(hashes)} blocks of {BLOCK_TOKENS} tokens for a "
                    f"prompt of {calls[-1].input_length}"
                )
    if not calls:
        raise DataError(f"{path}: has no calls")
    blocks = [call.hash_ids for call in calls if call.hash_ids is not None]
    return Trace.of(
        [call.timestamp / 1000 for call in calls],
        [call.input_length for call in calls],
        [call.output_length for call in calls],
        prefix=PrefixBlocks.of(blocks, BLOCK_TOKENS) if len(blocks) == len(calls) else None,
        source=path.name,
    )
