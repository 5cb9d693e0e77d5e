"""Image columns -> data URLs. Paths stay within the folder of the input file."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Mapping, Sequence
from pathlib import Path

IMAGE_LIMIT_BYTES = 32 << 20

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
)


def image_url(value: object, folders: Sequence[Path]) -> str:
    """The URL for a column's value: a path below one of `folders`, bytes, a URL, or a struct
    with `bytes` or `path` as Hugging Face writes them.

    Raises ValueError with the reason when it is none of these, or over 32 MiB.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return _data_url(value, name="")
    if not isinstance(value, str) or not value:
        raise ValueError("the image column holds neither a path nor bytes")
    if value.startswith(("data:", "http://", "https://")):
        return value
    path = _confined(value, folders)
    try:
        with path.open("rb") as file:
            return _data_url(file.read(IMAGE_LIMIT_BYTES + 1), name=path.name)
    except OSError as failure:
        raise ValueError(f"image {value!r} cannot be read: {failure.strerror}") from None


def _confined(name: str, folders: Sequence[Path]) -> Path:
    outside = True
    for folder in folders:
        root = folder.resolve()
        path = (root / name).resolve()
        if path.is_relative_to(root):
            outside = False
            if path.is_file():
                return path
    if outside:
        raise ValueError(f"image {name!r} lies outside the folder of the input file")
    raise ValueError(f"image {name!r}: no such file beside the input file")


def _data_url(raw: bytes, *, name: str) -> str:
    if len(raw) > IMAGE_LIMIT_BYTES:
        raise ValueError(f"the image is over {IMAGE_LIMIT_BYTES >> 20} MiB")
    kind = _media_type(raw, name)
    return f"data:{kind};base64,{base64.b64encode(raw).decode('ascii')}"


def _media_type(raw: bytes, name: str) -> str:
    for magic, kind in _MAGIC:
        if raw.startswith(magic):
            return kind
    if raw[:4] == b"RIFF" and raw[8:12] == b"WEBP":
        return "image/webp"
    guess = mimetypes.guess_type(name)[0] or ""
    if not guess.startswith("image/"):
        raise ValueError("the image is of no known format (PNG, JPEG, GIF, WebP, BMP, TIFF)")
    return guess
