"""Which rows an engine scheduled in its last steps, in a file that outlives the engine.

The scheduler writes to memory that is mapped to the file, so every death but the machine's leaves
what was written last. `NUM_SLOTS` slots are used in turn, one for each step that had work; each is
a header (number of the step, bytes of text) and one line per row, `JOB ROW`. The header is written
last: a slot that was being written at the death counts as empty, and the `NUM_STEPS` steps before
it are whole.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path

RowKey = tuple[str, int]
"""Job id and row."""

NUM_STEPS = 3
"""Two steps may be under way at once, and the output of a third one be read (design section 4)."""
NUM_SLOTS = NUM_STEPS + 1
MAX_LABEL_BYTES = 128
SUFFIX = ".steps"
_HEADER = struct.Struct("<QQ")
_EMPTY = _HEADER.pack(0, 0)


def make_label(job: str, row: int) -> bytes:
    """A row as `LastSteps.note` takes it."""
    return b"%b %d" % (job.encode(), row)


class LastSteps:
    """The file of a living engine, with room for `max_rows` rows a step.

    Raises OSError when it cannot be made at `path`. One that is there is replaced: an engine that
    still has it may write on without harm.
    """

    def __init__(self, path: Path, max_rows: int) -> None:
        self._slot_bytes = _HEADER.size + max_rows * MAX_LABEL_BYTES
        self._num_steps = 0
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, NUM_SLOTS * self._slot_bytes)
            self._memory = mmap.mmap(descriptor, NUM_SLOTS * self._slot_bytes)
        finally:
            os.close(descriptor)

    def note(self, labels: Iterable[bytes]) -> None:
        """A step with these offline rows, or with none, goes to the engine. What has no room in
        the slot is left out."""
        text = b"\n".join(labels)[: self._slot_bytes - _HEADER.size]
        slot = self._num_steps % NUM_SLOTS * self._slot_bytes
        self._num_steps += 1
        start = slot + _HEADER.size
        self._memory[slot:start] = _EMPTY
        self._memory[start : start + len(text)] = text
        self._memory[slot:start] = _HEADER.pack(self._num_steps, len(text))

    def close(self) -> None:
        """The file stays."""
        self._memory.close()


def read_last_steps(path: Path) -> frozenset[RowKey]:
    """The rows of the last `NUM_STEPS` steps of an engine that is dead; none where nothing can be
    known. Blocking, but short."""
    try:
        content = path.read_bytes()
    except OSError:
        return frozenset()
    slot_bytes = len(content) // NUM_SLOTS
    slots = [content[slot_bytes * number :][:slot_bytes] for number in range(NUM_SLOTS)]
    steps = sorted((_read_slot(slot) for slot in slots), reverse=True)
    return frozenset(key for _, text in steps[:NUM_STEPS] for key in _read_rows(text))


def _read_slot(slot: bytes) -> tuple[int, bytes]:
    if len(slot) < _HEADER.size:
        return 0, b""
    number, num_bytes = _HEADER.unpack_from(slot)
    return number, slot[_HEADER.size :][:num_bytes]


def _read_rows(text: bytes) -> Iterable[RowKey]:
    for line in text.decode(errors="replace").splitlines():
        job, _, row = line.rpartition(" ")
        if row.isdecimal():
            yield job, int(row)
