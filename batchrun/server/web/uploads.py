"""Files that people upload on the page, on their way to be jobs: a dry run's answer, then a start.

Each lies in a folder of its own below `uploads/` of the home, with its job file and later its
output; `batchrun gc` removes it once no job needs it. Checks, dry run and submission are those of
the command line, in a process of their own: a large file holds nobody up.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request

from batchrun.daemon.writer import cancel_all
from batchrun.errors import BatchrunError, InputError, StateError, UnknownJobError
from batchrun.home import Home
from batchrun.jobs.objects import in_thread
from batchrun.server.api.errors import ApiError, caller_of
from batchrun.server.api.upload import MAX_FILE_BYTES, Spool, Transfers, UploadForm, size_told
from batchrun.store.jobs import ID_ALPHABET

FORM_FIELDS = frozenset({"name", "prompt", "model", "max_tokens", "keep", "deadline", "output"})
MAX_FIELD_BYTES = 32_768
MAX_DRAFTS = 16
WORK_S = 1800.0
NICENESS = 10
TABLES = (".parquet", ".pq", ".csv", ".tsv", ".json", ".jsonl")
PACKED = (".gz", ".zst")
OUTPUTS = ("parquet", "jsonl")
JOB_FILE = "job.yaml"
_UNNAMEABLE = re.compile(r"[^\w .:@+-]")


@dataclass(slots=True)
class UploadDraft:
    """An upload: `state` goes coming -> checking -> checked -> submitting -> submitted, or to
    refused.

    `found` is what the dry run said, by what it is about; `message` why it was refused.
    """

    id: str
    folder: Path
    filename: str
    size_bytes: int
    state: str = "coming"
    found: Mapping[str, str] = field(default_factory=dict)
    message: str | None = None
    job_id: str | None = None

    @property
    def is_busy(self) -> bool:
        return self.state in {"coming", "checking", "submitting"}


@dataclass(slots=True)
class Desk:
    """Takes uploads and makes jobs of them. `config` is the deployment's file and `model` what it
    serves, for the command line; `transfers` bounds what is on its way. Methods raise ApiError and
    BatchrunError."""

    home: Home
    config: Path | None
    model: str
    transfers: Transfers
    _drafts: dict[str, UploadDraft] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _working: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def receive(self, request: Request) -> UploadDraft:
        """Take a form's file to the disk and begin to look at it."""
        size_bytes = size_told(request.headers)
        if size_bytes is None or size_bytes > MAX_FILE_BYTES:
            raise ApiError(413, f"A file may have {MAX_FILE_BYTES >> 20} MiB; submit it in a shell")
        with self.transfers.admitted(caller_of(request).owner, size_bytes):
            return await self._receive(request)

    async def _receive(self, request: Request) -> UploadDraft:
        self._make_room()
        draft_id = "".join(secrets.choice(ID_ALPHABET) for _ in range(12))
        folder = self.home.uploads / draft_id
        form = UploadForm(request.headers.get("content-type", ""), FORM_FIELDS, MAX_FIELD_BYTES)
        draft = self._drafts[draft_id] = UploadDraft(draft_id, folder, "", 0)
        try:
            await asyncio.to_thread(_make_folder, folder)
            await self._take(request, form, draft)
        except BaseException:
            del self._drafts[draft_id]
            shutil.rmtree(folder, ignore_errors=True)
            raise
        draft.state = "checking"
        self._spawn(self._check(draft))
        return draft

    async def _take(self, request: Request, form: UploadForm, draft: UploadDraft) -> None:
        spool = await in_thread(Spool, draft.folder / "upload")
        try:
            async for chunk in request.stream():
                for piece in form.feed(chunk):
                    await spool.write(piece)
            form.finish()
            if not form.filename or not spool.size_bytes:
                raise InputError("choose a file that is not empty")
            name = _input_name(form.filename)
            text = job_file(form.fields, draft.folder / name, form.filename)
            await spool.keep()
        except BaseException:
            spool.drop()
            raise
        (draft.folder / "upload").rename(draft.folder / name)
        (draft.folder / JOB_FILE).write_text(text, encoding="utf-8")
        draft.filename, draft.size_bytes = form.filename[:200], spool.size_bytes

    def find(self, draft_id: str) -> UploadDraft:
        """Raises UnknownJobError for one that was discarded, or of an earlier daemon."""
        if draft_id not in self._drafts:
            raise UnknownJobError("this upload is gone; upload the file again")
        return self._drafts[draft_id]

    def start(self, draft_id: str) -> UploadDraft:
        """Submit what was checked. Raises StateError for what was not."""
        draft = self.find(draft_id)
        if draft.state != "checked":
            raise StateError(f"this upload is {draft.state}")
        draft.state = "submitting"
        self._spawn(self._submit(draft))
        return draft

    def discard(self, draft_id: str) -> None:
        """Forget an upload that is no job, and remove its file."""
        draft = self.find(draft_id)
        if draft.is_busy or draft.job_id is not None:
            raise StateError(f"this upload is {draft.state}")
        del self._drafts[draft_id]
        shutil.rmtree(draft.folder, ignore_errors=True)

    async def close(self) -> None:
        """End what is under way."""
        await cancel_all(self._tasks)

    def _make_room(self) -> None:
        """Forget the oldest uploads that nobody works at. Raises StateError where all are busy."""
        idle = [draft for draft in self._drafts.values() if not draft.is_busy]
        if len(self._drafts) < MAX_DRAFTS:
            return
        if not idle:
            raise StateError(f"{MAX_DRAFTS} uploads come or are looked at; try again shortly")
        if idle[0].job_id is None:
            self.discard(idle[0].id)
        else:
            del self._drafts[idle[0].id]

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _check(self, draft: UploadDraft) -> None:
        try:
            draft.found = dict(_lines_of(await self._ask(draft, "submit", "--dry-run")))
            draft.state = "checked"
        except BatchrunError as error:
            draft.message, draft.state = str(error), "refused"

    async def _submit(self, draft: UploadDraft) -> None:
        try:
            draft.job_id = str(json.loads(await self._ask(draft, "submit", "--json"))["id"])
            draft.state = "submitted"
        except BatchrunError as error:
            draft.message, draft.state = str(error), "refused"

    async def _ask(self, draft: UploadDraft, *words: str) -> str:
        """What a command prints of the draft's job file. Raises InputError with its line."""
        env = os.environ | {"BATCHRUN_HOME": str(self.home.path), "BATCHRUN_MODEL": self.model}
        if self.config is not None:
            env["BATCHRUN_CONFIG"] = str(self.config)
        command = [sys.executable, "-P", "-m", "batchrun", *words, str(draft.folder / JOB_FILE)]
        async with self._working:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=env,
                start_new_session=True,
            )
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
            try:
                async with asyncio.timeout(WORK_S):
                    said, complaint = await process.communicate()
            except TimeoutError:
                raise InputError("that took too long; submit it in a shell") from None
            finally:
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
        if process.returncode != 0:
            raise InputError(_for_people(complaint.decode("utf-8", "replace"), draft.folder))
        return said.decode("utf-8", "replace")


def job_file(fields: Mapping[str, str], rows: Path, filename: str) -> str:
    """The job file of a form, which is YAML as all JSON is: the answers go beside the rows. Raises
    InputError."""
    given = {name: value.strip() for name, value in fields.items() if value.strip()}
    kind = given.get("output", OUTPUTS[0])
    if kind not in OUTPUTS:
        raise InputError(f"the output is one of {', '.join(OUTPUTS)}")
    keep = [column.strip() for column in given.get("keep", "").split(",") if column.strip()]
    stem = _UNNAMEABLE.sub(" ", Path(filename).name.split(".")[0]).strip()[:64]
    spec: dict[str, Any] = {
        "name": given.get("name") or stem or "upload",
        "model": given.get("model", "default"),
        "input": {"path": rows.name},
        "output": {"path": str(rows.with_name(f"answers.{kind}")), "keep": keep},
    }
    if "prompt" in given:
        spec["input"]["messages"] = [{"role": "user", "content": given["prompt"]}]
        if "max_tokens" in given:
            spec["request"] = {"max_tokens": _whole_number(given["max_tokens"])}
    if "deadline" in given:
        spec["deadline"] = given["deadline"]
    return json.dumps(spec, indent=1)


def _whole_number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise InputError(f"the most tokens of an answer must be a whole number, not {text[:40]!r}")
    return int(text)


def _input_name(filename: str) -> str:
    """What an upload is called in its folder. Raises InputError for a kind that is not read."""
    name = filename.lower()
    packed = next((suffix for suffix in PACKED if name.endswith(suffix)), "")
    table = next((kind for kind in TABLES if name.removesuffix(packed).endswith(kind)), None)
    if table is None:
        raise InputError(f"{filename[:200]}: give a file of one of the kinds {', '.join(TABLES)}")
    return f"input{table}{packed}"


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror}") from None


def _lines_of(said: str) -> Iterator[tuple[str, str]]:
    """The lines of a dry run: what each is about, and what is said of it."""
    for line in said.splitlines():
        name, _, text = line.strip().partition("  ")
        if text:
            yield name, text.strip()


def _for_people(complaint: str, folder: Path) -> str:
    """A command's error line without the paths of the upload's own folder."""
    lines = [line for line in complaint.splitlines() if line.strip()] or ["it ended by itself"]
    line = re.sub(rf"{re.escape(str(folder / JOB_FILE))}:\d+: ", "", lines[-1])
    line = line.removeprefix("batchrun: ").replace(f"{folder}/", "")
    return re.sub(r"^input\.messages(\[0\]\.content)?\b", "prompt", line)
