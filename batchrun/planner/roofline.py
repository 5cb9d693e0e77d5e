"""Engines that nobody measured yet: the constants of a roofline, from data sheets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from batchrun.errors import ConfigError
from batchrun.simulator import EnginePlan
from batchrun.vllm_plugin.virtual import A100Law
from batchrun.yaml_lines import read_document, validate_document

SUFFIXES = frozenset({".yaml", ".yml"})

Positive = Annotated[float, Field(gt=0)]


class RooflineFile(BaseModel):
    """What `A100Law` and the KV cache need to know of another GPU and another model.

    `flop_per_token` is about twice the parameters; `flop_per_token_pair` is 4 * hidden size *
    layers. `flop_per_s` and `bytes_per_s` are what the GPU reaches, not what its sheet promises.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    flop_per_s: Positive
    bytes_per_s: Positive
    weight_bytes: Positive
    flop_per_token: Positive
    flop_per_token_pair: Positive
    kv_bytes_per_token: Positive
    kv_blocks: Annotated[int, Field(ge=2, le=100_000_000, strict=True)]
    overhead_s: Annotated[float, Field(ge=0)] = 0.003
    overlap_loss: Annotated[float, Field(ge=0, le=1)] = 0.25


def with_roofline(engine: EnginePlan, path: Path) -> EnginePlan:
    """The engine with the steps and the KV cache of a file. Raises ConfigError, one line."""
    document = read_document(path, ConfigError)
    constants = validate_document(document, RooflineFile, ConfigError)
    law = A100Law(**constants.model_dump(exclude={"kv_blocks"}))
    return replace(engine, law=law, shape=replace(engine.shape, num_blocks=constants.kv_blocks))
