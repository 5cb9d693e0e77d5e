"""Values that callers send, checked one by one; what is wrong is said in OpenAI's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.datastructures import QueryParams

from batchrun.api.errors import ApiError, missing_parameter
from batchrun.inputs.batch_lines import type_name

MIN_EXPIRY_S = 3_600
MAX_EXPIRY_S = 2_592_000


def wrong_type(param: str, expected: str, value: object) -> ApiError:
    """`expected` has its article: `a string`."""
    message = (
        f"Invalid type for '{param}': expected {expected}, but got {type_name(value)} instead."
    )
    return ApiError(400, message, code="invalid_type", param=param)


def required_text(document: Mapping[str, object], key: str) -> str:
    """The text under a key that must be there."""
    if key not in document:
        raise missing_parameter(key)
    value = document[key]
    if not isinstance(value, str):
        raise wrong_type(key, "a string", value)
    return value


def check_choice(param: str, value: str, choices: Sequence[str]) -> None:
    """Refuse what is not one of a few values."""
    if value in choices:
        return
    *most, last = (f"'{choice}'" for choice in choices)
    joint = ", and " if len(most) > 1 else " and "
    listed = f"{', '.join(most)}{joint}{last}" if most else last
    message = f"Invalid value: '{value}'. Supported values are: {listed}."
    raise ApiError(400, message, code="invalid_value", param=param)


def check_range(param: str, value: int, low: int, high: int) -> None:
    """Refuse a number out of bounds."""
    if value < low:
        word, bound, code = "below minimum", f">= {low}", "integer_below_min_value"
    elif value > high:
        word, bound, code = "above maximum", f"<= {high}", "integer_above_max_value"
    else:
        return
    message = (
        f"Invalid '{param}': integer {word} value. Expected a value {bound}, but got {value} "
        "instead."
    )
    raise ApiError(400, message, code=code, param=param)


def check_expiry(param: str, anchor: object, seconds: object) -> int:
    """The seconds of an `expires_after`, whose parts were given as they are."""
    if anchor is None:
        raise missing_parameter(f"{param}.anchor")
    if not isinstance(anchor, str):
        raise wrong_type(f"{param}.anchor", "a string", anchor)
    check_choice(f"{param}.anchor", anchor, ["created_at"])
    if seconds is None:
        raise missing_parameter(f"{param}.seconds")
    if not isinstance(seconds, int) or isinstance(seconds, bool):
        raise wrong_type(f"{param}.seconds", "an integer", seconds)
    check_range(f"{param}.seconds", seconds, MIN_EXPIRY_S, MAX_EXPIRY_S)
    return seconds


def limit_in(query: QueryParams, default: int) -> int | None:
    """The query's `limit`; None when it is no number that a page could have."""
    text = query.get("limit")
    if text is None:
        return default
    is_number = text.isascii() and text.removeprefix("-").isdigit() and len(text) < 10
    return int(text) if is_number else None
