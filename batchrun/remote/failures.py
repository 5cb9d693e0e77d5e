"""What object storage and its client libraries raise, as the errors of `batchrun.errors`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from batchrun.errors import (
    BatchrunError,
    MissingObjectError,
    StorageError,
    StorageUnreachableError,
)

_PASSING_STATUSES = frozenset({408, 425, 429})
_PASSING_KINDS = frozenset({
    "ClientConnectionError",
    "ClientPayloadError",
    "ConnectionError",
    "FSTimeoutError",
    "HTTPClientError",
    "ServiceRequestError",
    "ServiceResponseError",
    "TimeoutError",
})
_DENIED_KINDS = frozenset({
    "ClientAuthenticationError",
    "CredentialRetrievalError",
    "DefaultCredentialsError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "PermissionError",
})
"""Names of classes of botocore, aiohttp, Google's and Azure's clients: none of them need be
installed."""
_MISSING_CODES = frozenset({"NoSuchBucket"})


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Raises MissingObjectError, StorageError or StorageUnreachableError, one line that names
    `url`, for whatever a client library raises within."""
    try:
        yield
    except BatchrunError:
        raise
    except Exception as failure:
        raise _explain(url, failure) from failure


def _explain(url: str, failure: Exception) -> BatchrunError:
    cause = failure.__cause__ if failure.__cause__ is not None else failure
    code, status = _code_of(cause), _status_of(cause)
    kinds = {kind.__name__ for kind in (*type(failure).__mro__, *type(cause).__mro__)}
    said = f" ({code})" if code else ""
    if isinstance(failure, FileNotFoundError) or status == 404:
        if code in _MISSING_CODES:
            return MissingObjectError(f"{url}: there is no such bucket")
        return MissingObjectError(f"{url}: there is no such object")
    if kinds & _DENIED_KINDS or status in {401, 403}:
        return StorageError(
            f"{url}: access denied{said or f' ({type(cause).__name__})'}; the credentials come "
            "from the environment"
        )
    is_passing = status is not None and (status >= 500 or status in _PASSING_STATUSES)
    if is_passing or (status is None and kinds & _PASSING_KINDS):
        why = said or f" ({type(cause).__name__})"
        return StorageUnreachableError(f"{url}: the storage does not answer{why}; try again later")
    words = " ".join(str(failure).split())[:200] or type(failure).__name__
    return StorageError(f"{url}: the storage cannot be used: {words}")


def _code_of(cause: BaseException) -> str | None:
    code = _error_of(cause).get("Code")
    return code if isinstance(code, str) and not code.isdecimal() else None


def _status_of(cause: BaseException) -> int | None:
    """The HTTP status behind an error, where there was a reply."""
    response = getattr(cause, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    for name in ("status_code", "status", "code"):
        status = getattr(cause, name, None)
        if isinstance(status, int):
            return status
    return None


def _error_of(cause: BaseException) -> dict[str, object]:
    response = getattr(cause, "response", None)
    found = response.get("Error", {}) if isinstance(response, dict) else {}
    return found if isinstance(found, dict) else {}
