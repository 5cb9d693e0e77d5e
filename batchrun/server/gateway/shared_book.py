"""What all workers of a gateway know of its engines, in memory that they share and no disk holds.

Each worker adds its calls in a row of its own; prefixes are common to all. An engine has a column,
found by its name and by when it was started: one that started anew begins with an empty column.
The first process of a gateway makes it, and its workers inherit it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from batchrun.files import locked_bytes
from batchrun.routing.decisions import (
    NUM_KEYS,
    RING_BYTES,
    DecisionRing,
    EndedCalls,
    Records,
    ended_calls,
    read_decisions,
)
from batchrun.routing.engine_book import FIELDS, EngineBook
from batchrun.routing.prefix_map import NUM_COLUMN_FIELDS, Arrays, PrefixMap

MAX_ENGINES = 512
"""More are ranked last: nothing is known of them."""
NUM_PIECES = 1 << 15
"""Of 1,024 bytes each: 32 MiB of text, many times what 16 engines hold. What is used of the memory
grows with the engines, a quarter of a MiB each."""

_COLUMN = np.dtype([("name", np.uint64), ("started", np.uint64)])


def _layout(num_workers: int) -> dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]]:
    """The arrays, one after the other: type and shape."""
    real = np.dtype(np.float64)
    return {
        "columns": (_COLUMN, (MAX_ENGINES,)),
        "loads": (real, (num_workers, MAX_ENGINES, len(FIELDS))),
        "held": (real, (MAX_ENGINES + 1, NUM_COLUMN_FIELDS)),
        "keys": (np.dtype(np.uint64), (NUM_PIECES,)),
        "used_at_s": (real, (MAX_ENGINES, NUM_PIECES)),
        "num_uses": (np.dtype(np.uint32), (NUM_PIECES,)),
        "num_hits": (np.dtype(np.uint8), (NUM_PIECES,)),
        "ejections": (real, (MAX_ENGINES, 4)),
        "decided_keys": (np.dtype(np.uint64), (num_workers, NUM_KEYS)),
        "decisions": (np.dtype(np.uint8), (num_workers, RING_BYTES)),
    }


def create(num_workers: int) -> int:
    """A file descriptor of new memory, empty. Raises OSError."""
    size = sum(
        dtype.itemsize * int(np.prod(shape)) for dtype, shape in _layout(num_workers).values()
    )
    fd = os.memfd_create("batchrun-engine-book")
    os.truncate(fd, size)
    return fd


FAILURES = 3
"""After so many calls in a row that failed, with none that succeeded, an engine is ejected."""
FIRST_EJECTION_S = 1.0
LONGEST_EJECTION_S = 30.0
_FAILED, _UNTIL_S, _TIMES, _TOTAL = range(4)


class Ejections:
    """Engines that get no calls for a while, by column: their last calls could not be connected, or
    hung. After a while one call is let through; each that fails doubles the while, the first that
    succeeds ends it. Instants are positive, on one clock of all workers."""

    def __init__(self, values: npt.NDArray[np.float64]) -> None:
        self._values = values

    @property
    def until_s(self) -> float:
        """When the last engine that is ejected gets calls again."""
        return float(self._values[:, _UNTIL_S].max())

    def left_s(self, column: int, now_s: float) -> float:
        """For how long the engine still gets no call."""
        return max(0.0, float(self._values[column, _UNTIL_S]) - now_s)

    def num_ejections(self, column: int) -> int:
        """How often the engine was ejected."""
        return int(self._values[column, _TOTAL])

    def take_turn(self, column: int, now_s: float) -> bool:
        """Whether a call may go there; where the engine is on trial, this one alone."""
        if self.left_s(column, now_s) > 0:
            return False
        if self._values[column, _TIMES] > 0:
            self._values[column, _UNTIL_S] = now_s + self._while_s(column)
        return True

    def failed(self, column: int, now_s: float, found: int | None = None) -> bool:
        """A call failed; whether the engine is ejected by that. One that `found` it ejected less
        often when it was sent tells nothing new."""
        if found is not None and found != self.num_in_a_row(column):
            return False
        row = self._values[column]
        row[_FAILED] += 1
        is_trial = row[_TIMES] > 0
        if row[_FAILED] < FAILURES and not is_trial:
            return False
        row[_TIMES] += 1
        row[_TOTAL] += 1
        row[_UNTIL_S] = now_s + self._while_s(column)
        return True

    def num_in_a_row(self, column: int) -> int:
        """How often the engine was ejected without a call that succeeded; 0: it is not on trial."""
        return int(self._values[column, _TIMES])

    def left(self, column: int, num_in_a_row: int, now_s: float) -> None:
        """A call ended that had found it so; one on trial that proved nothing leaves its turn."""
        if num_in_a_row and self.num_in_a_row(column) == num_in_a_row:
            self._values[column, _UNTIL_S] = min(self._values[column, _UNTIL_S], now_s)

    def succeeded(self, column: int) -> None:
        """The engine answered a call, or began anew."""
        self._values[column, :_TOTAL] = 0.0

    def begin(self, column: int, *, is_another: bool) -> None:
        """The column's engine was started anew, or is another one."""
        self._values[column, : _TOTAL + is_another] = 0.0

    def _while_s(self, column: int) -> float:
        times = min(int(self._values[column, _TIMES]), 16)
        return float(min(LONGEST_EJECTION_S, FIRST_EJECTION_S * 2.0 ** (times - 1)))


class SharedBook:
    """The memory behind a descriptor, with the `book` and the worker's `ring` of decisions that lie
    in it. `worker` counts from 0."""

    def __init__(self, fd: int, num_workers: int, worker: int) -> None:
        self._fd = fd
        self._memory = mmap.mmap(fd, 0)
        arrays: dict[str, npt.NDArray[Any]] = {}
        offset = 0
        for name, (dtype, shape) in _layout(num_workers).items():
            count = int(np.prod(shape))
            arrays[name] = np.frombuffer(self._memory, dtype, count, offset).reshape(shape)
            offset += dtype.itemsize * count
        self._columns = arrays["columns"]
        prefixes = PrefixMap(
            Arrays(
                arrays["keys"],
                arrays["num_uses"],
                arrays["num_hits"],
                arrays["used_at_s"],
                arrays["held"],
            )
        )
        self.book = EngineBook(prefixes, arrays["loads"], worker)
        self.ejections = Ejections(arrays["ejections"])
        self._rings, self._decided_keys = arrays["decisions"], arrays["decided_keys"]
        self.ring = DecisionRing(memoryview(self._rings[worker]), self._decided_keys[worker])

    def columns_of(self, engines: Iterable[tuple[str, int]]) -> dict[str, int]:
        """The column of each engine, given by its identity and when it was started (0: unknown).

        An engine that has none takes a free one; those that are in none of these may lose theirs.
        """
        wanted = {_digest(name): (name, started) for name, started in engines}
        found: dict[str, int] = {}
        with locked_bytes(self._fd):
            names = self._columns["name"]
            for column, digest in enumerate(names.tolist()):
                if digest in wanted:
                    name, started = wanted.pop(digest)
                    found[name] = column
                    self._begin(column, digest, started)
            taken = set(found.values())
            free = [column for column in range(MAX_ENGINES) if column not in taken]
            # Calls may still run in engines that have just left: theirs are used last.
            free.sort(key=lambda column: int(names[column]) != 0)
            for (digest, (name, started)), column in zip(wanted.items(), free, strict=False):
                found[name] = column
                self._begin(column, digest, started)
        return found

    def life_of(self, column: int) -> tuple[int, int]:
        """Another pair for each engine that had this column, and each time that it was started."""
        known = self._columns[column]
        return int(known["name"]), int(known["started"])

    def digest_of(self, column: int) -> int:
        """What decisions name the engine of this column by."""
        return int(self._columns["name"][column])

    def decisions(self) -> Records:
        """The last decisions of all workers, the newest first."""
        return read_decisions(self._rings)

    def ended_calls(self, since_s: float, now_s: float) -> EndedCalls:
        """See `batchrun.routing.decisions.ended_calls`."""
        return ended_calls(self._rings, self._decided_keys, since_s, now_s)

    def _begin(self, column: int, digest: int, started: int) -> None:
        """The column is this engine's, which has been running since then. 0: that is not known, as
        of a daemon that has just come, and says nothing of what the engine holds."""
        known = self._columns[column]
        is_same = known["name"] == digest and started in {0, known["started"]}
        if not is_same:
            self.book.left(column)
            self.ejections.begin(column, is_another=known["name"] != digest)
            self._columns[column] = (digest, started)


def _digest(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode()) or 1
