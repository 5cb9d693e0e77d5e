"""Odd engines and callers in bad faith, each a small case with the promise that it tests.

    python -m benchmarks.evil [--group engine|caller] [--only WORD] [--json FILE]

Every odd engine answers two rows of a job and two of a batch, beside rows that it answers well, and
an online call. A row ends as its own error or is answered, and its job ends; the rows beside it
have their answers, a job beside it goes on, daemon and gateway live, and every line that is written
is JSON. After every caller in bad faith other callers are served. Exit code 1: something was wrong.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import requests

from benchmarks.deployment import Deployment, answers, free_port, wait_until
from benchmarks.evil_callers import BAD_CALLERS
from benchmarks.evil_engines import ANSWER, MODEL, ODD_ENGINES, STUCK, OddEngine
from benchmarks.evil_scene import CHAT, Scene, until_taken
from benchmarks.records import Bar, Record, finish, parser, shown

NUM_ODD, NUM_WELL = 2, 3
NUM_ROWS = NUM_ODD + NUM_WELL
NUM_BESIDE = 300
ROW_TIMEOUT = "30s"
END_WAIT_S = 900.0
CALL_WAIT_S = 60.0
READ_BYTES = 1 << 20
SETTLE_S = 0.5
ENDED = frozenset({"completed", "failed", "cancelled", "expired"})


def prompt(name: str, row: int) -> str:
    """The text of a row: the first ones are answered oddly."""
    return f"case {name.removeprefix('odd-')} row {row} {'odd' if row < NUM_ODD else 'well'}"


def check_json(line: bytes) -> dict[str, Any]:
    """A line, which must be one object of strict JSON in UTF-8. Raises AssertionError."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    try:
        found = json.loads(line.decode(), parse_constant=refuse)
        json.dumps(found, ensure_ascii=False).encode()
    except ValueError as error:
        raise AssertionError(f"not JSON: {line[:200]!r}: {error}") from error
    assert isinstance(found, dict), line
    return found


@dataclass(slots=True)
class EngineTrial:
    """One odd engine's job and batch."""

    engine: OddEngine
    job: str
    batch: str


class EngineTrials:
    """All odd engines in one deployment, whose engine is `benchmarks.evil_engines`."""

    def __init__(self, folder: Path, engines: Sequence[OddEngine]) -> None:
        self.rig = Deployment(folder)
        self._engines = engines
        self._trials: list[EngineTrial] = []
        self._beside = ""
        self._session = requests.Session()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The engine and the deployment."""
        port = free_port()
        engine = f"http://127.0.0.1:{port}"
        self.rig.configure({"attach": engine}, window={"requests": 256})
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.evil_engines", str(port)])
        try:
            wait_until(lambda: answers(f"{engine}/health"), "the engine to listen")
            with self.rig.running():
                yield
        finally:
            process.kill()
            process.wait()

    def begin(self) -> None:
        """Hand all jobs and batches over, and one job beside them."""
        self._beside = self.rig.submit(
            self.rig.write_job(
                "beside", NUM_BESIDE, text=lambda name, row: f"case {name} row {row} well"
            )
        )
        more = f"row_timeout: {ROW_TIMEOUT}\nretries: 1\n"
        for engine in self._engines:
            job = self.rig.write_job(f"odd-{engine.name}", NUM_ROWS, more, "jsonl", text=prompt)
            self._trials.append(
                EngineTrial(engine, self.rig.submit(job), self._create_batch(engine.name))
            )

    def wait(self) -> None:
        """Until all have ended. Batches whose rows are stuck are cancelled by their caller."""
        for trial in self._trials:
            if trial.engine.name in STUCK:
                wait_until(partial(self._is_running, trial), "a batch to run")
                self._call("POST", f"/v1/batches/{trial.batch}/cancel")
        views: dict[str, dict[str, Any]] = {}

        def have_ended() -> bool:
            views.update((str(job["id"]), job) for job in self.rig.client.get("/status")["jobs"])
            return all(view["state"] in ENDED for view in views.values())

        with suppress(TimeoutError):
            wait_until(have_ended, "all jobs to end", END_WAIT_S, poll_s=0.5)

    def records(self) -> Iterator[Record]:
        """What came of every engine; online calls are made now."""
        for trial in self._trials:
            problems = [*self._problems(trial)]
            yield {
                "kind": "engine",
                "case": trial.engine.name,
                "promise": f"a row ends as {' or '.join(trial.engine.ends)}",
                "problem": "; ".join(problems) or None,
            }
        yield {
            "kind": "engine",
            "case": "a job beside them",
            "promise": "every row has its answer",
            "problem": _first(self._check_job, self._beside, "beside", NUM_BESIDE, frozenset()),
        }
        yield {
            "kind": "engine",
            "case": "the daemon",
            "promise": "it lives, and nothing in it was unforeseen",
            "problem": self._trouble_of_daemon(),
        }

    def _problems(self, trial: EngineTrial) -> Iterator[str]:
        name, odd_rows = trial.engine.name, frozenset(range(NUM_ODD))
        checks = (
            (self._check_job, trial.job, f"odd-{name}", NUM_ROWS, odd_rows, trial.engine.ends),
            (self._check_batch, trial),
            (self._check_calls, name),
        )
        for check, *arguments in checks:
            problem = _first(check, *arguments)
            if problem is not None:
                yield problem

    def _check_job(
        self, job: str, name: str, num_rows: int, odd: frozenset[int], ends: Sequence[str] = ()
    ) -> None:
        view = self.rig.job(job)
        assert view["state"] == "completed", f"job: {view['state']}, {view['reason']}"
        suffix = "parquet" if not odd else "jsonl"
        rows = _rows_of(self.rig.folder / f"{name}.out.{suffix}")
        assert len(rows) == num_rows, f"job: {len(rows)} rows"
        for number, row in enumerate(rows):
            error = json.loads(row["error"]) if isinstance(row["error"], str) else row["error"]
            if number not in odd:
                wanted = f"heard {row['text']}"
                assert row["response"] == wanted, f"job: row {number} is {row['response']!r}"
            else:
                end = ANSWER if error is None else error["code"]
                assert end in ends, f"job: row {number} ended as {end}: {error}"

    def _check_batch(self, trial: EngineTrial) -> None:
        batch = self._batch(trial)
        is_stuck = trial.engine.name in STUCK
        wanted = "cancelled" if is_stuck else "completed"
        assert batch["status"] == wanted, f"batch: {batch['status']}, {batch['errors']}"
        seen: dict[str, bool] = {}
        for key in ("output_file_id", "error_file_id"):
            for line in self._content(batch[key]).splitlines():
                found = check_json(line)
                assert found["custom_id"] not in seen, f"batch: {found['custom_id']} twice"
                seen[found["custom_id"]] = key == "output_file_id"
                if seen[found["custom_id"]] and int(found["custom_id"]) >= NUM_ODD:
                    text = found["response"]["body"]["choices"][0]["message"]["content"]
                    assert text == f"heard {prompt(trial.engine.name, int(found['custom_id']))}", (
                        text
                    )
        assert sorted(seen) == [str(row) for row in range(NUM_ROWS)], f"batch: rows {sorted(seen)}"
        for row in range(NUM_ROWS):
            is_answer = seen[str(row)]
            may = ends_of_batch(trial.engine) if row < NUM_ODD else {True}
            assert is_stuck or is_answer in may, f"batch: row {row} answered: {is_answer}"

    def _check_calls(self, name: str) -> None:
        """The gateway ends an odd call, or its caller does, and answers the next one."""
        body: dict[str, Any] = {"model": MODEL}
        body["messages"] = [{"role": "user", "content": prompt(name, 0)}]
        with (
            suppress(requests.RequestException),
            self._session.post(
                self.rig.url + CHAT, json=body, timeout=CALL_WAIT_S, stream=True
            ) as reply,
        ):
            next(reply.iter_content(READ_BYTES), b"")
        # What an engine sends unasked while the next call waits cannot be told from its reply.
        time.sleep(SETTLE_S)
        well = prompt(name, NUM_ROWS)
        body["messages"] = [{"role": "user", "content": well}]
        call = partial(self._session.post, self.rig.url + CHAT, json=body, timeout=CALL_WAIT_S)
        reply = until_taken(call)
        assert reply.status_code == 200, f"call: {reply.status_code} {reply.text[:200]}"
        text = reply.json()["choices"][0]["message"]["content"]
        assert text == f"heard {well}", f"call: answered {text!r}"

    def _trouble_of_daemon(self) -> str | None:
        for job in self.rig.client.get("/status")["jobs"]:
            if "internal error" in str(job["reason"]):
                return f"{job['name']}: {job['reason']}"
        logs = ("daemon.log", "gateway.log")
        for name in logs:
            text = (self.rig.home.log / name).read_text(errors="replace")
            if "Traceback" in text:
                return f"{name}: {text[text.index('Traceback') :][:2_000]}"
        return None

    def _create_batch(self, name: str) -> str:
        lines = [
            {
                "custom_id": str(row),
                "method": "POST",
                "url": CHAT,
                "body": {
                    "model": MODEL,
                    "messages": [{"role": "user", "content": prompt(name, row)}],
                },
            }
            for row in range(NUM_ROWS)
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines)
        file = self._call(
            "POST", "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}
        )
        wanted = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        return str(self._call("POST", "/v1/batches", json=wanted)["id"])

    def _is_running(self, trial: EngineTrial) -> bool:
        return bool(self._batch(trial)["status"] != "validating")

    def _batch(self, trial: EngineTrial) -> dict[str, Any]:
        return self._call("GET", f"/v1/batches/{trial.batch}")

    def _content(self, file_id: str | None) -> bytes:
        if file_id is None:
            return b""
        path = f"{self.rig.url}/v1/files/{file_id}/content"
        return bytes(self._session.get(path, timeout=CALL_WAIT_S).content)

    def _call(self, method: str, path: str, **what: Any) -> dict[str, Any]:
        call = partial(self._session.request, method, self.rig.url + path, timeout=CALL_WAIT_S)
        reply = until_taken(lambda: call(**what))
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()
        return found


def ends_of_batch(engine: OddEngine) -> set[bool]:
    """Whether a row of a batch may be answered, or may not."""
    return {end == ANSWER for end in engine.ends}


def _rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [check_json(line) for line in path.read_bytes().splitlines()]
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def _first(check: Any, *arguments: Any) -> str | None:
    """What a check finds wrong."""
    try:
        check(*arguments)
    except (AssertionError, OSError, KeyError, ValueError) as error:
        return (
            f"{type(error).__name__} {error}"
            if not isinstance(error, AssertionError)
            else str(error)
        )
    return None


def try_engines(folder: Path, only: str) -> Iterator[Record]:
    """A record for each odd engine whose name has `only` in it."""
    trials = EngineTrials(folder, [engine for engine in ODD_ENGINES if only in engine.name])
    with trials.running():
        trials.begin()
        trials.wait()
        yield from trials.records()


def try_callers(folder: Path, only: str) -> Iterator[Record]:
    """A record for each caller in bad faith whose name has `only` in it."""
    with Scene(folder).running() as scene:
        for caller in BAD_CALLERS:
            if only not in caller.name:
                continue
            problem = _first(caller.act, scene) or _first(scene.check_others)
            yield {
                "kind": "caller",
                "case": caller.name,
                "promise": caller.promise,
                "problem": problem,
            }
        yield {
            "kind": "caller",
            "case": "the others",
            "promise": "their batch ends with every answer, and all parts live",
            "problem": _first(scene.check_end),
        }


def main() -> int:
    """Print a line for each case; write the records where `--json` says."""
    options = parser(__doc__, group="", only="").parse_args()
    records: list[Record] = []
    for name, trials in (("engine", try_engines), ("caller", try_callers)):
        if options.group not in {"", name}:
            continue
        with tempfile.TemporaryDirectory(prefix="batchrun-evil-") as folder:
            found = shown(trials(Path(folder), options.only))
        num_problems = sum(record["problem"] is not None for record in found)
        records += found
        records.append({
            "kind": "sum",
            "group": f"{name}s",
            "cases": len(found),
            "problems": num_problems,
        })
    num_problems = sum(record.get("problem") is not None for record in records)
    return finish(options.json, records, [Bar("problems", num_problems, 0, is_most=True)])


if __name__ == "__main__":
    raise SystemExit(main())
