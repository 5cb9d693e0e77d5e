"""Faults on demand: rules that pick a request and say what goes wrong with it.

A script is a JSON list of `{"match": {...}, "action": {...}, "times": N}`. The first rule that
matches is applied, at most `times` times (without it: always). Uses of rules with `times` are kept
in `SCRIPT.used`, so that a rule which ends the process is not applied again after its restart.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from batchrun.errors import InputError

_REQUEST_ID = re.compile(r"batchrun-\d+-.+-(?P<row>\d+)-\d+")


class Match(BaseModel):
    """Which requests: all given fields must hold; none given means every request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    row: int | None = None
    """The row in the request id."""
    substring: str | None = None
    """Text that stands in the request's body."""
    nth: int | None = Field(default=None, ge=1)
    """The Nth request since the start, from 1."""
    every: int | None = Field(default=None, ge=1)
    """Each Nth request."""


class Action(BaseModel):
    """What happens. `delay_s` comes first and goes with any other."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    delay_s: float = Field(default=0.0, ge=0)
    status: int | None = Field(default=None, ge=100, le=599)
    body: str | None = None
    """Body of the reply with `status`; default: an OpenAI error."""
    retry_after: str | None = None
    finish_reason: str | None = None
    """Answer as usual, but with this reason."""
    garbage: bool = False
    """Answer 200 with something that is not JSON."""
    hang: bool = False
    """Never answer."""
    stall: bool = False
    """From now on answer nothing but health and metrics, as if the core hung."""
    drop_connection: bool = False
    die: bool = False
    """End the process at once."""


class Rule(BaseModel):
    """One line of a script."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    match: Match = Match()
    action: Action
    times: int | None = Field(default=None, ge=1)


class RuleBook:
    """Rules with the count of their uses."""

    def __init__(self, rules: Sequence[Rule], used_path: Path | None = None) -> None:
        """`used_path` keeps the uses over restarts; None keeps them in memory."""
        self._rules = tuple(rules)
        self._used_path = used_path
        self._num_requests = 0
        self._num_uses = Counter(_read_uses(used_path))

    def choose(self, *, request_id: str, body: bytes) -> Action:
        """The action for the next request; the empty action when no rule matches."""
        self._num_requests += 1
        for index, rule in enumerate(self._rules):
            if self._is_spent(index) or not self._matches(rule.match, request_id, body):
                continue
            self._note_use(index)
            return rule.action
        return Action()

    def _is_spent(self, index: int) -> bool:
        times = self._rules[index].times
        return times is not None and self._num_uses[index] >= times

    def _matches(self, match: Match, request_id: str, body: bytes) -> bool:
        return (
            (match.row is None or match.row == _row_of(request_id))
            and (match.substring is None or match.substring.encode() in body)
            and (match.nth is None or match.nth == self._num_requests)
            and (match.every is None or self._num_requests % match.every == 0)
        )

    def _note_use(self, index: int) -> None:
        self._num_uses[index] += 1
        if self._used_path is not None and self._rules[index].times is not None:
            append_line(self._used_path, str(index))


def load_rules(path: Path) -> RuleBook:
    """Read a script. Raises InputError naming the file and the place of the mistake."""
    try:
        rules = TypeAdapter(list[Rule]).validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path}: rule {place}: {first['msg']}") from error
    return RuleBook(rules, path.with_name(f"{path.name}.used"))


def append_line(path: Path, line: str) -> None:
    """Append one line in one write, so that lines of several writers never mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def _row_of(request_id: str) -> int | None:
    found = _REQUEST_ID.fullmatch(request_id)
    return int(found["row"]) if found else None


def _read_uses(used_path: Path | None) -> list[int]:
    if used_path is None or not used_path.exists():
        return []
    return [json.loads(line) for line in used_path.read_text().splitlines()]
