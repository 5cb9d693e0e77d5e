"""The page by plain HTTP: who sees what, what may be done from where, what keeps it current."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlencode

import pytest
from batch_rig import MODEL, chat_line, connect
from deployment_rig import DeploymentRig
from raw_http import RawHttp, Reply

from batchrun.server.web.pages import MAX_STREAMS_OF_A_KEY

VIEWS = ("jobs", "submit", "promises", "tide", "memory", "engines", "routing", "plan", "keys")
TOKEN = re.compile(rb'data-token="(\w+)"')
SCRIPT_TEXT = "<script>alert(1)</script>"
WAIT_S = 30.0


class Visitor:
    """A browser without a screen: a cookie, and the token of the page it read last."""

    def __init__(self, port: int) -> None:
        self._http = RawHttp(port)
        self._own = f"http://127.0.0.1:{port}"
        self.cookie: str | None = None

    def call(
        self, method: str, path: str, form: dict[str, str] | None = None, **more: str
    ) -> Reply:
        headers = {name.replace("_", "-"): value for name, value in more.items()}
        if self.cookie is not None:
            headers["Cookie"] = self.cookie
        body = None
        if form is not None:
            body = urlencode(form).encode()
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        return self._http.call(method, f"/dashboard{path}", body, headers)

    def get(self, path: str) -> str:
        """A page that must be there."""
        reply = self.call("GET", path)
        assert reply.status == 200, (path, reply.status, reply.body[:300])
        return reply.body.decode()

    def submit(self, page: str, path: str, form: dict[str, str]) -> Reply:
        """A page's own form, with the `Origin` that the page's referrer policy has a browser
        send."""
        is_hidden = self.call("GET", page).headers["referrer-policy"] == "no-referrer"
        origin = "null" if is_hidden else self._own
        return self.call("POST", path, form, Origin=origin, Sec_Fetch_Site="same-origin")

    def log_in(self, key: str) -> Reply:
        reply = self.submit("/login", "/login", {"key": key})
        if reply.status == 303:
            self.cookie = reply.headers["set-cookie"].split(";")[0]
        return reply

    def act(self, path: str, **form: str) -> Reply:
        """What a button does."""
        token = TOKEN.search(self.call("GET", "/jobs").body)
        assert token is not None
        return self.call("POST", path, form, X_Dashboard_Token=token[1].decode())


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentRig]:
    """A deployment without keys, whose engine takes its time."""
    made = DeploymentRig(tmp_path_factory.mktemp("open"))
    error = {"message": SCRIPT_TEXT, "type": "invalid_request_error", "param": None, "code": None}
    broken = {"status": 400, "body": json.dumps({"error": error})}
    rule = {"match": {"substring": "broken"}, "action": broken}
    made.use_fake_engine("--latency-s=0.2", rules=[rule])
    made.ask("up", "-d")
    yield made
    made.close()


@pytest.fixture
def visitor(rig: DeploymentRig) -> Visitor:
    return Visitor(rig.port)


def test_every_view_is_there_and_lets_no_script_in(visitor: Visitor) -> None:
    for view in VIEWS:
        reply = visitor.call("GET", f"/{view}")
        assert reply.status == 200
        policy = reply.headers["content-security-policy"]
        assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert reply.headers["x-frame-options"] == "DENY"
        assert not re.search(
            rb"<script(?! src=\"/dashboard/static/)|<style| style=| on\w+=", reply.body
        )


def test_files_of_the_page_are_those_of_its_folder(visitor: Visitor) -> None:
    assert "htmx" in visitor.get("/static/htmx.min.js")
    for name in ("nothing.js", "../pages.py", "..%2fpages.py", "LICENSES.txt"):
        assert visitor.call("GET", f"/static/{name}").status == 404


def test_without_keys_names_of_other_machines_get_nothing(visitor: Visitor) -> None:
    assert visitor.call("GET", "/jobs", Host="localhost:1").status == 200
    refused = visitor.call("GET", "/jobs", Host="evil.example")
    assert refused.status == 403
    assert b"keys create" in refused.body


def test_a_job_is_paused_resumed_and_cancelled_from_the_page(
    rig: DeploymentRig, visitor: Visitor
) -> None:
    job = rig.submit_rows(*(f"question {i}" for i in range(3000)))
    rig.wait_for(job, lambda view: view["state"] == "running")

    for action, state in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelling")):
        reply = visitor.act(f"/jobs/{job}/{action}")
        assert (reply.status, f"{job} is {state}." in reply.body.decode()) == (200, True)

    rig.wait_for(job, lambda view: view["state"] == "cancelled")
    refused = visitor.act(f"/jobs/{job}/pause")
    assert refused.status == 409 and 'role="alert"' in refused.body.decode()


def test_the_switch_turns_offline_work_off_and_on(rig: DeploymentRig, visitor: Visitor) -> None:
    for switch in ("off", "on"):
        assert visitor.act("/offline", on=switch).status == 200
        assert rig.ask("status")["offline"] is (switch == "on")


def test_actions_from_elsewhere_are_refused(rig: DeploymentRig, visitor: Visitor) -> None:
    own = f"http://127.0.0.1:{rig.port}"
    token = TOKEN.search(visitor.call("GET", "/jobs").body)
    assert token is not None
    right = {"X_Dashboard_Token": token[1].decode()}

    def switch(**headers: str) -> int:
        return visitor.call("POST", "/offline", {"on": "on"}, **headers).status

    assert switch() == 403
    assert switch(X_Dashboard_Token="0" * 64) == 403
    assert switch(Origin="https://evil.example", **right) == 403
    assert switch(Origin="null", **right) == 403
    assert switch(Sec_Fetch_Site="cross-site", **right) == 403
    assert switch(Origin=own, Sec_Fetch_Site="same-origin", **right) == 200


def test_what_engines_say_stays_text(rig: DeploymentRig, visitor: Visitor) -> None:
    job = rig.submit_rows("broken 1", "broken 2", "fine")
    assert rig.wait_until_ended(job)["num_failed"] == 2

    page = visitor.get(f"/jobs/{job}")

    assert SCRIPT_TEXT not in page + visitor.get("/jobs") + visitor.get("/engines")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert re.search(r"Cut at the token limit</dt><dd>1<", page)
    assert re.search(r"Why rows failed.*<td class=\"num\">2</td>", page, re.DOTALL)


def test_the_stream_tells_what_changed(rig: DeploymentRig, visitor: Visitor) -> None:
    with socket.create_connection(("127.0.0.1", rig.port), timeout=WAIT_S) as stream:
        stream.sendall(b"GET /dashboard/events/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n")
        seen = _read_until(stream, b"", b"event: view")
        job = rig.submit_rows("one")
        _read_until(stream, seen, job.encode())


def _read_until(stream: socket.socket, seen: bytes, wanted: bytes) -> bytes:
    deadline_s = time.monotonic() + WAIT_S
    while wanted not in seen:
        assert time.monotonic() < deadline_s
        piece = stream.recv(65_536)
        assert piece, "the stream ended"
        seen += piece
    return seen


@pytest.mark.parametrize(
    ("method", "path", "header"),
    [
        ("POST", "/login", {"Origin": "http://["}),
        ("POST", "/offline", {"Origin": "http://a]b"}),
        ("GET", "/jobs", {"Host": "["}),
    ],
)
def test_headers_that_are_no_address_are_refused(
    visitor: Visitor, method: str, path: str, header: dict[str, str]
) -> None:
    assert visitor.call(method, path, None, **header).status == 403


@pytest.fixture(scope="module")
def keyed(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[DeploymentRig, dict[str, str]]]:
    """A deployment with keys, and their texts by name."""
    made = DeploymentRig(tmp_path_factory.mktemp("keyed"))
    made.use_fake_engine(f"--model={MODEL}", gateway_workers=2)
    keys = {
        name: str(made.ask("keys", "create", name, "--role", role)["key"])
        for name, role in (("team-a", "user"), ("team-b", "user"), ("ops", "admin"))
    }
    made.ask("up", "-d")
    yield made, keys
    made.close()


def test_without_a_key_there_is_the_login_form_and_nothing_else(
    keyed: tuple[DeploymentRig, dict[str, str]],
) -> None:
    stranger = Visitor(keyed[0].port)
    for path in ("", "/jobs", "/jobs/x", "/engines", "/events/jobs"):
        reply = stranger.call("GET", path)
        assert (reply.status, reply.headers.get("location")) == (303, "/dashboard/login")
    assert stranger.call("GET", "/jobs", HX_Request="true").status == 401
    assert stranger.call("POST", "/offline", {"on": "off"}).status in {303, 401}
    assert keyed[0].ask("status")["offline"] is True
    assert "API key" in stranger.get("/login")
    wrong = stranger.log_in("sk-br-000000000000-" + "a" * 43)
    assert (
        wrong.status == 401 and b'role="alert"' in wrong.body and "set-cookie" not in wrong.headers
    )


def test_a_session_is_a_strict_cookie_that_holds_no_key(
    keyed: tuple[DeploymentRig, dict[str, str]],
) -> None:
    visitor = Visitor(keyed[0].port)
    cookie = visitor.log_in(keyed[1]["ops"]).headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Path=/dashboard" in cookie
    assert keyed[1]["ops"][-20:] not in cookie
    for _ in range(8):
        assert "Engines up" in visitor.get("/jobs")
    held = str(visitor.cookie)
    visitor.cookie = held[:-1] + ("0" if held[-1] != "0" else "1")
    assert visitor.call("GET", "/jobs").status == 303


def test_a_person_logs_in_and_out_with_the_forms_of_the_page(
    keyed: tuple[DeploymentRig, dict[str, str]],
) -> None:
    visitor = Visitor(keyed[0].port)
    assert visitor.log_in(keyed[1]["ops"]).status == 303
    reply = visitor.submit("/jobs", "/logout", {})
    assert (reply.status, reply.headers["location"]) == (303, "/dashboard/login")
    assert 'batchrun_session=""' in reply.headers["set-cookie"]


def test_a_cookie_of_odd_bytes_is_no_session(
    keyed: tuple[DeploymentRig, dict[str, str]],
) -> None:
    visitor = Visitor(keyed[0].port)
    visitor.log_in(keyed[1]["ops"])
    key_id = str(visitor.cookie).partition("=")[2].partition(".")[0]
    for odd in ("\xff.x", "x.\xff", "\xe9"):
        visitor.cookie = f"batchrun_session={key_id}.{odd}"
        assert visitor.call("GET", "/jobs").status == 303


def test_a_user_key_may_open_so_many_pages(keyed: tuple[DeploymentRig, dict[str, str]]) -> None:
    rig, keys = keyed
    request = (
        "GET /dashboard/events/jobs HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {keys['team-b']}\r\n\r\n"
    )
    with ExitStack() as streams:
        for _ in range(MAX_STREAMS_OF_A_KEY):
            stream = streams.enter_context(
                socket.create_connection(("127.0.0.1", rig.port), timeout=WAIT_S)
            )
            stream.sendall(request.encode())
            _read_until(stream, b"", b"event: view")
        reply = Visitor(rig.port).call(
            "GET", "/events/jobs", Authorization=f"Bearer {keys['team-b']}"
        )
        assert reply.status == 503 and b"pages are open with this key" in reply.body
        ops = Visitor(rig.port)
        assert ops.log_in(keys["ops"]).status == 303
        assert "Engines up" in ops.get("/jobs")


def test_a_user_key_sees_its_own_jobs_alone(keyed: tuple[DeploymentRig, dict[str, str]]) -> None:
    rig, keys = keyed
    ids = {}
    for name in ("team-a", "team-b"):
        with connect(rig.port, api_key=keys[name]) as caller:
            ids[name] = caller.run([chat_line("a")]).id
    one, ops = Visitor(rig.port), Visitor(rig.port)
    assert one.log_in(keys["team-a"]).status == ops.log_in(keys["ops"]).status == 303

    page = one.get("/jobs")

    assert ids["team-a"] in page and ids["team-b"] not in page and "Engines" not in page
    assert ids["team-a"] in one.get(f"/jobs/{ids['team-a']}")
    assert one.call("GET", f"/jobs/{ids['team-b']}").status == 404
    assert one.call("GET", "/events/engines").status == 403
    assert {one.call("GET", f"/{view}").status for view in VIEWS[1:]} == {403}
    assert one.act("/offline", on="off").status == 403
    assert one.act(f"/jobs/{ids['team-b']}/cancel").status == 404
    assert str(rig.home) not in one.get(f"/jobs/{ids['team-a']}")
    while not set(ids.values()) <= set(re.findall(r"batch_\w{32}", ops.get("/jobs"))):
        time.sleep(0.2)  # What a view shows may be a moment old.


def test_a_session_ends_with_its_key(keyed: tuple[DeploymentRig, dict[str, str]]) -> None:
    rig, _ = keyed
    made = rig.ask("keys", "create", "brief")
    visitor = Visitor(rig.port)
    assert visitor.log_in(str(made["key"])).status == 303
    visitor.get("/jobs")

    rig.ask("keys", "revoke", "brief")

    assert visitor.call("GET", "/jobs").status == 303


def test_while_the_daemon_is_away_the_page_says_so(
    keyed: tuple[DeploymentRig, dict[str, str]],
) -> None:
    rig, keys = keyed
    visitor = Visitor(rig.port)
    visitor.log_in(keys["ops"])
    rig.kill("daemon")
    away = visitor.call("GET", "/jobs")
    assert away.status == 503 and b"tries again" in away.body and "refresh" in away.headers
    rig.ask("up", "-d")
    assert "Engines up" in visitor.get("/jobs")
