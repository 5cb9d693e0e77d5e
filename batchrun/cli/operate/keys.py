"""The `keys` commands: who may call the API, and how much."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer
from rich.console import RenderableType

from batchrun.cli.console import (
    ConfigOption,
    HomeOption,
    JsonOption,
    answer,
    columns,
    command_group,
    figure,
    note,
)
from batchrun.control.client import DaemonClient
from batchrun.control.starting import read_deployment
from batchrun.engine_config import checked_name
from batchrun.errors import DaemonUnavailableError, InputError
from batchrun.files import StoreLock
from batchrun.home import Home
from batchrun.jobs.spec import MAX_WEIGHT, MIN_WEIGHT
from batchrun.keys import digest, new_key
from batchrun.quantities import parse_duration_s
from batchrun.server.api.key_list import (
    HEARD_S,
    KeyList,
    asks_for_none,
    limit_lines,
    limits_in,
    online_usage,
)
from batchrun.store import api_keys, files
from batchrun.store.database import open_store
from batchrun.store.jobs import Counts
from batchrun.store.place import open_for
from batchrun.types import DEFAULT_CLASS

LOCK_WAIT_S = 5.0
GATEWAYS_LEARN_S = 0.5
"""Gateways look at the list of keys four times a second."""
NO_LIMIT = "none"

keys_app = command_group("Create, change, list and revoke API keys.")


def _number_up_to(most: int) -> Callable[[str], int]:
    """Reads a number from 1 on, or `none`, which is as much as there can be."""

    def read(text: str) -> int:
        if text == NO_LIMIT:
            return most
        if not (text.isascii() and text.isdecimal() and 1 <= int(text[:20]) <= most):
            raise typer.BadParameter(f"{text!r} is not a number from 1 to {most:,}, nor `none`")
        return int(text)

    return read


_count, _amount = _number_up_to(api_keys.MAX_COUNT), _number_up_to(api_keys.MAX_TOKENS)


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise typer.BadParameter(f"{text!r} is not a number from {MIN_WEIGHT:f} to {MAX_WEIGHT:,}")
    return weight


def _deadline_s(text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


NameArgument = Annotated[str, typer.Argument(help="Id or name of the key.")]
ClassOption = Annotated[
    str | None, typer.Option("--class", help="SLO class of its online calls; `default` for none.")
]
RequestsOption = Annotated[
    int | None, typer.Option(parser=_count, metavar="N|none", help="Most requests in a minute.")
]
CallsOption = Annotated[
    int | None, typer.Option(parser=_count, metavar="N|none", help="Most online calls at once.")
]
BatchesOption = Annotated[
    int | None, typer.Option(parser=_count, metavar="N|none", help="Most batches at once.")
]
TokensOption = Annotated[
    int | None,
    typer.Option(parser=_amount, metavar="N|none", help="Most prompt tokens in batches at once."),
]
BytesOption = Annotated[
    int | None, typer.Option(parser=_amount, metavar="N|none", help="Most bytes stored.")
]
WeightOption = Annotated[
    float | None,
    typer.Option(parser=_weight, metavar="W", help="Largest weight that its batches may name."),
]
DeadlineOption = Annotated[
    float | None,
    typer.Option(
        parser=_deadline_s, metavar="TIME", help="Earliest deadline of its batches, such as 6h."
    ),
]


@keys_app.command()
def create(
    name: Annotated[str, typer.Argument(help="A name to know the key by.")],
    *,
    role: Annotated[
        Literal["user", "admin"],
        typer.Option(help="`admin` sees everybody's files and batches, and /metrics."),
    ] = "user",
    slo_class: ClassOption = None,
    requests_per_minute: RequestsOption = None,
    concurrent_calls: CallsOption = None,
    concurrent_batches: BatchesOption = None,
    enqueued_tokens: TokensOption = None,
    stored_bytes: BytesOption = None,
    max_weight: WeightOption = None,
    min_deadline: DeadlineOption = None,
    config: ConfigOption = None,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Make an API key and show it, this one time: batchrun keeps only its hash.

    From the first key on, every call needs one. Limits that are not given are those of
    `key_limits` in batchrun.yaml.
    """
    try:
        checked_name(name)
    except ValueError as error:
        raise InputError(f"NAME {error}") from None
    key_id, text = new_key()
    limits = api_keys.KeyLimits(
        requests_per_minute=requests_per_minute,
        enqueued_tokens=enqueued_tokens,
        concurrent_batches=concurrent_batches,
        stored_bytes=stored_bytes,
        concurrent_calls=concurrent_calls,
        max_weight=max_weight,
        min_deadline_s=min_deadline,
    )
    own_class = _checked_class(slo_class, config)
    key = api_keys.NewApiKey(key_id, name, role, digest(text), own_class, limits)
    _change(home, config, "/keys", asdict(key), lambda keys: keys.add(key))
    answer({"id": key_id, "name": name, "role": role, "key": text}, text, as_json=as_json)
    if not as_json:
        note(f"{key_id} {name}: keep it now, it is not shown again")


@keys_app.command("set")
def set_limits(
    key: NameArgument,
    *,
    slo_class: ClassOption = None,
    requests_per_minute: RequestsOption = None,
    concurrent_calls: CallsOption = None,
    concurrent_batches: BatchesOption = None,
    enqueued_tokens: TokensOption = None,
    stored_bytes: BytesOption = None,
    max_weight: WeightOption = None,
    min_deadline: DeadlineOption = None,
    config: ConfigOption = None,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Change limits of a key from now on; those that are not given stay."""
    given = {
        "requests_per_minute": requests_per_minute,
        "concurrent_calls": concurrent_calls,
        "concurrent_batches": concurrent_batches,
        "enqueued_tokens": enqueued_tokens,
        "stored_bytes": stored_bytes,
        "max_weight": max_weight,
        "min_deadline_s": min_deadline,
    }
    values: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    if slo_class is not None:
        values["slo_class"] = _checked_class(slo_class, config)
    if not values:
        raise InputError("give at least one limit, or --class")
    path = f"/keys/{quote(key, safe='')}/set"
    done = _change(home, config, path, values, lambda keys: keys.change(key, values))
    answer(done, f"changed {done['id']} {done['name']}", as_json=as_json)


def _checked_class(name: str | None, config: Path | None) -> str | None:
    """The class as the store keeps it. Raises InputError for one that there is not."""
    classes = read_deployment(config).slo_classes
    if name is None or name == DEFAULT_CLASS:
        return None
    if name not in classes:
        known = f"it has {', '.join(classes)}" if classes else "it has none"
        raise InputError(f"--class {name}: not under `slo_classes` in batchrun.yaml; {known}")
    return name


@keys_app.command("list")
def list_keys(
    *, config: ConfigOption = None, home: HomeOption, as_json: JsonOption = False
) -> None:
    """Show the keys, their limits, and what ended batches and online calls have used."""
    keys: list[dict[str, Any]] = []
    defaults = limits_in(read_deployment(config))
    if home.has_store:
        with closing(open_store(home.store_location)) as store:
            online = online_usage(store, home.key_usage)
            used, stored = api_keys.usage(store), files.stored_by_owner(store, now_s=time.time())
            for key in api_keys.list_all(store):
                batches = used.get(key.id, api_keys.KeyUsage(0, Counts()))
                keys.append({
                    "id": key.id,
                    "name": key.name,
                    "role": key.role,
                    "class": key.slo_class,
                    "limits": asdict(api_keys.limits_of(key, defaults)),
                    "created_at": key.created_at,
                    "revoked_at": key.revoked_at,
                    "batches": batches.num_batches,
                    "usage": asdict(batches.counts),
                    "stored_bytes": stored.get(key.id, 0),
                    "online": asdict(online[key.seq]),
                })
    shown: RenderableType = "no keys any more: nobody is let in until `keys create` makes one"
    if asks_for_none(home.api_keys):
        shown = "no keys; from the first one on, every call needs one"
    if keys:
        shown = columns(
            "id", "name", "role", "class", "limits", "bytes stored", "batches", "their tokens",
            "online calls", "their tokens", "state",
            rows=map(_cells, keys),
        )  # fmt: skip
    answer({"keys": keys}, shown, as_json=as_json)


def _cells(key: dict[str, Any]) -> Iterator[str]:
    used, online = key["usage"], key["online"]
    yield from (key["id"], key["name"], key["role"], key["class"] or "-")
    yield "\n".join(limit_lines(key["limits"])) or "-"
    yield figure(key["stored_bytes"])
    yield figure(key["batches"])
    yield figure(used["num_prompt_tokens"] + used["num_output_tokens"])
    yield figure(online["num_calls"])
    yield figure(online["num_prompt_tokens"] + online["num_output_tokens"])
    yield "active" if key["revoked_at"] is None else "revoked"


@keys_app.command()
def revoke(
    key: NameArgument, *, config: ConfigOption = None, home: HomeOption, as_json: JsonOption = False
) -> None:
    """Refuse a key from now on. Its files and batches stay, and running batches go on."""
    path = f"/keys/{quote(key, safe='')}/revoke"
    done = _change(home, config, path, {}, lambda keys: keys.revoke(key))
    answer(done, f"revoked {done['id']} {done['name']}", as_json=as_json)


def _change(
    home: Home,
    config: Path | None,
    path: str,
    document: Mapping[str, object],
    alone: Callable[[KeyList], api_keys.ApiKeyRecord],
) -> dict[str, Any]:
    """Let the daemon do it; where none runs, do it `alone`. Gateways, which may run without one,
    know it when this returns."""
    try:
        done = DaemonClient(home).post(path, document)
    except DaemonUnavailableError:
        deployment = read_deployment(config)
        home.create()
        with (
            StoreLock(home.store_lock, wait_s=LOCK_WAIT_S),
            closing(open_for(home, deployment.store_url or home.recorded_store_url)) as store,
        ):
            key = alone(KeyList(store, home.api_keys, limits_in(deployment)))
        done = {"id": key.id, "name": key.name}
    if home.gateway_process.exists():
        # A change that a leader elsewhere made, the daemon here has to hear of first.
        time.sleep(GATEWAYS_LEARN_S + (2 * HEARD_S if home.store_url_file.exists() else 0.0))
    return done
