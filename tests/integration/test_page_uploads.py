"""A job from an upload on the page: what a dry run says of it, then a start; and who may not."""

from __future__ import annotations

import io
import json
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import requests
from deployment_rig import WAIT_S, DeploymentRig
from store_builders import execute

CSV = b"key,text\na,Great soup.\nb,Cold and late.\n"
TOKEN = re.compile(r'data-token="(\w+)"')
DRAFT = re.compile(r"/dashboard/uploads/(\w+)")
SCRIPT = "<script>alert(1)</script>"
CALL = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
PROMPT = {"prompt": "{{ text }}"}
BATCH_LINE = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": CALL}


class Person:
    """Somebody at the page of a deployment."""

    def __init__(self, rig: DeploymentRig, key: str | None = None) -> None:
        self.url = f"http://127.0.0.1:{rig.port}/dashboard"
        self.session = requests.Session()
        if key is not None:
            self.session.headers["Authorization"] = f"Bearer {key}"
        found = TOKEN.search(self.session.get(f"{self.url}/jobs").text)
        assert found is not None
        self.token = {"X-Dashboard-Token": found[1]}

    def upload(
        self, file: tuple[str, bytes], fields: Mapping[str, str], *, has_token: bool = True
    ) -> requests.Response:
        headers = self.token if has_token else {}
        return self.session.post(
            f"{self.url}/uploads", files={"file": file}, data=dict(fields), headers=headers
        )

    def press(self, draft: str, button: str) -> requests.Response:
        return self.session.post(f"{self.url}/uploads/{draft}/{button}", headers=self.token)

    def wait(self, draft: str, wanted: Callable[[requests.Response], bool]) -> requests.Response:
        """Look at an upload, as the page does, until it is so."""
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            seen = self.session.get(f"{self.url}/uploads/{draft}")
            if wanted(seen):
                return seen
            time.sleep(0.2)
        raise AssertionError(seen.text)

    def check(self, file: tuple[str, bytes], **fields: str) -> tuple[str, str]:
        """Upload a file; (the draft, what the page says of it)."""
        sent = self.upload(file, fields)
        assert sent.status_code == 200, sent.text
        found = DRAFT.search(sent.text)
        assert found is not None
        return found[1], self.wait(found[1], lambda seen: "every 1s" not in seen.text).text

    def start(self, draft: str) -> str:
        """Start what was checked; the id of the job that the page then leads to."""
        assert self.press(draft, "start").status_code == 200
        seen = self.wait(draft, lambda seen: "HX-Redirect" in seen.headers)
        return seen.headers["HX-Redirect"].rpartition("/")[2]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentRig]:
    made = DeploymentRig(tmp_path_factory.mktemp("uploads"))
    made.use_fake_engine()
    made.ask("up", "-d")
    yield made
    made.close()


@pytest.fixture
def person(rig: DeploymentRig) -> Person:
    return Person(rig)


def test_a_table_with_a_prompt_becomes_a_job_and_its_answers_are_brought_back(
    rig: DeploymentRig, person: Person
) -> None:
    fields = {"prompt": "Praise? {{ text }}", "keep": "key, text", "max_tokens": "9", "name": "two"}
    draft, said = person.check(("re views.csv", CSV), **fields)
    assert "two, /v1/chat/completions; it was not submitted" in said
    assert "<dd>2; prefix groups: 0</dd>" in said
    assert not rig.ask("status")["jobs"]

    job_id = person.start(draft)

    assert rig.wait_until_ended(job_id)["num_completed"] == 2
    answers = person.session.get(f"{person.url}/jobs/{job_id}/output")
    assert answers.headers["Content-Disposition"] == 'attachment; filename="answers.parquet"'
    rows = pq.read_table(io.BytesIO(answers.content)).to_pylist()
    assert [row["text"] for row in rows] == ["Great soup.", "Cold and late."]
    assert all(row["response"] for row in rows)
    assert "Download" in person.session.get(f"{person.url}/jobs/{job_id}").text
    assert person.press(draft, "start").status_code == 409


@pytest.mark.slow
def test_outputs_on_their_way_are_bounded(rig: DeploymentRig, person: Person) -> None:
    draft, _ = person.check(("some.csv", CSV), **PROMPT)
    job = rig.wait_until_ended(person.start(draft))
    url = f"{person.url}/jobs/{job['id']}/output"
    # Neither gateway nor sockets take all of it from the daemon.
    Path(job["output_path"]).write_bytes(bytes(200_000_000))
    daemon = psutil.Process(rig.pid_of("daemon"))
    before = daemon.rlimit(resource.RLIMIT_NOFILE)
    daemon.rlimit(resource.RLIMIT_NOFILE, (64, before[1]))
    try:
        with ExitStack() as exits:
            begun = [
                exits.enter_context(person.session.get(url, stream=True)) for _ in range(64 // 8)
            ]
            refused = person.session.get(url)
            assert [reply.status_code for reply in begun] == [200] * len(begun)
    finally:
        daemon.rlimit(resource.RLIMIT_NOFILE, before)

    assert refused.status_code == 503 and "8 downloads are on their way" in refused.text
    assert int(refused.headers["Retry-After"]) > 0


def test_a_batch_file_needs_no_prompt(rig: DeploymentRig, person: Person) -> None:
    line = json.dumps(BATCH_LINE).encode()
    draft, said = person.check(("calls.jsonl", line), output="jsonl")
    assert "calls, /v1/chat/completions" in said

    job_id = person.start(draft)

    rig.wait_until_ended(job_id)
    answers = person.session.get(f"{person.url}/jobs/{job_id}/output").content
    assert [json.loads(line)["id"] for line in answers.splitlines()] == ["x"]


@pytest.mark.parametrize(
    ("name", "content", "fields", "said"),
    [
        ("a.csv", CSV, {"prompt": "{{ txt }}"}, "prompt: the input has no column &#39;txt&#39;"),
        ("a.csv", CSV, {}, "prompt: is required"),
        ("a.csv", b"\xff\xfe\0", {"prompt": "{{ text }}"}, "input.csv"),
        ("a.jsonl", b"no json", {"prompt": "{{ text }}"}, "input.jsonl"),
        ("a.csv", CSV, {"prompt": "{{ text }}", "model": "another"}, "no engine serves"),
        ("a.csv", CSV, {"prompt": "{{ text }}", "deadline": "soon"}, "deadline"),
        (f"{SCRIPT}.csv", CSV, {"prompt": f"{SCRIPT}{{{{ nothing }}}}"}, "&lt;script&gt;"),
    ],
)
def test_what_would_not_run_is_said_and_cannot_be_started(
    person: Person, name: str, content: bytes, fields: dict[str, str], said: str
) -> None:
    draft, shown = person.check((name, content), **fields)

    assert said in shown and 'role="alert"' in shown
    assert "uploads/" + draft not in shown and "home" not in shown and "<script" not in shown
    assert person.press(draft, "start").status_code == 409


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        (("a.xlsx", b"x"), {}, "one of the kinds .parquet"),
        (("a.csv", b""), {}, "a file that is not empty"),
        (("a.csv", CSV), {"prompt": "x", "max_tokens": "many"}, "a whole number, not 'many'"),
        (("a.csv", CSV), {"on_done": "[touch, /tmp/x]"}, "Unknown parameter: 'on_done'"),
        (("a.csv", CSV), {"output": "../../x"}, "the output is one of parquet, jsonl"),
    ],
)
def test_what_is_no_upload_is_refused_at_once(
    rig: DeploymentRig, person: Person, file: tuple[str, bytes], fields: dict[str, str], said: str
) -> None:
    before = folders(rig)

    reply = person.upload(file, fields)

    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]
    assert folders(rig) == before


def test_nothing_is_taken_from_another_site_s_page(rig: DeploymentRig, person: Person) -> None:
    before = folders(rig)

    assert person.upload(("a.csv", CSV), PROMPT, has_token=False).status_code == 403
    draft, _ = person.check(("a.csv", CSV), prompt="{{ text }}")
    for button in ("start", "discard"):
        reply = requests.post(f"{person.url}/uploads/{draft}/{button}")
        assert reply.status_code == 403
    assert person.press(draft, "discard").status_code == 200

    assert folders(rig) == before
    assert person.session.get(f"{person.url}/uploads/{draft}").status_code == 404


def test_gc_takes_an_upload_with_the_results_of_its_job(rig: DeploymentRig, person: Person) -> None:
    draft, _ = person.check(("a.csv", CSV), prompt="{{ text }}")
    job_id = person.start(draft)
    rig.wait_until_ended(job_id)
    folder = rig.home / "uploads" / draft
    assert (folder / "answers.parquet").exists()
    left = rig.home / "uploads" / "from-long-ago"
    shutil.copytree(folder, left)

    execute(rig.store, "UPDATE jobs SET finished_at = finished_at - 40 * 86400")
    removed = rig.ask("gc", "--older-than", "30d")["inputs"]

    assert str(folder) in removed and not folder.exists()
    assert left.exists()
    assert person.session.get(f"{person.url}/jobs/{job_id}/output").status_code == 404


def folders(rig: DeploymentRig) -> set[Path]:
    """The uploads that are kept."""
    place = rig.home / "uploads"
    return set(place.iterdir()) if place.is_dir() else set()


def test_a_user_key_neither_uploads_nor_looks(tmp_path: Path) -> None:
    rig = DeploymentRig(tmp_path)
    rig.use_fake_engine()
    try:
        admin, user = (
            rig.ask("keys", "create", role, "--role", role)["key"] for role in ("admin", "user")
        )
        rig.ask("up", "-d")
        person, other = Person(rig, admin), Person(rig, user)
        draft, _ = person.check(("a.csv", CSV), prompt="{{ text }}")

        assert "/dashboard/submit" not in other.session.get(f"{other.url}/jobs").text
        assert other.session.get(f"{other.url}/submit").status_code == 403
        assert other.upload(("a.csv", CSV), PROMPT).status_code == 403
        assert other.session.get(f"{other.url}/uploads/{draft}").status_code == 403
        assert other.press(draft, "start").status_code == 403
        job_id = person.start(draft)
        rig.wait_until_ended(job_id)
        assert other.session.get(f"{other.url}/jobs/{job_id}/output").status_code == 403
    finally:
        rig.close()
