"""A disk that loses its power: what recorded calls leave on it, in every way that is allowed.

Only what was synced is sure to be there: a file's bytes once the file was synced, a name once its
folder was. Of the rest any part may be there, in any order: writes in sectors, or as zeros where a
file had already grown; names one by one, but a rename as a whole.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from file_calls import FileCall

SECTOR_BYTES = 512
MANNERS = ("none", "all", "names", "bytes", "random", "random", "random")
"""What is there of what was not synced."""
Tree = dict[str, "Content"]


@dataclass(frozen=True, slots=True)
class Content:
    """A place below the root: a folder without bytes, or the file `number` with its bytes."""

    number: int
    content: bytes | None


@dataclass(slots=True)
class _File:
    number: int
    synced: bytes = b""
    now: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """(place, bytes) of a write, or (size, None) of a cut."""

    def change(self, at: int, content: bytes | None) -> None:
        _apply(self.now, at, content)
        self.pending.append((at, content))

    def sync(self) -> None:
        self.synced = bytes(self.now)
        self.pending.clear()

    def left(self, rng: Random, manner: str) -> bytes:
        if manner in {"none", "names"}:
            return self.synced
        if manner in {"all", "bytes"}:
            return bytes(self.now)
        found = bytearray(self.synced)
        chance = rng.choice((0.1, 0.5, 0.9))
        for at, content in self.pending:
            if rng.random() < chance:
                _apply(found, at, content)
            elif content is not None and rng.random() < 0.5:
                _apply_torn(rng, found, at, content)
        return bytes(found)


@dataclass(slots=True)
class _Folder:
    number: int
    synced: dict[str, int] = field(default_factory=dict)
    now: dict[str, int] = field(default_factory=dict)
    pending: list[dict[str, int | None]] = field(default_factory=list)
    """Names with what each stands for from then on; None: it is gone."""

    def change(self, names: dict[str, int | None]) -> None:
        _rename(self.now, names)
        self.pending.append(names)

    def sync(self) -> None:
        self.synced = dict(self.now)
        self.pending.clear()

    def left(self, rng: Random, manner: str) -> dict[str, int]:
        if manner in {"none", "bytes"}:
            return self.synced
        if manner in {"all", "names"}:
            return self.now
        found = dict(self.synced)
        if rng.random() < 0.5:
            for names in self.pending[: rng.randrange(len(self.pending) + 1)]:
                _rename(found, names)
        else:
            chance = rng.choice((0.1, 0.5, 0.9))
            for names in self.pending:
                if rng.random() < chance:
                    _rename(found, names)
        return found


class Disk:
    """The files below `root`, which begins as an empty folder, as recorded calls leave them."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._top = _Folder(0)
        self._nodes: dict[int, _File | _Folder] = {0: self._top}
        self._numbers: dict[int, int] = {}

    def apply(self, call: FileCall) -> None:
        """What a call does; nothing, where it is about other places."""
        if call.what in {"write", "cut", "sync"}:
            number = self._numbers.get(call.node)
            if number is None:
                return
            node = self._nodes[number]
            if call.what == "sync":
                node.sync()
            elif isinstance(node, _File):
                node.change(call.at, call.content if call.what == "write" else None)
        elif call.path == self._root:
            self._numbers[call.node] = 0
        elif call.path.startswith(self._root + "/"):
            self._name(call)

    def settle(self) -> None:
        """All that was done so far is synced."""
        for node in self._nodes.values():
            node.sync()

    def tree(self) -> Tree:
        """What a process sees."""
        return self.crash(Random(0), "all")

    def crash(self, rng: Random, manner: str) -> Tree:
        """What is there when the power comes back."""
        found: Tree = {}
        kept: dict[int, Content] = {}

        def collect(folder: _Folder, place: str) -> None:
            for name, number in sorted(folder.left(rng, manner).items()):
                node = self._nodes[number]
                if isinstance(node, _Folder):
                    found[place + name] = Content(number, None)
                    collect(node, f"{place}{name}/")
                else:
                    if number not in kept:
                        kept[number] = Content(number, node.left(rng, manner))
                    found[place + name] = kept[number]

        collect(self._top, "")
        return found

    def _name(self, call: FileCall) -> None:
        folder, name = self._parent(call.path)
        if call.what in {"create", "mkdir"}:
            number = len(self._nodes)
            self._nodes[number] = _File(number) if call.what == "create" else _Folder(number)
            self._numbers[call.node] = number
            folder.change({name: number})
        elif call.what == "unlink":
            folder.change({name: None})
        else:
            number, (other, new) = folder.now[name], self._parent(call.other)
            if call.what == "link":
                other.change({new: number})
            elif other is folder:
                folder.change({name: None, new: number})
            else:
                other.change({new: number})
                folder.change({name: None})

    def _parent(self, path: str) -> tuple[_Folder, str]:
        *parts, name = path.removeprefix(self._root + "/").split("/")
        folder = self._top
        for part in parts:
            found = self._nodes[folder.now[part]]
            assert isinstance(found, _Folder)
            folder = found
        return folder, name


def walks(calls: Iterable[FileCall]) -> Iterator[tuple[str, list[FileCall]]]:
    """(name, calls) of each way in a log of `call_faults.py record`."""
    name, found = "", list[FileCall]()
    for call in calls:
        if call.what == "mark" and (call.path == "end" or call.path.startswith("begin ")):
            if name:
                yield name, found
            name, found = call.path.removeprefix("begin "), []
        else:
            found.append(call)


def crashes(
    root: str, calls: Sequence[FileCall], rng: Random
) -> Iterator[tuple[str, Tree, list[str]]]:
    """(when and how, what is left, what was acknowledged) for every moment of a way and each of
    `MANNERS`; equal ones once."""
    disk = Disk(root)
    said: list[str] = []
    is_prepared = False
    seen: set[bytes] = set()
    for number, call in enumerate(calls):
        if call.what != "mark":
            disk.apply(call)
        elif call.path == "prepared":
            is_prepared = True
            disk.settle()
        else:
            said.append(call.path.removeprefix("acknowledge "))
        for manner in MANNERS if is_prepared else ():
            tree = disk.crash(rng, manner)
            key = _digest(tree, said)
            if key not in seen:
                seen.add(key)
                yield f"after call {number} ({call.what} {call.path}), {manner}", tree, list(said)


def write_tree(root: Path, tree: Tree, *, is_left_out: Callable[[str], bool]) -> None:
    """Make `root` what a tree says, in the place of what is there."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    first: dict[int, Path] = {}
    for place, what in tree.items():
        path = root / place
        if what.content is None:
            path.mkdir()
        elif is_left_out(place):
            continue
        elif what.number in first:
            os.link(first[what.number], path)
        else:
            path.write_bytes(what.content)
            first[what.number] = path


def read_tree(root: Path, *, is_left_out: Callable[[str], bool]) -> dict[str, bytes | None]:
    """Every place below `root` with its bytes; None for a folder."""
    places = {str(path.relative_to(root)): path for path in sorted(root.rglob("*"))}
    return {
        place: None if path.is_dir() else path.read_bytes()
        for place, path in places.items()
        if not is_left_out(place)
    }


def _apply(content: bytearray, at: int, new: bytes | None) -> None:
    if new is None:
        del content[at:]
    content.extend(bytes(max(at - len(content), 0)))
    if new is not None:
        content[at : at + len(new)] = new


def _apply_torn(rng: Random, content: bytearray, at: int, new: bytes) -> None:
    """Some sectors of a write, none where the file has grown with zeros alone."""
    content.extend(bytes(max(at + len(new) - len(content), 0)))
    is_prefix, chance = rng.random() < 0.5, rng.choice((0.0, 0.5))
    cut = rng.randrange(len(new) + 1) // SECTOR_BYTES * SECTOR_BYTES
    for start in range(0, len(new), SECTOR_BYTES):
        if start < cut if is_prefix else rng.random() < chance:
            piece = new[start : start + SECTOR_BYTES]
            content[at + start : at + start + len(piece)] = piece


def _rename(names: dict[str, int], changes: dict[str, int | None]) -> None:
    for name, number in changes.items():
        if number is None:
            names.pop(name, None)
        else:
            names[name] = number


def _digest(tree: Tree, said: Sequence[str]) -> bytes:
    digest = hashlib.sha256(repr(said).encode())
    for place, what in tree.items():
        digest.update(f"\0{place}\0{what.number}\0".encode())
        digest.update(b"\0" if what.content is None else what.content)
    return digest.digest()
