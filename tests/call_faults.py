"""Walk the durable ways in this process, which was started with `file_calls.environment`.

    python call_faults.py record FOLDER               each way once, all of it recorded
    python call_faults.py fail FOLDER WAY STEP        again and again, a call failing each time

Of `fail` each line of the output is a trial: JSON with `trial` and `problems`. Every STEP-th call
of each kind fails once. With STEP 1 it does so with every error that such a call can have, and once
more with all calls after it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from durable_paths import WAYS, DurableWay
from file_calls import FileCalls

from batchrun.errors import BatchrunError

ERRORS = {
    "open": (errno.EMFILE, errno.EIO, errno.EROFS, errno.ENOSPC),
    "write": (errno.ENOSPC, errno.EIO),
    "sync": (errno.EIO, errno.ENOSPC),
    "rename": (errno.EIO, errno.EROFS, errno.ENOSPC),
    "link": (errno.EIO, errno.ENOSPC),
    "mkdir": (errno.EROFS, errno.ENOSPC),
    "unlink": (errno.EIO, errno.EROFS),
    "cut": (errno.EIO,),
}
MOST_TROUBLES = 3
HANG_S = 120


class _EndsTrouble(logging.Handler):
    """What never gives up tries again until the disk is well: here after some complaints."""

    def __init__(self, calls: FileCalls) -> None:
        super().__init__(logging.ERROR)
        self._calls = calls
        self._num_seen = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._num_seen += 1
        if "\n" in record.getMessage() or record.exc_info:
            raise AssertionError(f"no line: {record.getMessage()} {record.exc_info}")
        if self._num_seen >= MOST_TROUBLES:
            self._calls.let()


def record(calls: FileCalls, folder: Path) -> None:
    """Prepare and walk each way, recorded from its first call on."""
    calls.record()
    for kind in WAYS:
        calls.mark(f"begin {kind.name}")
        way = _made(kind, folder)
        way.prepare()
        calls.mark("prepared")
        way.walk(lambda text: calls.mark(f"acknowledge {text}"))
        way.close()
    calls.mark("end")


def trials(calls: FileCalls, kind: type[DurableWay], folder: Path, step: int) -> Iterator[str]:
    """Lines of output."""
    template = folder.with_name("template")
    _made(kind, folder).prepare()
    shutil.copytree(folder / kind.name, template / kind.name)
    for call, code, for_good in _faults(is_whole=step == 1):
        number, num_failed = 1, 1
        while num_failed:
            shutil.rmtree(folder / kind.name)
            shutil.copytree(template / kind.name, folder / kind.name)
            way = kind(folder / kind.name)
            num_failed, problems = _in_child(calls, way, (call, number, code, for_good))
            if problems or num_failed:
                trial = f"{call} {number} {errno.errorcode[code]}{' for good' * for_good}"
                yield json.dumps({"trial": trial, "problems": problems})
            number += step


def _faults(*, is_whole: bool) -> Iterator[tuple[str, int, bool]]:
    """(kind of call, error, whether it lasts)."""
    for call, errors in ERRORS.items():
        for code in errors if is_whole else errors[:1]:
            for for_good in (False, True) if is_whole else (False,):
                yield call, code, for_good


def _made(kind: type[DurableWay], folder: Path) -> DurableWay:
    place = folder / kind.name
    place.mkdir(parents=True)
    return kind(place)


def _in_child(
    calls: FileCalls, way: DurableWay, fault: tuple[str, int, int, bool]
) -> tuple[int, list[str]]:
    """(calls that failed, what is wrong) of a trial in a process of its own."""
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(HANG_S)
        answer = json.dumps(_trial(calls, way, fault))
        os.write(target, answer.encode()[:60_000])
        os._exit(0)
    os.close(target)
    with os.fdopen(source, "rb") as file:
        answer_read = file.read()
    os.waitpid(child, 0)
    if not answer_read:
        return 1, ["the process ended, or hung"]
    num_failed, problems = json.loads(answer_read)
    return num_failed, problems


def _trial(
    calls: FileCalls, way: DurableWay, fault: tuple[str, int, int, bool]
) -> tuple[int, list[str]]:
    said: list[str] = []
    problems: list[str] = []
    logging.getLogger("batchrun").addHandler(_EndsTrouble(calls))
    call, number, code, for_good = fault
    num_failed = 0
    try:
        calls.fail(call, number, code, for_good=for_good)
        try:
            way.walk(said.append)
            way.close()
        except BatchrunError as error:
            if not str(error) or "\n" in str(error):
                problems.append(f"not one line: {error!r}")
        finally:
            num_failed = calls.num_failed
            calls.let()
        problems += _leaks(way)
        way.check(said, has_links=False)
        way.walk(said.append)
        way.close()
        way.check(said, has_links=False)
        problems += [f"left behind: {path}" for path in way.folder.rglob("*.part")]
    except BaseException:  # noqa: BLE001 - whatever it is, it is what the trial found
        problems.append(traceback.format_exc()[-3_000:])
    return num_failed, problems


def _leaks(way: DurableWay) -> list[str]:
    """Files that are still open, but for the store's own."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith(str(way.folder)) and "/store.db" not in target:
            found.append(f"left open: {target}")
    return found


def main() -> None:
    """What the arguments ask for."""
    what, folder, *more = sys.argv[1:]
    calls = FileCalls()
    if what == "record":
        record(calls, Path(folder))
        return
    (kind,) = (way for way in WAYS if way.name == more[0])
    for line in trials(calls, kind, Path(folder), int(more[1])):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
