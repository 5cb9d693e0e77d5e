"""The door of an engine: its secret is asked for on every route but `/health`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_builders import fake_settings

from batchrun.config import Deployment
from batchrun.daemon.plugin import attached_key, read_or_make_key
from batchrun.engine import process
from batchrun.engine.command import build_env, prepare_command
from batchrun.engine.door import KEY_VARIABLE, EngineDoor, Message
from batchrun.engine.engine import ManagedEngine
from batchrun.engine_config import EngineConfig
from batchrun.errors import ConfigError, EngineError
from batchrun.home import Home

KEY = "a-secret"


async def answer_of(door: EngineDoor, kind: str, path: str, *headers: tuple[bytes, bytes]) -> int:
    """The status of a call; that of the application behind the door is 200."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    await door({"type": kind, "path": path, "headers": headers}, receive, send)
    return int(sent[0].get("status", 0) or sent[0].get("code", 0))


async def application(_scope: Message, _receive: object, send: object) -> None:
    assert callable(send)
    await send({"type": "http.response.start", "status": 200})


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> EngineDoor:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    return EngineDoor(application)


@pytest.mark.parametrize("path", ["/v1/models", "/invocations", "/tokenize", "/metrics", "/", ""])
async def test_every_route_asks_for_the_secret(door: EngineDoor, path: str) -> None:
    wrong = (b"authorization", b"Bearer another")
    right = (b"authorization", f"Bearer {KEY}".encode())

    assert await answer_of(door, "http", path) == 401
    assert await answer_of(door, "http", path, wrong) == 401
    assert await answer_of(door, "websocket", path) == 1008
    assert await answer_of(door, "http", path, right) == 200


async def test_whether_the_engine_lives_anybody_may_ask(door: EngineDoor) -> None:
    assert await answer_of(door, "http", "/health") == 200
    assert await answer_of(door, "lifespan", "") == 200


def test_the_secret_is_no_argument_and_no_other_wins_over_it(tmp_path: Path) -> None:
    settings = fake_settings(tmp_path, api_key=KEY, env={KEY_VARIABLE: "another"})

    command = prepare_command(settings)

    assert command.env[KEY_VARIABLE] == KEY
    assert KEY not in " ".join(command.argv) and KEY not in repr(settings)
    assert KEY_VARIABLE not in build_env(replace(settings, api_key=None, env={}), {})
    with pytest.raises(EngineError, match="--api-key: batchrun gives an engine a key of its own"):
        prepare_command(replace(settings, command=None, vllm_args=("--api_key=x",), model="tiny"))


async def test_an_engine_with_another_secret_is_not_adopted_but_replaced(tmp_path: Path) -> None:
    first = ManagedEngine(fake_settings(tmp_path, api_key="one"))
    await first.start()
    record = process.read_record(first.settings.record_path)
    same = ManagedEngine(first.settings)
    await same.start()
    assert process.read_record(first.settings.record_path) == record
    assert await same.client.models() == ("fake",)

    other = ManagedEngine(replace(first.settings, api_key="two"))
    await other.start()
    assert process.read_record(first.settings.record_path) != record
    assert await other.client.models() == ("fake",)
    with pytest.raises(EngineError, match="HTTP 401"):
        await first.client.models()
    for engine in (first, same):
        await engine.client.close()
    await other.stop()


def test_a_secret_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    home = Home(tmp_path)

    key = read_or_make_key(home, "0")

    assert read_or_make_key(home, "0") == key != read_or_make_key(home, "1")
    assert home.engine_key("0").stat().st_mode & 0o777 == 0o600


def test_the_key_of_an_attached_engine_may_stand_in_a_file(tmp_path: Path) -> None:
    config = EngineConfig(attach="http://h:1", api_key_file="./~key")
    deployment = Deployment(base=tmp_path, engines=(config,))
    with pytest.raises(ConfigError, match="key cannot be read: No such file"):
        attached_key(deployment, config)
    (tmp_path / "~key").write_text("two\nlines\n")
    with pytest.raises(ConfigError, match="holds no key in one line"):
        attached_key(deployment, config)
    (tmp_path / "~key").write_text("sk-theirs\n")

    assert attached_key(deployment, config) == "sk-theirs"
