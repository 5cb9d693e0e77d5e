"""What is told of a job that has ended: a command that runs, or a webhook that is called.

The transaction that ends a job notes that its end is to be told (`store.jobs.ENDED_PREFIX`), so no
crash loses one: it is told at least once, and tried with growing pauses until it was taken. A
webhook gets what the Standard Webhooks specification says, which OpenAI's client verifies.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import signal
import time
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from urllib.parse import urlsplit

import aiohttp

from batchrun.config import OnDone
from batchrun.errors import BatchrunError, StoreError, UnknownJobError
from batchrun.jobs.spec import read_secret
from batchrun.store import jobs
from batchrun.store.database import Store
from batchrun.store.jobs import ENDED_PREFIX, Counts, JobRecord

log = logging.getLogger(__name__)

TOLD_PREFIX = "on_done:"
"""With it and a job's id begins the key of the setting that says how telling of its end went."""
POLL_S = 1.0
FIRST_DELAY_S = 2.0
LONGEST_DELAY_S = 3600.0
MAX_TRIES = 15
"""The last is some five hours after the first."""
MAX_AT_ONCE = 4
WEBHOOK_S = 30.0
COMMAND_S = 600.0
EVENT = "job.ended"


@dataclass(frozen=True, slots=True)
class Telling:
    """How far telling of one job's end is. `said` is what came of the last try; `next_at` (UTC
    epoch seconds) is when the next one is due, null where none is."""

    target: str | None = None
    state: str = "waiting"
    num_tries: int = 0
    next_at: float | None = None
    said: str | None = None

    def view(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def read_tellings(store: Store) -> dict[str, dict[str, object]]:
    """What `status` shows of the jobs whose end was told, or is to be, by their ids."""
    told = jobs.list_settings(store, TOLD_PREFIX) | jobs.list_settings(store, ENDED_PREFIX)
    return {job_id: _telling(kept).view() for job_id, kept in told.items() if kept}


def _telling(kept: object) -> Telling:
    known = Telling.__dataclass_fields__
    values = kept if isinstance(kept, dict) else {}
    return Telling(**{name: value for name, value in values.items() if name in known})


class _NotTakenError(BatchrunError):
    """The target did not take it; the message says why."""


@dataclass(slots=True)
class Messenger:
    """Tells of ended jobs: their own `on_done` hears it, else `default`. Commands run in `folder`,
    the home. `first_delay_s` is the pause after the first try; each is twice as long."""

    store: Store
    default: OnDone | None
    folder: Path
    first_delay_s: float = FIRST_DELAY_S
    tellings: dict[str, dict[str, object]] = field(default_factory=dict)
    _busy: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def load(self) -> None:
        """Take up what an earlier daemon left. Raises ConfigError for a secret that is not to be
        read, and StoreError. Blocking."""
        if self.default is not None:
            read_secret(self.default)
        self.tellings = read_tellings(self.store)

    async def run(self) -> None:
        """Tell of every end, until cancelled."""
        try:
            while True:
                with suppress(StoreError):
                    await self._look()
                await asyncio.sleep(POLL_S)
        finally:
            for task in self._busy.values():
                task.cancel()
            await asyncio.gather(*self._busy.values(), return_exceptions=True)

    async def _look(self) -> None:
        ended = await asyncio.to_thread(jobs.list_settings, self.store, ENDED_PREFIX)
        unheard: list[str] = []
        for job_id, kept in ended.items():
            telling = _telling(kept)
            if job_id in self._busy or (telling.next_at or 0.0) > time.time():
                continue
            if len(self._busy) >= MAX_AT_ONCE:
                break
            record = await asyncio.to_thread(self._find, job_id)
            on_done = None if record is None else self._target_of(record)
            if record is None or on_done is None:
                unheard.append(job_id)
                continue
            task = asyncio.create_task(self._tell(record, on_done, telling))
            self._busy[job_id] = task
            task.add_done_callback(partial(self._forget, job_id))
        if unheard:
            keys = [ENDED_PREFIX + job_id for job_id in unheard]
            await asyncio.to_thread(jobs.replace_settings, self.store, keys, {})

    def _forget(self, job_id: str, _: asyncio.Task[None]) -> None:
        del self._busy[job_id]

    def _find(self, job_id: str) -> JobRecord | None:
        try:
            return jobs.get(self.store, job_id)
        except UnknownJobError:
            return None

    def _target_of(self, record: JobRecord) -> OnDone | None:
        own = json.loads(record.spec).get("on_done")
        return self.default if own is None else OnDone.model_validate(own)

    async def _tell(self, record: JobRecord, on_done: OnDone, before: Telling) -> None:
        """One try, and what comes of it."""
        target, num_tries = shown_target(on_done), before.num_tries + 1
        is_last = num_tries >= MAX_TRIES
        try:
            said = await self._send(record, on_done)
            now = Telling(target, "delivered", num_tries, None, said)
            log.info("%s: %s took that the job is %s: %s", record.id, target, record.state, said)
        except BatchrunError as error:
            delay_s = min(self.first_delay_s * 2 ** (num_tries - 1), LONGEST_DELAY_S)
            next_at = None if is_last else time.time() + delay_s
            now = Telling(
                target, "failed" if is_last else "waiting", num_tries, next_at, str(error)
            )
            log.warning("%s: %s: try %d: %s", record.id, target, num_tries, error)
        key, done_key = ENDED_PREFIX + record.id, TOLD_PREFIX + record.id
        removed, added = ([key], done_key) if now.next_at is None else ([], key)
        self.tellings[record.id] = now.view()
        # Until that is written the job stays busy: the next try would come at once.
        work = partial(jobs.replace_settings, self.store, removed, {added: now.view()})
        while True:
            with suppress(StoreError):
                return await asyncio.to_thread(work)
            await asyncio.sleep(POLL_S)

    async def _send(self, record: JobRecord, on_done: OnDone) -> str:
        """What the target said to it. Raises BatchrunError where it did not take it."""
        about = about_job(record, record.counts or Counts())
        if on_done.command is not None:
            return await self._run(on_done.command, about)
        assert on_done.webhook is not None
        secret = await asyncio.to_thread(read_secret, on_done)
        now_s = int(time.time())
        body = json.dumps({"type": EVENT, "timestamp": now_s, "data": about}).encode()
        headers = webhook_headers(f"{record.id}-{record.state}", now_s, body, secret)
        try:
            timeout = aiohttp.ClientTimeout(total=WEBHOOK_S)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(
                    on_done.webhook, data=body, headers=headers, allow_redirects=False
                ) as reply,
            ):
                status = reply.status
        except TimeoutError:
            raise _NotTakenError(f"no answer within {WEBHOOK_S:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise _NotTakenError(f"it cannot be reached: {reason}") from None
        if not 200 <= status < 300:
            raise _NotTakenError(f"HTTP {status}")
        return f"HTTP {status}"

    async def _run(self, command: tuple[str, ...], about: Mapping[str, object]) -> str:
        text = json.dumps(about)
        env = os.environ | {
            "BATCHRUN_HOME": str(self.folder),
            "BATCHRUN_JOB": text,
            "BATCHRUN_JOB_ID": str(about["id"]),
            "BATCHRUN_JOB_STATE": str(about["state"]),
        }
        # A file, for a command that does not read it would break a pipe.
        with TemporaryFile() as stdin:
            stdin.write(text.encode())
            stdin.seek(0)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=stdin, cwd=self.folder, env=env, start_new_session=True
                )
            except (OSError, ValueError) as error:
                raise _NotTakenError(f"it cannot be started: {error}") from None
        try:
            async with asyncio.timeout(COMMAND_S):
                await process.wait()
        except TimeoutError:
            raise _NotTakenError(f"it ran for more than {COMMAND_S:g} s") from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode != 0:
            raise _NotTakenError(f"exit code {process.returncode}")
        return "exit code 0"


def shown_target(on_done: OnDone) -> str:
    """Who hears it, without what a URL or arguments may hold of secrets."""
    if on_done.command is not None:
        return f"command {Path(on_done.command[0]).name}"
    parts = urlsplit(on_done.webhook or "")
    return f"webhook {parts.scheme}://{parts.hostname}"


def about_job(record: JobRecord, counts: Counts) -> dict[str, object]:
    """What is told of a job. Instants are UTC epoch seconds."""
    return {
        "id": record.id,
        "name": record.name,
        "state": str(record.state),
        "reason": record.reason,
        "num_rows": record.num_rows,
        "num_completed": counts.num_completed,
        "num_failed": counts.num_failed,
        "num_prompt_tokens": counts.num_prompt_tokens,
        "num_cached_tokens": counts.num_cached_tokens,
        "num_output_tokens": counts.num_output_tokens,
        "created_at": record.created_at,
        "finished_at": record.finished_at,
        "output_path": None if record.is_batch else record.output_path,
    }


def webhook_headers(
    message_id: str, at_s: int, body: bytes, secret: bytes | None
) -> dict[str, str]:
    """The headers of Standard Webhooks; the signature is over id, instant and body."""
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "batchrun",
        "webhook-id": message_id,
        "webhook-timestamp": str(at_s),
    }
    if secret is not None:
        signed = b".".join((message_id.encode(), str(at_s).encode(), body))
        digest = hmac.new(secret, signed, hashlib.sha256).digest()
        headers["webhook-signature"] = f"v1,{b64encode(digest).decode()}"
    return headers
