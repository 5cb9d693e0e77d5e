"""Every error that batchrun raises on purpose.

    BatchrunError                exit 4   HTTP 500
      InputError                 exit 2   HTTP 400   the caller's file, flag or body is wrong
        JobSpecError             exit 2   HTTP 400   a job file: names file, line and key
        ConfigError              exit 2   HTTP 400   batchrun.yaml, a flag or BATCHRUN_*
        DataError                exit 2   HTTP 400   an input file cannot be read as described
          MissingObjectError     exit 2   HTTP 404   object storage has no such object
          MixedTypesError        exit 2   HTTP 400   files have a column in types that share none
        UnknownJobError          exit 2   HTTP 404
        QuotaError               exit 2   HTTP 429   more than an API key may have at once
      DaemonUnavailableError     exit 3   HTTP 503   the command needs `batchrun up`
      StateError                 exit 4   HTTP 409   the job is not in a state that allows this
      StoreError                 exit 4   HTTP 500   the store cannot be opened, read or written
        StoreLockedError         exit 4   HTTP 503   another process holds the store
          NotLeadingError        exit 4   HTTP 503   another daemon leads on this database
        StoreFullError           exit 4   HTTP 507   no room left on the disk
        StoreUnreachableError    exit 4   HTTP 503   the database does not answer
      StorageError               exit 4   HTTP 500   object storage refuses, or cannot be used
        StorageUnreachableError  exit 4   HTTP 503   object storage does not answer
      OverloadedError            exit 4   HTTP 503   too many files or connections are open
      EngineError                exit 4   HTTP 503   an engine cannot be started or reached
        EngineSilentError        exit 4   HTTP 504   an engine says nothing for too long
      JobFailedError             exit 4   HTTP 500   a job ended or paused without finishing
        RowsFailedError          exit 1   HTTP 500   rows failed: all of them, or some

The message is one line for the user: what, where, and what to do about it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

MAX_MESSAGE_CHARS = 4_000
"""Of a message, whatever it quotes."""
_QUOTED_CHARS = 100


def shortened(text: str, most_chars: int = _QUOTED_CHARS) -> str:
    """The text, cut where it is longer: how a message quotes what a caller or an engine sent."""
    return text if len(text) <= most_chars else f"{text[:most_chars]}..."


class BatchrunError(Exception):
    """Something went wrong that the user can act on. The message is one line."""

    exit_code = 4
    http_status = 500

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message, MAX_MESSAGE_CHARS))


class InputError(BatchrunError):
    """The caller's input is wrong."""

    exit_code = 2
    http_status = 400


class JobSpecError(InputError):
    """A job file is wrong; the message names file, line and key."""


class ConfigError(InputError):
    """batchrun.yaml, a flag or an environment variable is wrong."""


class DataError(InputError):
    """An input file cannot be read as the job file describes it."""


class MissingObjectError(DataError):
    """Object storage has no object of this name."""

    http_status = 404


class MixedTypesError(DataError):
    """The files of an input have a column in types whose values do not go together."""


class UnknownJobError(InputError):
    """No job has this id."""

    http_status = 404


class QuotaError(InputError):
    """An API key has as much at once as it may."""

    http_status = 429


class DaemonUnavailableError(BatchrunError):
    """The command needs a running daemon."""

    exit_code = 3
    http_status = 503


class StateError(BatchrunError):
    """The job is not in a state that allows this."""

    http_status = 409


class StoreError(BatchrunError):
    """The store cannot be opened, read or written."""


class StoreLockedError(StoreError):
    """Another process holds the store."""

    http_status = 503


class NotLeadingError(StoreLockedError):
    """Another daemon leads on this database: this one changes nothing there."""


class StoreFullError(StoreError):
    """The disk that holds the store is full."""

    http_status = 507


class StoreUnreachableError(StoreError):
    """The database that holds the store does not answer."""

    http_status = 503


class StorageError(BatchrunError):
    """Object storage refuses what was asked of it, or cannot be used at all."""


class StorageUnreachableError(StorageError):
    """Object storage does not answer; the same may work a moment later."""

    http_status = 503


class OverloadedError(BatchrunError):
    """This process has as many files and connections open as it may."""

    http_status = 503


class EngineError(BatchrunError):
    """An engine cannot be started or reached."""

    http_status = 503


class EngineSilentError(EngineError):
    """An engine took a call, and says nothing for too long."""

    http_status = 504


class JobFailedError(BatchrunError):
    """A job ended, or paused itself, without finishing."""


class RowsFailedError(JobFailedError):
    """All rows of a job failed; or some, where that matters: `--strict`, `errors="raise"`."""

    exit_code = 1


UNSAFE = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What a terminal obeys instead of showing it: C0 and C1 controls but for tab and line feed, and
what turns the direction of text."""


def shown_safely(text: str) -> str:
    """The text with `UNSAFE` characters replaced, each by one that shows that there was one."""
    return UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text)


def suggestion(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` when one of `known` is close to `word`, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""


def known_name(name: str, known: Iterable[str]) -> str:
    """The name. Raises ValueError, one line that lists all, when it is none of `known`."""
    names = list(known)
    if name in names:
        return name
    raise ValueError(f"must be one of {', '.join(names)}, not {name!r}{suggestion(name, names)}")
