"""The types of single values in batchrun.yaml, each checked on its own."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from batchrun.durations import parse_age_s, parse_duration_s
from batchrun.home import check_store_url
from batchrun.remote import check_prefix
from batchrun.types import DEFAULT_CLASS

Port = Annotated[int, Field(ge=1, le=65535)]


def _checked_listen(value: object) -> str:
    listen = str(value)
    host, _, port = listen.rpartition(":")
    if not port.isdigit() or not 1 <= int(port) <= 65535 or not host:
        raise ValueError(f"must be HOST:PORT, for example 127.0.0.1:8000 (got {listen!r})")
    return listen


def _checked_age(value: str) -> str:
    if parse_age_s(value) == 0:
        raise ValueError(f"must be longer than 0 (got {value!r})")
    return value


def _checked_window(window: str) -> str:
    parse_duration_s(window)
    return window


def _number_as_text(value: object) -> object:
    """`--max-model-len, 8192` in a list of arguments is text, whatever YAML makes of it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise ValueError(f"must be a URL such as http://127.0.0.1:8001 (got {url!r})")
    return url


def _checked_store(store: SecretStr) -> SecretStr:
    check_store_url(store.get_secret_value())
    return store


def at_least_one(engines: tuple[object, ...]) -> tuple[object, ...]:
    if not engines:
        raise ValueError("must list an engine; left out, batchrun starts one")
    return engines


def checked_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise ValueError(f"must be 1 to 64 letters, digits, dots, dashes or _ (got {name!r})")
    return name


def _checked_class_name(name: str) -> str:
    if name == DEFAULT_CLASS:
        raise ValueError(f"{name!r} is the class of all other calls; its bounds stand under 'slo'")
    return name


Listen = Annotated[str, BeforeValidator(_checked_listen)]
Name = Annotated[str, BeforeValidator(_number_as_text), AfterValidator(checked_name)]
ClassName = Annotated[Name, AfterValidator(_checked_class_name)]
Age = Annotated[str, AfterValidator(_checked_age)]
CompletionWindow = Annotated[str, AfterValidator(_checked_window)]
Argument = Annotated[str, BeforeValidator(_number_as_text)]
FilesUrl = Annotated[str, AfterValidator(check_prefix)]
StoreUrl = Annotated[SecretStr, AfterValidator(_checked_store)]
Url = Annotated[str, AfterValidator(_checked_url)]
