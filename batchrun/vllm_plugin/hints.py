"""The hints that daemon and gateway send with a request, as they arrive inside vLLM."""

from __future__ import annotations

import hmac
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from vllm.v1.request import Request

from batchrun.types import HINT_KEY, HINT_VERSION

MAX_HINT_CHARS = 16_384
MAX_NODES = 64
MAX_BOUND_S = 1e9


@dataclass(frozen=True, slots=True)
class NodeHint:
    """A prefix-tree node above a row: rows still to come under it, and the next one's rank."""

    node: int
    num_rows_to_come: int
    next_rank: int


@dataclass(frozen=True, slots=True)
class Hint:
    """What the daemon knows of a row: its place in the planned order, and its prefix nodes.

    `nodes` run from the root downwards. Rows that announce the same node share exactly their
    common block hashes. `output_tokens` is the expected length of its answer; None: not told.
    """

    epoch: int
    job: str
    row: int
    rank: int
    nodes: tuple[NodeHint, ...]
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class FlexHint:
    """A call that its caller lets run as offline work: of no job, and no row of the daemon's."""


@dataclass(frozen=True, slots=True)
class SloHint:
    """An online call with bounds of its own, in seconds; `jct_s` is for the last token."""

    ttft_s: float
    tpot_s: float
    jct_s: float = math.inf


AnyHint = Hint | FlexHint | SloHint


def parse_hint(extra_args: Mapping[str, object] | None, nonce: str) -> AnyHint | None:
    """The hint of a request; None for anything else, which is then online with the default bounds.

    A hint of another version or without the engine's nonce is no hint. Raises ValueError for one
    that carries the nonce but is malformed, so that the caller can count it.
    """
    text = None if extra_args is None else extra_args.get(HINT_KEY)
    if not isinstance(text, str) or len(text) > MAX_HINT_CHARS:
        return None
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    if not isinstance(fields, dict) or fields.get("v") != HINT_VERSION:
        return None
    given = fields.get("nonce")
    if (
        not nonce
        or not isinstance(given, str)
        or not hmac.compare_digest(given.encode(), nonce.encode())
    ):
        return None
    return _read(fields)


def _read(fields: dict[str, object]) -> AnyHint | None:
    request_class = fields.get("class")
    if request_class == "online":
        return _read_slo(fields.get("slo"))
    if request_class != "offline":
        return None
    return FlexHint() if fields.get("job", "") is None else _read_row(fields)


def _read_slo(bounds: object) -> SloHint:
    if not isinstance(bounds, dict):
        raise ValueError("malformed hint: no bounds")
    jct_s = bounds.get("jct_s")
    return SloHint(
        _bound(bounds.get("ttft_s")),
        _bound(bounds.get("tpot_s")),
        math.inf if jct_s is None else _bound(jct_s),
    )


def _bound(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_BOUND_S:
        return float(value)
    raise ValueError(f"malformed hint: {value!r} is not a number of seconds")


def _read_row(fields: dict[str, object]) -> Hint:
    try:
        nodes = fields.get("nodes", [])
        if not isinstance(nodes, list) or len(nodes) > MAX_NODES:
            raise ValueError("nodes")
        return Hint(
            epoch=_whole(fields["epoch"]),
            job=str(fields["job"]),
            row=_whole(fields["row"]),
            rank=_whole(fields["rank"]),
            nodes=tuple(NodeHint(*(_whole(value) for value in node)) for node in nodes),
            output_tokens=_count(fields["output"]) if "output" in fields else None,
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"malformed hint: {error}") from error


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"malformed hint: {value!r} is not a whole number")
    return value


def _count(value: object) -> int:
    number = _whole(value)
    if number < 0:
        raise ValueError(f"malformed hint: {number} is less than 0")
    return number


class HintReader:
    """Reads the hints that carry `nonce`, and counts those that make no sense."""

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce
        self.num_malformed = 0

    def read(self, request: Request) -> AnyHint | None:
        """The request's hint; None without one, and for a hint that makes no sense."""
        params = request.sampling_params
        if params is None or request.resumable:
            return None
        try:
            return parse_hint(params.extra_args, self.nonce)
        except ValueError:
            self.num_malformed += 1
            return None
