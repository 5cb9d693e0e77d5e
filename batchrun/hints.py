"""What travels with a request to the scheduler inside an engine: written here, and read here.

A hint is a JSON object of `v`, `nonce` and the fields of one of three kinds (`RowHint`, `FlexHint`,
`SloHint`), as a string under the key `batchrun` of a body's `vllm_xargs`. The daemon sends one with
each row, the gateway with each call that asks for a class or for the flex tier; a request without a
valid hint is an online call with the engine's default bounds.

Engine and sender may be of different releases: fields may be added, unknown ones are ignored, and
all that is not in the first release of version 1 may be left out. A change that an older reader
would take for something else needs a new version, which such a reader takes for no hint.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, MutableMapping, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

HINT_KEY = "batchrun"
"""Where the hint stands in `vllm_xargs`, and the scheduler's settings in vLLM's config."""
HINT_ARGUMENTS = "vllm_xargs"
"""The field of a body that vLLM hands to its scheduler."""
HINT_VERSION = 1
HINT_NONCE_VARIABLE = "BATCHRUN_HINT_NONCE"
"""The environment variable through which an engine learns which hints to believe."""

MAX_HINT_CHARS = 16_384
MAX_NODES_READ = 64
MAX_NODES_WRITTEN = 8
MAX_BOUND_S = 1e9
MAX_ONLINE_COST = 100.0
"""The most that `online_cost` may be; long before that the bounds decide."""
AUTO_ONLINE_COST = 2.0
"""What it is with `slo: auto` where nobody says."""
URGENT_LEAD = 1 << 20
"""An urgent row's rank lies so far ahead: before every row that waits in an engine."""

RowsToCome = Sequence[tuple[int, int]]
"""Prefix nodes, each with the rows of it that have not been sent."""
Seconds = Annotated[float, Meta(gt=0, le=MAX_BOUND_S)]


class NodeHint(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A prefix node above a row: `[node, rows to come, next rank]`.

    `node` is its id, unique within the job and epoch. `num_rows_to_come` are its rows behind this
    one in the planned order that have not been sent; `next_rank` is the rank of the first of them,
    without meaning when there are none.
    """

    node: int
    num_rows_to_come: int
    next_rank: int


class RowHint(Struct, frozen=True, kw_only=True):
    """A row of a job: its place in the planned order, and its prefix nodes.

    `epoch` is the start of the daemon that sends it; starts count upwards. `rank` is the row's
    place in the order planned for this engine, over all jobs. `nodes` run from the root downwards;
    depth is not told, for rows that announce the same node share exactly their common block
    hashes. `key_node` is the node that is the row's key portion, None where that is its own text;
    UNSET: the last one. `output_tokens` is the room to set aside for the answer; UNSET: not told.
    """

    epoch: int
    job: str
    row: int
    request_class: Literal["offline"] = field(name="class", default="offline")
    rank: int
    nodes: Annotated[tuple[NodeHint, ...], Meta(max_length=MAX_NODES_READ)] = ()
    key_node: int | UnsetType | None = field(name="key", default=UNSET)
    output_tokens: Annotated[int, Meta(ge=0)] | UnsetType = field(name="output", default=UNSET)


def key_of(hint: RowHint) -> NodeHint | None:
    """The node that a row shares its key portion with others in; None where there is none."""
    if hint.key_node is UNSET:
        return hint.nodes[-1] if hint.nodes else None
    return next((node for node in hint.nodes if node.node == hint.key_node), None)


class FlexHint(Struct, frozen=True):
    """A call that its caller lets run as offline work: of no job, and no row of the daemon's."""

    request_class: Literal["offline"] = field(name="class", default="offline")
    job: None = None


class SloBounds(Struct, frozen=True):
    """The bounds of an online class, in seconds: first token, each token after it, and the last
    one (None: no bound). Where not all calls can be in time, those of less `value` give way."""

    ttft_s: Seconds
    tpot_s: Seconds
    jct_s: Seconds | None = None
    value: Annotated[float, Meta(gt=0)] = 1.0


class SloHint(Struct, frozen=True, kw_only=True):
    """An online call with bounds of its own."""

    request_class: Literal["online"] = field(name="class", default="online")
    slo: SloBounds


Hint = RowHint | FlexHint | SloHint


class HintError(ValueError):
    """A hint that carries the engine's nonce and makes no sense; one line."""


def write_hint(hint: Hint, nonce: str) -> str:
    """The hint for the engine that was started with this nonce, as it goes over the wire."""
    fields = {"v": HINT_VERSION, "nonce": nonce} | msgspec.to_builtins(hint)
    return msgspec.json.encode(fields).decode()


def read_hint(text: object, nonce: str) -> Hint | None:
    """The hint in what stood under the key; None for what is none, whoever sent it.

    A hint of another version, of an unknown class or without the engine's nonce is none, and an
    engine without a nonce believes none. Raises HintError for one that carries the nonce but is
    malformed.
    """
    if not isinstance(text, str) or len(text) > MAX_HINT_CHARS:
        return None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("v") != HINT_VERSION:
        return None
    given = fields.get("nonce")
    if not nonce or not isinstance(given, str) or not _is_same(given, nonce):
        return None
    kind = _kind_of(fields)
    try:
        return None if kind is None else msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise HintError(f"malformed hint: {error}") from error


def _is_same(given: str, nonce: str) -> bool:
    return hmac.compare_digest(given.encode(errors="surrogatepass"), nonce.encode())


def _kind_of(fields: dict[str, object]) -> type[Hint] | None:
    request_class = fields.get("class")
    if request_class == "online":
        return SloHint
    if request_class != "offline":
        return None
    return FlexHint if fields.get("job", "") is None else RowHint


def put_hint(body: MutableMapping[str, object], hint: Hint, nonce: str) -> None:
    """Write the hint into a body, beside the other arguments that are there."""
    given = body.get(HINT_ARGUMENTS)
    others = given if isinstance(given, dict) else {}
    body[HINT_ARGUMENTS] = {**others, HINT_KEY: write_hint(hint, nonce)}


def drop_hint(body: MutableMapping[str, object]) -> None:
    """Take the hint out of a body, if there is one; other arguments stay."""
    arguments = body.get(HINT_ARGUMENTS)
    if isinstance(arguments, dict):
        arguments.pop(HINT_KEY, None)
        if not arguments:
            del body[HINT_ARGUMENTS]


class SharedPrefixes(NamedTuple):
    """What the hint of a row tells of its prefixes, as it is when the row is taken.

    `nodes` from the root downwards; `key_node` is the one that is the row's key portion, None where
    that is its own text. The job's next row is expected to be the `next_in_rows`-th after it.
    """

    nodes: RowsToCome = ()
    key_node: int | None = None
    next_in_rows: int = 1

    def node_hints(self, rank: int) -> tuple[NodeHint, ...]:
        """The nodes for the hint of a row of this rank."""
        next_rank = rank + self.next_in_rows
        return tuple([NodeHint(node, num, next_rank if num else rank) for node, num in self.nodes])


def rows_to_come(path: Sequence[int], num_to_come: Callable[[int], int]) -> RowsToCome:
    """The nodes on a row's path, root first, each with its rows to come; of a long path the
    outermost node and the innermost ones."""
    if len(path) > MAX_NODES_WRITTEN:
        path = [path[0], *path[1 - MAX_NODES_WRITTEN :]]
    return [(node, num_to_come(node)) for node in path]
