"""Small images for tests, and where requests name them."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def picture(seed: int = 0, size: tuple[int, int] = (32, 24), kind: str = "PNG") -> bytes:
    """An image of (width, height) that no other seed has."""
    pixels = np.random.RandomState(seed).randint(0, 255, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has so many pixels."""
    return png(width, height, (b"IDAT", zlib.compress(bytes(64))))


def png(width: int, height: int, *pixels: tuple[bytes, bytes]) -> bytes:
    """A PNG with these chunks, each a kind and its data, between its header and its end."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), *pixels, (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def data_url_of(raw: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(raw).decode()}"


def image_body(*urls: str, text: str = "what?") -> dict[str, Any]:
    """A chat of one message: images, then a text."""
    content: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content.append({"type": "text", "text": text})
    return {"model": "m", "messages": [{"role": "user", "content": content}]}
