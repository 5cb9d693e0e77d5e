"""The `keys` commands: who may call the API, and how much."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from batchrun.cli.client import DaemonClient
from batchrun.cli.console import ConfigOption, HomeOption, JsonOption, note, out, print_json, say
from batchrun.cli.deployment import read_deployment
from batchrun.config import checked_name, load_home
from batchrun.daemon.upkeep import KeyList
from batchrun.errors import DaemonUnavailableError, InputError
from batchrun.files import StoreLock
from batchrun.home import Home
from batchrun.keys import OnlineUsage, UsageFile, digest, new_key
from batchrun.store import api_keys
from batchrun.store.api_keys import (
    MAX_COUNT,
    MAX_TOKENS,
    ApiKeyRecord,
    KeyLimits,
    KeyUsage,
    NewApiKey,
)
from batchrun.store.database import open_store
from batchrun.store.jobs import Counts
from batchrun.store.place import open_for

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
        int | None,
        typer.Option(min=1, max=MAX_COUNT, help="Most requests in a minute. [default: no limit]"),
    ] = None,
    enqueued_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_TOKENS, help="Most prompt tokens in batches at once. [default: no limit]"
        ),
    ] = None,
    concurrent_batches: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_COUNT, help="Most batches at once. [default: no limit]"),
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
    classes = read_deployment(config).slo_classes
    if slo_class is not None and slo_class not in classes:
        known = f"it has {', '.join(classes)}" if classes else "it has none"
        raise InputError(f"--class {slo_class}: not under `slo_classes` in batchrun.yaml; {known}")
    key_id, text = new_key()
    limits = KeyLimits(requests_per_minute, enqueued_tokens, concurrent_batches)
    key = NewApiKey(key_id, name, role.value, digest(text), slo_class, limits)
    home = load_home(home_path)

    def add(keys: KeyList) -> Mapping[str, object]:
        return {"id": keys.add(key).id}

    _change(home, config, "/keys", asdict(key), add)
    if as_json:
        print_json({"id": key_id, "name": name, "role": role.value, "key": text})
        return
    say(text)
    note(f"{key_id} {name}: keep it now, it is not shown again")


@keys_app.command("list")
def list_keys(*, home_path: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show the keys, their limits, and what ended batches and online calls have used."""
    home = load_home(home_path)
    shown: list[_Shown] = []
    if home.has_store:
        with closing(open_store(home.store_location)) as store:
            keys, used = api_keys.list_all(store), api_keys.usage(store)
        with closing(UsageFile(home.key_usage)) as online:
            nothing = KeyUsage(0, Counts())
            shown = [_Shown(key, used.get(key.id, nothing), online.read(key.seq)) for key in keys]
    if as_json:
        print_json({"keys": [_as_json(row) for row in shown]})
    elif not shown:
        say("no keys: nobody is asked for one")
    else:
        out.print(_table(shown), markup=False)


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

    def end(keys: KeyList) -> Mapping[str, object]:
        revoked = keys.revoke(key)
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
    alone: Callable[[KeyList], Mapping[str, object]],
) -> Mapping[str, object]:
    """Let the daemon do it; where none runs, do it `alone`. Gateways, which may run without one,
    know it when this returns."""
    done: Mapping[str, object]
    try:
        done = DaemonClient(home).post(path, document)
    except DaemonUnavailableError:
        deployment = read_deployment(config)
        home.create()
        with (
            StoreLock(home.store_lock, wait_s=LOCK_WAIT_S),
            closing(open_for(home, deployment.store_url)) as store,
        ):
            done = alone(KeyList(store, home.api_keys))
    if home.gateway_process.exists():
        time.sleep(GATEWAYS_LEARN_S)
    return done


@dataclass(frozen=True, slots=True)
class _Shown:
    """A key, what its ended batches have used, and what its online calls have."""

    key: ApiKeyRecord
    batches: KeyUsage
    online: OnlineUsage


def _as_json(row: _Shown) -> dict[str, object]:
    key = row.key
    return {
        "id": key.id,
        "name": key.name,
        "role": key.role,
        "class": key.slo_class,
        "limits": asdict(key.limits),
        "created_at": key.created_at,
        "revoked_at": key.revoked_at,
        "batches": row.batches.num_batches,
        "usage": asdict(row.batches.counts),
        "online": asdict(row.online),
    }


def _table(rows: Sequence[_Shown]) -> Table:
    table = Table(
        "id", "name", "role", "class", "requests/min", "tokens at once", "batches at once",
        "batches", "their tokens", "online calls", "their tokens", "state", box=None,
    )  # fmt: skip
    for row in rows:
        key, counts, online = row.key, row.batches.counts, row.online
        table.add_row(
            key.id,
            key.name,
            key.role,
            key.slo_class or "-",
            *(_number(limit) for limit in asdict(key.limits).values()),
            _number(row.batches.num_batches),
            _number(counts.num_prompt_tokens + counts.num_output_tokens),
            _number(online.num_calls),
            _number(online.num_prompt_tokens + online.num_output_tokens),
            "active" if key.revoked_at is None else "revoked",
        )
    return table


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
