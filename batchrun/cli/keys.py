"""The `keys` commands: who may call the API, and how much."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from batchrun.api_keys import digest, new_key
from batchrun.cli.console import note, out, print_json, say
from batchrun.cli.daemon_client import DaemonClient
from batchrun.cli.options import ConfigOption, HomeOption, JsonOption
from batchrun.config import load_deployment, load_home
from batchrun.config.values import checked_name
from batchrun.errors import DaemonUnavailableError, InputError
from batchrun.home import Home
from batchrun.store import Store, StoreLock, api_keys, open_for, open_to_read
from batchrun.store.api_keys import ApiKeyRecord, KeyLimits, KeyUsage, NewApiKey

LOCK_WAIT_S = 5.0
GATEWAYS_LEARN_S = 0.5
"""Gateways look at the list of keys four times a second."""

keys_app = typer.Typer(
    help="Create, list and revoke API keys.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


class RoleName(StrEnum):
    """What a key may see: its own files and batches, or everybody's, and `/metrics`."""

    USER = "user"
    ADMIN = "admin"


@keys_app.command()
def create(
    name: Annotated[str, typer.Argument(help="A name to know the key by.")],
    *,
    role: Annotated[
        RoleName, typer.Option(help="`admin` sees everybody's files and batches, and /metrics.")
    ] = RoleName.USER,
    slo_class: Annotated[
        str | None, typer.Option("--class", help="SLO class of its online calls.")
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Most requests in a minute. [default: no limit]")
    ] = None,
    enqueued_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most prompt tokens in batches at once. [default: no limit]"),
    ] = None,
    concurrent_batches: Annotated[
        int | None, typer.Option(min=1, help="Most batches at once. [default: no limit]")
    ] = None,
    config: ConfigOption = None,
    home_path: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make an API key and show it, this one time: batchrun keeps only its hash.

    From the first key on, every call needs one.
    """
    try:
        checked_name(name)
    except ValueError as error:
        raise InputError(f"NAME {error}") from None
    classes = load_deployment(config).slo_classes
    if slo_class is not None and slo_class not in classes:
        known = f"it has {', '.join(classes)}" if classes else "it has none"
        raise InputError(f"--class {slo_class}: not under `slo_classes` in batchrun.yaml; {known}")
    key_id, text = new_key()
    limits = KeyLimits(requests_per_minute, enqueued_tokens, concurrent_batches)
    key = NewApiKey(key_id, name, role.value, digest(text), slo_class, limits)
    home = load_home(home_path)

    def add(store: Store) -> Mapping[str, object]:
        return {"id": api_keys.add(store, key, now_s=time.time()).id}

    _change(home, config, "/keys", asdict(key), add)
    if as_json:
        print_json({"id": key_id, "name": name, "role": role.value, "key": text})
        return
    say(text)
    note(f"{key_id} {name}: keep it now, it is not shown again")


@keys_app.command("list")
def list_keys(*, home_path: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show the keys, their limits, and what the batches of each have used."""
    home = load_home(home_path)
    if not home.has_store:
        keys: Sequence[ApiKeyRecord] = []
        used: Mapping[str, KeyUsage] = {}
    else:
        with closing(open_to_read(home.store_location)) as store:
            keys, used = api_keys.list_all(store), api_keys.usage(store)
    if as_json:
        print_json({"keys": [_as_json(key, used.get(key.id)) for key in keys]})
    elif not keys:
        say("no keys: nobody is asked for one")
    else:
        out.print(_table(keys, used), markup=False)


@keys_app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="Id or name of the key.")],
    *,
    config: ConfigOption = None,
    home_path: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Refuse a key from now on. Its files and batches stay, and running batches go on."""
    home = load_home(home_path)

    def end(store: Store) -> Mapping[str, object]:
        revoked = api_keys.revoke(store, key, now_s=time.time())
        return {"id": revoked.id, "name": revoked.name}

    done = _change(home, config, f"/keys/{key}/revoke", {}, end)
    if as_json:
        print_json(done)
    else:
        say(f"revoked {done['id']} {done['name']}")


def _change(
    home: Home,
    config: Path | None,
    path: str,
    document: Mapping[str, object],
    alone: Callable[[Store], Mapping[str, object]],
) -> Mapping[str, object]:
    """Let the daemon do it, and its gateways learn it; where none runs, do it `alone`."""
    try:
        done = DaemonClient(home).post(path, document)
    except DaemonUnavailableError:
        deployment = load_deployment(config)
        home.create()
        with (
            StoreLock(home.store_lock, wait_s=LOCK_WAIT_S),
            closing(open_for(home, deployment.store_url)) as store,
        ):
            return alone(store)
    time.sleep(GATEWAYS_LEARN_S)
    return done


def _as_json(key: ApiKeyRecord, used: KeyUsage | None) -> dict[str, object]:
    return {
        "id": key.id,
        "name": key.name,
        "role": key.role,
        "class": key.slo_class,
        "limits": asdict(key.limits),
        "created_at": key.created_at,
        "revoked_at": key.revoked_at,
        "batches": 0 if used is None else used.num_batches,
        "usage": None if used is None else asdict(used.counts),
    }


def _table(keys: Sequence[ApiKeyRecord], used: Mapping[str, KeyUsage]) -> Table:
    table = Table(
        "id", "name", "role", "class", "requests/min", "tokens at once", "batches at once",
        "batches", "prompt tokens", "output tokens", "state", box=None,
    )  # fmt: skip
    for key in keys:
        of_key = used.get(key.id)
        table.add_row(
            key.id,
            key.name,
            key.role,
            key.slo_class or "-",
            *(_number(limit) for limit in asdict(key.limits).values()),
            _number(0 if of_key is None else of_key.num_batches),
            _number(0 if of_key is None else of_key.counts.num_prompt_tokens),
            _number(0 if of_key is None else of_key.counts.num_output_tokens),
            "active" if key.revoked_at is None else "revoked",
        )
    return table


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
