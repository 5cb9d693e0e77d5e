"""URLs of objects: which are served, and what a well-formed one is."""

from __future__ import annotations

import re

LIBRARIES = {
    "s3": "s3fs: pip install 'batchrun[s3]'",
    "gs": "gcsfs: pip install gcsfs",
    "az": "adlfs: pip install adlfs",
    "abfs": "adlfs: pip install adlfs",
}
"""What serves each scheme, and how to install it. No other scheme is ever handed to fsspec."""
MAX_NAME_BYTES = 128
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def is_url(place: str) -> bool:
    """Whether this names an object, or tries to; else it is a path."""
    return _URL.match(place) is not None


def scheme_of(url: str) -> str:
    """`s3` and so on."""
    return url.partition("://")[0].lower()


def name_of(url: str) -> str:
    """The last part of an object's key, or the end of a long one: what a copy of it is called."""
    name = url.rpartition("/")[2].encode("utf-8", "replace")
    return name[-MAX_NAME_BYTES:].decode("utf-8", "ignore")


def check_place(place: str) -> str:
    """The place of one input or output: any path, or the URL of an object. Raises ValueError."""
    if is_url(place):
        check_url(place)
        if not _key_of(place) or place.endswith("/"):
            raise ValueError(f"{place}: names no object; write {scheme_of(place)}://BUCKET/KEY")
    return place


def check_prefix(url: str) -> str:
    """The URL of a bucket, or of a part of one, without a slash at its end. Raises ValueError."""
    if not is_url(url):
        raise ValueError(f"must be a URL such as s3://BUCKET/PREFIX (got {url!r})")
    check_url(url)
    return url.rstrip("/")


def check_url(url: str) -> None:
    """Raises ValueError for a URL that is not served; the message repeats no credentials."""
    scheme, rest = scheme_of(url), url.partition("://")[2]
    if scheme not in LIBRARIES:
        known = ", ".join(f"{name}://" for name in LIBRARIES)
        raise ValueError(f"{scheme}:// is not served; use {known}, or a path")
    bucket = rest.partition("/")[0]
    if not bucket:
        raise ValueError(f"{url}: names no bucket")
    if "@" in bucket and (":" in bucket or scheme in {"s3", "gs"}):
        raise ValueError(
            f"{scheme}://: credentials do not belong in a URL; set them in the environment"
        )
    if "::" in url or any(ord(char) < 32 for char in url):
        raise ValueError(f"{url!r}: '::' and control characters cannot be part of a URL")
    if {".", ".."} & set(rest.split("/")):
        raise ValueError(f"{url}: '.' and '..' cannot be part of a URL")


def _key_of(url: str) -> str:
    return url.partition("://")[2].partition("/")[2]
