"""The images, sounds and videos of a request: where its body names them, and what an image is.

Of an image only the header is read here: its pixels are the engine's business. A body without any
of them costs a look at its messages.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import xxhash

from batchrun.errors import InputError

IMAGE_CODE = "invalid_image"
"""The code of the error with which a row or a call with a faulty image ends."""
IMAGE_LIMIT_BYTES = 32 << 20
MAX_PIXELS = 64_000_000
"""A small file can unpack to any size; 64 million pixels take 192 MB in an engine."""
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")
MEDIA_KEYS = {"image_url": "image", "audio_url": "audio", "video_url": "video", "file_url": "file"}
"""The keys by which a part of a message names what is not text, and what that is."""
_KEYS, _NESTED = frozenset(MEDIA_KEYS), frozenset({dict, list})
MEDIA_PLACES = ("messages", "input")
"""Where in a body parts may be that name what is not text."""
_CACHE_NAME = "uuid"
_ORIENTATION, _LYING = 0x0112, frozenset({5, 6, 7, 8})
"""The EXIF tag of how a camera was held, and the values that swap width and height."""


class ImageError(InputError):
    """An image, or its address, that no engine will be given; the message says why."""


@dataclass(frozen=True, slots=True)
class Image:
    """What tells two images apart, of what type one is, and how large, in pixels."""

    digest: str
    media_type: str
    width: int
    height: int


def read_image(raw: bytes) -> Image:
    """The image that these bytes are. Raises ImageError when they are none, or too much."""
    # Only whoever meets an image pays for the library.
    from PIL import Image as pillow

    if len(raw) > IMAGE_LIMIT_BYTES:
        raise ImageError(f"the image is over {IMAGE_LIMIT_BYTES >> 20} MiB")
    too_large = f"the image has over {MAX_PIXELS / 1e6:g} million pixels"
    try:
        with pillow.open(io.BytesIO(raw), formats=FORMATS) as image:
            width, height = image.size
            # A picture in several parts, as some cameras write it, begins with a JPEG.
            kind = "JPEG" if image.format == "MPO" else str(image.format)
            is_lying = False
            # For the EXIF tags of a PNG the library would unpack it whole; broken ones are ignored.
            with suppress(Exception):
                is_lying = kind == "JPEG" and image.getexif().get(_ORIENTATION) in _LYING
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):
        raise ImageError(too_large) from None
    except Exception:  # noqa: BLE001 - what a broken file makes its decoder raise is without bound
        kinds = ", ".join(FORMATS)
        raise ImageError(f"the image is broken, or of no known format ({kinds})") from None
    if width * height > MAX_PIXELS:
        raise ImageError(too_large)
    size = (height, width) if is_lying else (width, height)
    return Image(xxhash.xxh3_128_hexdigest(raw), pillow.MIME[kind], *size)


def is_data_url(url: str) -> bool:
    """Whether the address holds the data itself."""
    return url[:5].lower() == "data:"


def data_of(url: str) -> bytes:
    """What a data URL holds. Raises ImageError when that is not base64."""
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ImageError("a data URL must be written as data:image/png;base64,...")
    if len(data) > IMAGE_LIMIT_BYTES * 4 // 3 + 4:
        raise ImageError(f"the image is over {IMAGE_LIMIT_BYTES >> 20} MiB")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ImageError("the data URL of an image is not valid base64") from None


def data_url(raw: bytes) -> str:
    """The data URL that holds an image. Raises ImageError."""
    media_type = read_image(raw).media_type
    return f"data:{media_type};base64,{base64.b64encode(raw).decode('ascii')}"


def media_urls(body: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """(kind, address) of all that a chat or a response names besides its text: `image`, `audio`,
    `video`, `file`."""
    waiting = [body[key] for key in MEDIA_PLACES if key in body]
    while waiting:
        value = waiting.pop()
        if value.__class__ is dict:
            if not _KEYS.isdisjoint(value):
                yield from _named_in(value)
            value = value.values()
        elif value.__class__ is not list:
            continue
        nested = [item for item in value if item.__class__ in _NESTED]
        waiting += reversed(nested)


def _named_in(part: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for key, kind in MEDIA_KEYS.items():
        url = _url_in(part.get(key))
        if url is not None:
            yield kind, url


def with_urls(body: Mapping[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    """The body with `change(kind, address)` in place of each address that `media_urls` finds.

    What has none is shared with `body`, which stays as it is.
    """
    changed = {key: _with_urls(body[key], change) for key in MEDIA_PLACES if key in body}
    return {**body, **changed}


def _with_urls(value: Any, change: Callable[[str, str], str]) -> Any:
    if isinstance(value, list):
        return [_with_urls(item, change) for item in value]
    if not isinstance(value, dict):
        return value
    shown = {key: _with_urls(item, change) for key, item in value.items()}
    for key, kind in MEDIA_KEYS.items():
        url = _url_in(value.get(key))
        if url is not None:
            new = change(kind, url)
            shown[key] = {**value[key], "url": new} if isinstance(value[key], dict) else new
    return shown


def _url_in(value: object) -> str | None:
    url = value.get("url") if isinstance(value, dict) else value
    return url if isinstance(url, str) else None


def without_cache_names(body: dict[str, Any]) -> dict[str, Any]:
    """The body without a `uuid` anywhere in its messages or items; itself where there is none.

    An engine looks its caches up by that name in the place of the content: who sends one could read
    what others sent, or have them read something else. Raises ImageError.
    """
    named = [place for place in MEDIA_PLACES if _has_cache_name(body.get(place))]
    try:
        return {**body, **{place: _unnamed(body[place]) for place in named}} if named else body
    except RecursionError:
        raise ImageError("what names an image is nested too deep") from None


def _has_cache_name(value: object) -> bool:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if _CACHE_NAME in value:
                return True
            value = list(value.values())
        if isinstance(value, list):
            waiting += [item for item in value if item.__class__ in _NESTED]
    return False


def _unnamed(value: Any) -> Any:
    if isinstance(value, list):
        return [_unnamed(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _unnamed(item) for key, item in value.items() if key != _CACHE_NAME}


def check_media(body: Mapping[str, object]) -> None:
    """Raises ImageError for what no engine is given: an image in the body that is broken or too
    large, and what is neither in the body nor an image on the web."""
    for kind, url in media_urls(body):
        if not is_data_url(url):
            check_scheme(kind, url)
        elif kind == "image":
            read_image(data_of(url))


def check_scheme(kind: str, url: str) -> None:
    """Raises ImageError unless this is an image on the web."""
    if kind != "image":
        raise ImageError(f"{kind} must come as a data URL (got {url[:60]!r})")
    if not url.lower().startswith(("http://", "https://")):
        raise ImageError(
            f"an image must come as a data URL, or from http:// or https:// (got {url[:60]!r})"
        )
