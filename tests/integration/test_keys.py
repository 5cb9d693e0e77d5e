"""API keys as their holders and the operator meet them: one deployment, several keys."""

from __future__ import annotations

import json
import re
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from batch_rig import (
    DAY_S,
    MODEL,
    Caller,
    chat_line,
    chat_lines,
    check_error,
    connect,
    offline_work_held,
)
from deployment_rig import DeploymentRig
from raw_http import RawHttp, Reply

from benchmarks.deployment import free_port

PER_MINUTE = 5
WAIT_S = 120.0


@dataclass(frozen=True)
class Keyed:
    """A deployment that asks for keys, and the texts of those that it has, by name."""

    rig: DeploymentRig
    keys: dict[str, str]

    def make(self, name: str, *options: str) -> dict[str, Any]:
        """A new key; what `keys create` says."""
        made = self.rig.ask("keys", "create", name, *options)
        self.keys[name] = made["key"]
        return made

    def get(self, name: str, path: str) -> Reply:
        """GET with a key."""
        headers = {"Authorization": f"Bearer {self.keys[name]}"}
        return RawHttp(self.rig.port).call("GET", path, headers=headers)


@pytest.fixture(scope="module")
def keyed(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Keyed]:
    rig = DeploymentRig(tmp_path_factory.mktemp("keyed"))
    if request.config.getoption("--store") == "postgresql":
        rig.store_url = request.getfixturevalue("postgres").new_database()
    classes = {"chat": {"ttft_s": 0.2}}
    rig.use_fake_engine(f"--model={MODEL}", gateway_workers=2, slo_classes=classes)
    made = Keyed(rig, {})
    made.make("team-a")
    made.make("team-b")
    made.make("ops", "--role", "admin")
    rig.ask("up", "-d")
    yield made
    rig.close()


@pytest.fixture
def team_a(keyed: Keyed) -> Iterator[Caller]:
    with connect(keyed.rig.port, api_key=keyed.keys["team-a"]) as caller:
        yield caller


def test_an_admin_sees_what_a_key_made_and_another_key_does_not(
    keyed: Keyed, team_a: Caller
) -> None:
    batch = team_a.run([chat_line("a")])
    ids = {str(batch.input_file_id), str(batch.output_file_id)}
    with connect(keyed.rig.port, api_key=keyed.keys["ops"]) as admin:
        assert batch.id in [seen.id for seen in admin.batches.list()]
        assert ids <= {file.id for file in admin.files.list()}
        assert admin.run(batch.input_file_id).status == "completed"
    with connect(keyed.rig.port, api_key=keyed.keys["team-b"]) as other:
        assert [*other.files.list(), *other.batches.list()] == []
        with pytest.raises(openai.NotFoundError):
            other.batches.list(after=batch.id)
        with pytest.raises(openai.NotFoundError):
            other.files.list(after=batch.input_file_id)


def test_an_idempotency_key_belongs_to_its_api_key(keyed: Keyed, team_a: Caller) -> None:
    twice = {"extra_headers": {"Idempotency-Key": "same"}}
    first = team_a.create([chat_line("a")], **twice)
    with connect(keyed.rig.port, api_key=keyed.keys["team-b"]) as other:
        assert other.create([chat_line("a")], **twice).id != first.id
    assert team_a.create(first.input_file_id, **twice).id == first.id


def test_metrics_are_for_admins_and_health_for_all(keyed: Keyed) -> None:
    assert keyed.get("team-a", "/metrics").status == 403
    assert keyed.get("ops", "/metrics").status == 200
    assert RawHttp(keyed.rig.port).get("/healthz").status == 200
    assert RawHttp(keyed.rig.port).get("/metrics").status == 401


def test_requests_beyond_the_limit_get_429_whichever_worker_takes_them(keyed: Keyed) -> None:
    keyed.make("slow", "--requests-per-minute", str(PER_MINUTE))
    replies = [keyed.get("slow", "/v1/models") for _ in range(PER_MINUTE + 3)]
    assert [reply.status for reply in replies] == [200] * PER_MINUTE + [429] * 3
    left = [reply.headers["x-ratelimit-remaining-requests"] for reply in replies]
    assert left == [str(num) for num in range(PER_MINUTE - 1, -1, -1)] + ["0"] * 3
    assert {reply.headers["x-ratelimit-limit-requests"] for reply in replies} == {str(PER_MINUTE)}
    error = replies[-1].json["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "requests",
        "rate_limit_exceeded",
        None,
    )
    assert 0 < int(replies[-1].headers["retry-after"]) <= 60 / PER_MINUTE
    with connect(keyed.rig.port, api_key=keyed.keys["slow"], max_retries=0) as caller:
        with pytest.raises(openai.RateLimitError) as refused:
            caller.files.list()
        assert refused.value.code == "rate_limit_exceeded"


def test_calls_at_once_are_limited_whichever_worker_takes_them(keyed: Keyed) -> None:
    keyed.make("narrow", "--concurrent-calls", "2")
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {keyed.keys['narrow']}\r\nContent-Length: 100\r\n\r\n"
    )
    hello: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    with ExitStack() as exits:
        for _ in range(2):
            call = socket.create_connection(("127.0.0.1", keyed.rig.port), timeout=WAIT_S)
            exits.enter_context(call).sendall(head.encode())
        with connect(keyed.rig.port, api_key=keyed.keys["narrow"], max_retries=0) as caller:
            deadline_s = time.monotonic() + WAIT_S
            refused: openai.RateLimitError | None = None
            while refused is None and time.monotonic() < deadline_s:
                try:
                    caller.api.chat.completions.create(**hello)
                except openai.RateLimitError as error:
                    refused = error
            assert refused is not None
            assert (refused.code, refused.response.headers["retry-after"]) == (
                "rate_limit_exceeded",
                "1",
            )
            assert caller.models.list().data
    with connect(keyed.rig.port, api_key=keyed.keys["narrow"], max_retries=60) as caller:
        assert caller.api.chat.completions.create(**hello).choices


def test_limits_of_a_key_change_while_the_deployment_runs(keyed: Keyed) -> None:
    keyed.make("changing", "--stored-bytes", "10")
    with connect(keyed.rig.port, api_key=keyed.keys["changing"], max_retries=0) as caller:
        with pytest.raises(openai.RateLimitError, match="may store 10 bytes"):
            caller.upload([chat_line("a")])
        done = keyed.rig.ask("keys", "set", "changing", "--stored-bytes", "none", "--max-weight=3")
        assert done["name"] == "changing"
        more = {"extra_body": {"batchrun": {"weight": 3}}}
        assert caller.run(caller.upload([chat_line("a")]).id, **more).status == "completed"
    listed = {key["name"]: key["limits"] for key in keyed.rig.ask("keys", "list")["keys"]}
    assert listed["changing"]["max_weight"] == 3
    assert listed["changing"]["concurrent_batches"] == 100
    assert keyed.rig.refuse("keys", "set", "changing")[0] == 2
    assert "not a number from 1" in keyed.rig.call("keys", "set", "a", "--stored-bytes=-1").stderr


def test_a_user_key_may_not_take_the_class_of_others(keyed: Keyed) -> None:
    hello: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    tighter: Any = {"extra_headers": {"x-batchrun-class": "chat"}}
    other = connect(keyed.rig.port, api_key=keyed.keys["team-b"])
    refused = pytest.raises(openai.BadRequestError, match="tighter bounds than 'default'")
    with other as caller, refused:
        caller.api.chat.completions.create(**hello, **tighter)
    with connect(keyed.rig.port, api_key=keyed.keys["ops"]) as admin:
        assert admin.api.chat.completions.create(**hello, **tighter).choices


def test_batches_at_once_are_limited(keyed: Keyed) -> None:
    keyed.make("few", "--concurrent-batches", "1")
    with connect(keyed.rig.port, api_key=keyed.keys["few"]) as caller:
        with offline_work_held(keyed.rig):
            first = caller.create([chat_line("a")])
            asked = len(caller.requests)
            with pytest.raises(openai.RateLimitError) as refused:
                caller.create(first.input_file_id)
            assert refused.value.code == "rate_limit_exceeded"
            assert len(caller.requests) == asked + 1
        caller.wait_until_ended(first.id)
        assert caller.run(first.input_file_id).status == "completed"


@pytest.mark.parametrize(
    ("name", "value", "bound"), [("weight", 1e6, "at most 1"), ("deadline", "1h", "at least 24h")]
)
def test_only_an_admin_key_may_put_a_batch_before_those_of_others(
    keyed: Keyed, team_a: Caller, name: str, value: object, bound: str
) -> None:
    file_id = team_a.upload([chat_line("a")]).id
    more = {"extra_body": {"batchrun": {name: value}}}
    with pytest.raises(openai.BadRequestError) as refused:
        team_a.create(file_id, **more)
    check_error(refused.value, code="invalid_value", param=f"batchrun.{name}")
    assert f"must be {bound} with a user key" in refused.value.message
    assert "an admin key may" in refused.value.message
    with connect(keyed.rig.port, api_key=keyed.keys["ops"]) as admin:
        assert admin.run(file_id, **more).status == "completed"


def test_tokens_at_once_are_limited(keyed: Keyed) -> None:
    lines = chat_lines(10)
    keyed.make("small", "--enqueued-tokens", "600")
    with connect(keyed.rig.port, api_key=keyed.keys["small"]) as caller:
        with offline_work_held(keyed.rig):
            first = caller.create(lines)
            caller.wait_for_status(first.id, "in_progress")
            second = caller.wait_for_status(caller.create(first.input_file_id).id, "failed")
        assert second.errors is not None and second.errors.data is not None
        (error,) = second.errors.data
        assert (error.code, error.param, error.line) == ("token_limit_exceeded", None, None)
        assert error.message == (
            f"Enqueued token limit reached for {MODEL} in organization batchrun. Limit: 600 "
            "enqueued tokens. Please try again once some in_progress batches have been completed."
        )
        caller.wait_until_ended(first.id)
        assert caller.run(first.input_file_id).status == "completed"


@pytest.mark.slow
def test_a_revoked_key_is_refused_and_its_batch_goes_on(keyed: Keyed) -> None:
    keyed.make("leaver")
    leaver = connect(keyed.rig.port, api_key=keyed.keys["leaver"], max_retries=0)
    with leaver as caller, offline_work_held(keyed.rig):
        batch = caller.create([chat_line("a")])
        assert keyed.rig.ask("keys", "revoke", "leaver")["name"] == "leaver"
        with pytest.raises(openai.AuthenticationError):
            caller.batches.retrieve(batch.id)
    with connect(keyed.rig.port, api_key=keyed.keys["ops"]) as admin:
        assert admin.wait_until_ended(batch.id).status == "completed"
    assert keyed.rig.refuse("keys", "revoke", "leaver")[0] == 4
    assert keyed.rig.refuse("keys", "revoke", "nobody")[0] == 2


def test_files_of_a_key_go_whatever_they_are_for_and_are_shown(
    keyed: Keyed, team_a: Caller
) -> None:
    file = team_a.upload(b"anything", purpose="user_data")
    assert file.expires_at == file.created_at + 30 * DAY_S

    page = keyed.get("ops", "/metrics").body.decode()

    found = dict(re.findall(r'batchrun_key_(\w+)\{(?:direction="up",)?key="team-a"\} (\S+)', page))
    assert float(found["stored_bytes"]) >= len(b"anything")
    assert (float(found["max_stored_bytes"]), float(found["transfers"])) == (100 << 30, 0)


def test_a_key_that_has_stored_what_it_may_makes_no_more_batches(keyed: Keyed) -> None:
    keyed.make("full")
    with connect(keyed.rig.port, api_key=keyed.keys["full"], max_retries=0) as caller:
        file = caller.upload([chat_line("a")])
        keyed.rig.ask("keys", "set", "full", "--stored-bytes", "1")
        with pytest.raises(openai.RateLimitError, match="delete files that you do not need"):
            caller.create(file.id)


def test_the_list_shows_limits_and_what_was_used(keyed: Keyed, team_a: Caller) -> None:
    done = team_a.run([chat_line("a")])
    hello: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    before = keyed.rig.ask("keys", "list")["keys"][0]["online"]
    whole = team_a.api.chat.completions.create(**hello).usage
    *_, last = team_a.api.chat.completions.create(
        **hello, stream=True, stream_options={"include_usage": True}
    )
    assert whole is not None and last.usage is not None
    assert done.usage is not None
    listed = {key["name"]: key for key in keyed.rig.ask("keys", "list")["keys"]}
    assert listed["ops"]["role"] == "admin"
    assert listed["team-a"]["usage"]["num_prompt_tokens"] >= done.usage.input_tokens
    online = listed["team-a"]["online"]
    assert {name: online[name] - before[name] for name in online} == {
        "num_calls": 2,
        "num_prompt_tokens": whole.prompt_tokens + last.usage.prompt_tokens,
        "num_output_tokens": whole.completion_tokens + last.usage.completion_tokens,
    }
    shown = keyed.rig.call("keys", "list").stdout
    assert "team-a" in shown and not any(text in shown for text in keyed.keys.values())


def test_keys_stand_in_no_log_and_no_file(keyed: Keyed, team_a: Caller) -> None:
    wrong = keyed.keys["team-a"][:-1] + "~"
    with connect(keyed.rig.port, api_key=wrong, max_retries=0) as caller:
        with pytest.raises(openai.AuthenticationError) as refused:
            caller.batches.list()
        assert keyed.keys["team-a"][:30] not in str(refused.value.body)
    team_a.run([chat_line("a")])
    for path in keyed.rig.folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        secrets = [text.encode()[-43:] for text in (*keyed.keys.values(), wrong)]
        assert not any(secret in content for secret in secrets), path
    key_file = keyed.rig.home / "run" / "api-keys.json"
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600


@pytest.mark.slow
def test_keys_hold_while_the_daemon_is_away(keyed: Keyed, team_a: Caller) -> None:
    keyed.rig.kill("daemon")
    try:
        assert [model.id for model in team_a.models.list()] == [MODEL]
        assert RawHttp(keyed.rig.port).get("/v1/models").status == 401
        keyed.make("brief")
        assert keyed.get("brief", "/v1/models").status == 200
        keyed.rig.ask("keys", "revoke", "brief")
        assert keyed.get("brief", "/v1/models").status == 401
    finally:
        keyed.rig.ask("up", "-d")
    assert team_a.run([chat_line("a")]).status == "completed"


def test_a_name_is_taken_once_and_must_be_one(keyed: Keyed) -> None:
    code, line = keyed.rig.refuse("keys", "create", "team-a")
    assert (code, "there is a key 'team-a' already" in line) == (2, True)
    code, line = keyed.rig.refuse("keys", "create", "../a")
    assert (code, "NAME must be 1 to 64 letters" in line) == (2, True)
    code, line = keyed.rig.refuse("keys", "create", "b", "--class", "none")
    assert (code, "not under `slo_classes` in batchrun.yaml; it has chat" in line) == (2, True)
    keyed.make("chat", "--class", "chat")
    assert "no such key" in keyed.rig.refuse("keys", "revoke", "my key")[1]


@pytest.mark.slow
def test_a_public_address_needs_a_key_first(rig: DeploymentRig) -> None:
    rig.use_fake_engine(f"--model={MODEL}")
    document = json.loads((rig.folder / "batchrun.yaml").read_text())
    rig.port = free_port()
    path: Path = rig.folder / "batchrun.yaml"
    path.write_text(json.dumps({**document, "listen": f"0.0.0.0:{rig.port}"}))
    code, line = rig.refuse("up", "-d")
    assert (code, "make one with `batchrun keys create NAME`" in line) == (4, True)
    key = str(rig.ask("keys", "create", "mine")["key"])
    rig.ask("up", "-d")
    with connect(rig.port, api_key=key) as caller:
        assert [model.id for model in caller.models.list()] == [MODEL]
    assert RawHttp(rig.port).get("/v1/models").status == 401
