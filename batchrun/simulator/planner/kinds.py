"""What a plan is asked for: the SLOs, and kinds of engines to choose from, with GPUs and prices.

An engine that nobody measured yet is a roofline, with constants from data sheets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from batchrun.errors import ConfigError, InputError
from batchrun.files import absolute
from batchrun.routing.routers import DEFAULT_ROUTER
from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.scenario_file import EnginesSpec, SloSpec, engine_of
from batchrun.simulator.virtual.setup import A100Law
from batchrun.strict import Strict, read_document, validate_document


@dataclass(frozen=True, slots=True)
class SloTarget:
    """The share `target` of a window's calls is to have a TTFT of at most `ttft_s`, and the same
    share a TPOT, the mean time between tokens, of at most `tpot_s`."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05
    target: float = 0.99

    def may_miss(self, num_calls: int) -> int:
        """How many of so many calls may miss a bound."""
        return int((1 - self.target) * num_calls + 1e-9)


Positive = Annotated[float, Field(gt=0)]


class RooflineFile(Strict):
    """What `A100Law` and the KV cache need to know of another GPU and another model.

    `flop_per_token` is about twice the parameters; `flop_per_token_pair` is 4 * hidden size *
    layers. `flop_per_s` and `bytes_per_s` are what the GPU reaches, not what its sheet promises.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    flop_per_s: Positive
    bytes_per_s: Positive
    weight_bytes: Positive
    flop_per_token: Positive
    flop_per_token_pair: Positive
    kv_bytes_per_token: Positive
    kv_blocks: Annotated[int, Field(ge=2, le=100_000_000, strict=True)]
    token_budget: Annotated[int, Field(ge=1, le=1_000_000, strict=True)] | None = None
    max_running: Annotated[int, Field(ge=1, le=100_000, strict=True)] | None = None
    overhead_s: Annotated[float, Field(ge=0)] = 0.003
    overlap_loss: Annotated[float, Field(ge=0, le=1)] = 0.25


_KIND = re.compile(
    r"(?:(?P<name>[^=@]+)=)?(?P<steps>[^@]+?)"
    r"(?:@(?P<price>\d+(?:\.\d+)?)(?:x(?P<gpus>[1-9]\d{0,2}))?)?"
)


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One kind. `price` is for a GPU-hour, in any currency; None where it was not given."""

    name: str
    engine: EnginePlan = field(repr=False)
    price: float | None = None
    gpus: int = 1
    """GPUs of one engine."""
    router: str = DEFAULT_ROUTER
    """Who chooses among several engines for a call."""

    def price_per_hour(self, num_engines: int) -> float | None:
        """Of so many engines."""
        return None if self.price is None else self.price * self.gpus * num_engines

    def with_context(self, max_model_len: int) -> EngineKind:
        """The same kind, started with vLLM's `--max-model-len`."""
        shape = replace(self.engine.shape, max_model_len=max_model_len)
        return replace(self, engine=replace(self.engine, shape=shape))

    def with_scheduler(
        self, policy: str, settings: Mapping[str, object], order: Literal["fcfs", "priority"]
    ) -> EngineKind:
        """The same kind with another policy and settings of the scheduler, and vLLM's order."""
        shape = replace(self.engine.shape, policy=order)
        settings = {**self.engine.settings, **settings}
        engine = replace(self.engine, shape=shape, policy=policy, settings=settings)
        return replace(self, engine=engine)

    def with_router(self, name: str) -> EngineKind:
        """The same kind behind another router."""
        return replace(self, router=name)


def parse_kind(text: str, slo: SloTarget, base: Path) -> EngineKind:
    """A kind from `[NAME=]PROFILE[@PRICE[xGPUS]]`.

    PROFILE is a file of `batchrun calibrate`, relative to `base`; a YAML file of a roofline's
    constants (`RooflineFile`); or the name of the reference, `a100-8b`. Raises InputError, one
    line.
    """
    match = _KIND.fullmatch(text.strip())
    if match is None:
        raise InputError(
            f"--profile {text!r}: must be PROFILE, PROFILE@PRICE or NAME=PROFILE@PRICExGPUS, such "
            "as h100=h100.json@2.50x2"
        )
    engine = _engine(match["steps"], slo, base)
    price = None if match["price"] is None else float(match["price"])
    name = match["name"] or Path(match["steps"]).stem
    return EngineKind(name, engine, price, int(match["gpus"] or 1))


def kind_of_profile(path: Path, slo: SloTarget) -> EngineKind:
    """The kind that a file of `batchrun calibrate` describes; no price. Raises InputError."""
    return EngineKind(path.stem, _engine(str(path.absolute()), slo, Path()))


def check_kinds(kinds: list[EngineKind]) -> None:
    """Raises InputError when they cannot be compared."""
    names = [kind.name for kind in kinds]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"--profile: two are called {name!r}; name them: NAME=PROFILE@PRICE")
    unpriced = [kind.name for kind in kinds if kind.price is None]
    if unpriced and len(kinds) > 1:
        raise InputError(
            f"--profile: {unpriced[0]!r} has no price, and the cheapest of {len(kinds)} kinds is "
            "looked for; write PROFILE@PRICE, the price of a GPU-hour"
        )


def _engine(steps: str, slo: SloTarget, base: Path) -> EnginePlan:
    """Raises ConfigError and DataError, one line."""
    spec = SloSpec(ttft=slo.ttft_s, tpot=slo.tpot_s)
    path = Path(absolute(base, steps))
    if path.suffix not in {".yaml", ".yml"}:
        return engine_of(EnginesSpec(steps=steps), spec, base)
    constants = validate_document(read_document(path, ConfigError), RooflineFile, ConfigError)
    engine = EnginesSpec(
        kv_blocks=constants.kv_blocks,
        token_budget=constants.token_budget,
        max_num_seqs=constants.max_running,
    )
    law = A100Law(**constants.model_dump(exclude={"kv_blocks", "token_budget", "max_running"}))
    return replace(engine_of(engine, spec, base), law=law)
