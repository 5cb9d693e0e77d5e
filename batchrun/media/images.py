"""The images, sounds and videos of a request: where its body names them, and what an image is.

Of an image only the header is read here: its pixels are the engine's business. A body without any
of them costs a look at its messages.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import struct
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
MAX_CHUNKS = 50_000
"""Of a PNG, before and with its pixels; those of 32 MiB have 4,000 as most programs write them."""
MAX_PROFILES = 16
"""Of a PNG, which has one colour profile at most; each can unpack to 1 MiB."""
MAX_SEGMENTS, MAX_TABLE_BYTES = 2_000, 1 << 20
"""Of a JPEG before its pixels: segments, and the bytes of those that a decoder takes apart; of a
WebP, those of its EXIF tags."""
MAX_TAG_BYTES = 256 << 10
"""Of a tag of a TIFF that is a list of numbers; longer ones take a decoder seconds."""
MAX_READS = 200_000
"""Before a decoder comes to the pixels."""
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")
MEDIA_KEYS = {"image_url": "image", "audio_url": "audio", "video_url": "video", "file_url": "file"}
"""The keys by which a part of a message names what is not text, and what that is."""
_KEYS, _NESTED = frozenset(MEDIA_KEYS), frozenset({dict, list})
MEDIA_PLACES = ("messages", "input")
"""Where in a body parts may be that name what is not text."""
_CACHE_NAME = "uuid"
_TAGGED, _ORIENTATION, _LYING = {"JPEG", "WEBP"}, 0x0112, frozenset({5, 6, 7, 8})
"""Formats with the EXIF tag of how a camera was held, and its values that swap width and height."""
_TIFF, _BYTE_TYPES = (b"II", b"MM"), frozenset({1, 2, 7})
_PNG, _PIXEL_CHUNKS = b"\x89PNG\r\n\x1a\n", frozenset({b"IDAT", b"fdAT"})
_JPEG, _SCAN = b"\xff\xd8", b"\xda"
_MARKER = re.compile(rb"\xff([^\x00\xff])")
_BARE_MARKER = re.compile(rb"[\xc8\xd0-\xd9\xf0-\xfd]")
"""Pillow takes these to have no length behind them."""
_PLAIN_SEGMENT = re.compile(rb"\xfe|[\xe0-\xef](?!..Exif\0\0|..Photoshop 3\.0\0)", re.DOTALL)
"""These are kept as they come."""
_CHUNK_KIND = re.compile(rb"\w{4}")


class ImageError(InputError):
    """An image, or its address, that no engine will be given; the message says why."""


class _Header(io.BytesIO):
    """A file that ends a decoder's search for the pixels when it takes too many reads."""

    num_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.num_reads += 1
        if self.num_reads > MAX_READS:
            raise ImageError(f"the image has over {MAX_READS:,} parts before its pixels")
        return super().read(size)


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
        _check_parts(raw)
        with pillow.open(_Header(raw), formats=FORMATS) as image:
            width, height = image.size
            # A picture in several parts, as some cameras write it, begins with a JPEG.
            kind = "JPEG" if image.format == "MPO" else str(image.format)
            if len(image.info.get("exif", b"")) > MAX_TABLE_BYTES:
                raise ImageError(f"the image has over {MAX_TABLE_BYTES >> 20} MiB of EXIF")
            is_lying = False
            # For the EXIF tags of a PNG the library would unpack it whole; broken ones are ignored.
            with suppress(Exception):
                is_lying = kind in _TAGGED and image.getexif().get(_ORIENTATION) in _LYING
    except ImageError:
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):
        raise ImageError(too_large) from None
    except Exception:  # noqa: BLE001 - what a broken file makes its decoder raise is without bound
        kinds = ", ".join(FORMATS)
        raise ImageError(f"the image is broken, or of no known format ({kinds})") from None
    if width * height > MAX_PIXELS:
        raise ImageError(too_large)
    size = (height, width) if is_lying else (width, height)
    return Image(xxhash.xxh3_128_hexdigest(raw), pillow.MIME[kind], *size)


def _check_parts(raw: bytes) -> None:
    """Raises ImageError where a decoder would be long at what is no pixels."""
    if raw.startswith(_PNG):
        if raw.count(b"iCCP") > MAX_PROFILES:
            raise ImageError(f"the image has over {MAX_PROFILES} colour profiles")
        _check_chunks(raw)
    elif raw.startswith(_JPEG):
        _check_segments(raw)
    elif raw.startswith(_TIFF):
        _check_tags(raw)


def _check_chunks(png: bytes) -> None:
    """Raises ImageError where neither a chunk nor the end of the file follows the pixels: an engine
    would take that for a fault of its own."""
    at, kind = 8, b""
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(png):
            return
        is_after_pixels = kind in _PIXEL_CHUNKS
        length, kind = struct.unpack_from(">I4s", png, at)
        if is_after_pixels and kind not in _PIXEL_CHUNKS:
            if not _CHUNK_KIND.fullmatch(kind):
                raise ImageError(
                    "the image is broken: no chunk of a PNG follows its pixels; save it again"
                )
            return
        at += 12 + length
    raise ImageError(f"the image has over {MAX_CHUNKS:,} chunks")


def _check_segments(jpeg: bytes) -> None:
    """Raises ImageError where a decoder would be long at the segments before the pixels."""
    at, num_table_bytes = 2, 0
    for _ in range(MAX_SEGMENTS):
        found = _MARKER.search(jpeg, at)
        if found is None or found[1] == _SCAN:
            return
        at = found.end()
        if _BARE_MARKER.fullmatch(found[1]):
            continue
        length = int.from_bytes(jpeg[at : at + 2], "big")
        if not _PLAIN_SEGMENT.match(jpeg, at - 1):
            num_table_bytes += length
        if num_table_bytes > MAX_TABLE_BYTES:
            raise ImageError(f"the image has over {MAX_TABLE_BYTES >> 20} MiB of EXIF or tables")
        at += length
    raise ImageError(f"the image has over {MAX_SEGMENTS:,} segments")


def _check_tags(tiff: bytes) -> None:
    """Raises ImageError where a tag of the first picture is a very long list of numbers."""
    from PIL.TiffImagePlugin import ImageFileDirectory_v1

    is_big = tiff[2] == 43
    tags, file = ImageFileDirectory_v1(tiff[: 16 if is_big else 8]), _Header(tiff)
    file.seek(tags.next)
    tags.load(file)
    for tag, data in tags.tagdata.items():
        if len(data) > MAX_TAG_BYTES and tags.tagtype[tag] not in _BYTE_TYPES:
            raise ImageError(f"the image has over {MAX_TAG_BYTES >> 10} KiB of numbers in one tag")


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
                yield from ((MEDIA_KEYS[key], url) for key, url in _named_in(value))
            value = value.values()
        elif value.__class__ is not list:
            continue
        nested = [item for item in value if item.__class__ in _NESTED]
        waiting += reversed(nested)


def _named_in(part: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for key in MEDIA_KEYS:
        named = part.get(key)
        url = named.get("url") if isinstance(named, dict) else named
        if isinstance(url, str):
            yield key, url


def with_urls(body: Mapping[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    """The body with `change(kind, address)` in place of each address that `media_urls` finds;
    `body` stays as it is."""
    changed = {key: body[key] for key in MEDIA_PLACES if key in body}
    waiting: list[Any] = [changed]
    while waiting:
        held = waiting.pop()
        if isinstance(held, dict):
            _change_urls(held, change)
        items = held.items() if isinstance(held, dict) else enumerate(held)
        for at, item in [each for each in items if each[1].__class__ in _NESTED]:
            held[at] = item.copy()
            waiting.append(held[at])
    return {**body, **changed}


def _change_urls(part: dict[str, Any], change: Callable[[str, str], str]) -> None:
    for key, url in list(_named_in(part)):
        new = change(MEDIA_KEYS[key], url)
        part[key] = {**part[key], "url": new} if isinstance(part[key], dict) else new


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
