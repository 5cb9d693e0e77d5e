"""The `keys` commands: who may call the API, and how much."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

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
from batchrun.config import checked_name
from batchrun.control.client import DaemonClient
from batchrun.control.starting import read_deployment
from batchrun.daemon.supervisor import KeyList
from batchrun.errors import DaemonUnavailableError, InputError
from batchrun.files import StoreLock
from batchrun.home import Home
from batchrun.keys import UsageFile, digest, new_key
from batchrun.store import api_keys, files
from batchrun.store.database import open_store
from batchrun.store.jobs import Counts
from batchrun.store.place import open_for

LOCK_WAIT_S = 5.0
GATEWAYS_LEARN_S = 0.5
"""Gateways look at the list of keys four times a second."""

keys_app = command_group("Create, list and revoke API keys.")


@keys_app.command()
def create(
    name: Annotated[str, typer.Argument(help="A name to know the key by.")],
    *,
    role: Annotated[
        Literal["user", "admin"],
        typer.Option(help="`admin` sees everybody's files and batches, and /metrics."),
    ] = "user",
    slo_class: Annotated[
        str | None, typer.Option("--class", help="SLO class of its online calls.")
    ] = None,
    requests_per_minute: Annotated[
        int | None,
        typer.Option(
            min=1, max=api_keys.MAX_COUNT, help="Most requests in a minute. [default: no limit]"
        ),
    ] = None,
    enqueued_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=api_keys.MAX_TOKENS,
            help="Most prompt tokens in batches at once. [default: no limit]",
        ),
    ] = None,
    concurrent_batches: Annotated[
        int | None,
        typer.Option(
            min=1, max=api_keys.MAX_COUNT, help="Most batches at once. [default: no limit]"
        ),
    ] = None,
    stored_bytes: Annotated[
        int | None,
        typer.Option(
            min=1, max=api_keys.MAX_TOKENS, help="Most bytes in files. [default: no limit]"
        ),
    ] = None,
    config: ConfigOption = None,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Make an API key and show it, this one time: batchrun keeps only its hash.

    From the first key on, every call needs one.
    """
    try:
        checked_name(name)
    except ValueError as error:
        raise InputError(f"NAME {error}") from None
    classes = read_deployment(config).slo_classes
    if slo_class is not None and slo_class not in classes:
        known = f"it has {', '.join(classes)}" if classes else "it has none"
        raise InputError(f"--class {slo_class}: not under `slo_classes` in batchrun.yaml; {known}")
    key_id, text = new_key()
    limits = api_keys.KeyLimits(
        requests_per_minute, enqueued_tokens, concurrent_batches, stored_bytes
    )
    key = api_keys.NewApiKey(key_id, name, role, digest(text), slo_class, limits)
    _change(home, config, "/keys", asdict(key), lambda keys: keys.add(key))
    answer({"id": key_id, "name": name, "role": role, "key": text}, text, as_json=as_json)
    if not as_json:
        note(f"{key_id} {name}: keep it now, it is not shown again")


@keys_app.command("list")
def list_keys(*, home: HomeOption, as_json: JsonOption = False) -> None:
    """Show the keys, their limits, and what ended batches and online calls have used."""
    keys: list[dict[str, Any]] = []
    if home.has_store:
        with (
            closing(open_store(home.store_location)) as store,
            closing(UsageFile(home.key_usage)) as online,
        ):
            used = api_keys.usage(store)
            for key in api_keys.list_all(store):
                batches = used.get(key.id, api_keys.KeyUsage(0, Counts()))
                keys.append({
                    "id": key.id,
                    "name": key.name,
                    "role": key.role,
                    "class": key.slo_class,
                    "limits": asdict(key.limits),
                    "created_at": key.created_at,
                    "revoked_at": key.revoked_at,
                    "batches": batches.num_batches,
                    "usage": asdict(batches.counts),
                    "stored_bytes": files.stored_bytes(store, key.id, now_s=time.time()),
                    "online": asdict(online.read(key.seq)),
                })
    shown: RenderableType = "no keys: nobody is asked for one"
    if keys:
        shown = columns(
            "id", "name", "role", "class", "requests/min", "tokens at once", "batches at once",
            "bytes at most", "bytes stored", "batches", "their tokens", "online calls",
            "their tokens", "state",
            rows=map(_cells, keys),
        )  # fmt: skip
    answer({"keys": keys}, shown, as_json=as_json)


def _cells(key: dict[str, Any]) -> Iterator[str]:
    used, online = key["usage"], key["online"]
    yield from (key["id"], key["name"], key["role"], key["class"] or "-")
    yield from map(figure, key["limits"].values())
    yield figure(key["stored_bytes"])
    yield figure(key["batches"])
    yield figure(used["num_prompt_tokens"] + used["num_output_tokens"])
    yield figure(online["num_calls"])
    yield figure(online["num_prompt_tokens"] + online["num_output_tokens"])
    yield "active" if key["revoked_at"] is None else "revoked"


@keys_app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="Id or name of the key.")],
    *,
    config: ConfigOption = None,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Refuse a key from now on. Its files and batches stay, and running batches go on."""
    done = _change(home, config, f"/keys/{key}/revoke", {}, lambda keys: keys.revoke(key))
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
            closing(open_for(home, deployment.store_url)) as store,
        ):
            key = alone(KeyList(store, home.api_keys))
        done = {"id": key.id, "name": key.name}
    if home.gateway_process.exists():
        time.sleep(GATEWAYS_LEARN_S)
    return done
