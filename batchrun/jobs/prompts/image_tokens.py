"""How many tokens an image takes: what the model's own processor says of its size.

The processor runs in a process of its own, for `transformers` is large. Each size is asked for
once. Where there is no processor, an image is taken to have a token for 28 x 28 pixels, as those
of Qwen have.

In a prompt's text an image is `IMAGE_TOKEN_BYTES` bytes for each of its tokens, which no text has:
equal images are equal bytes, and whatever counts bytes counts images too.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import xxhash

from batchrun.jobs.prompts.prompt_text import media_mark
from batchrun.media.images import (
    Image,
    ImageError,
    data_of,
    is_data_url,
    media_urls,
    read_image,
    with_urls,
)

log = logging.getLogger(__name__)

IMAGE_TOKEN_BYTES = 4
IMAGE_BYTES = bytes(range(0xF8, 0x100))
"""No text in UTF-8 holds these."""
_IMAGES = re.compile(rb"[\xf8-\xff]+")
PIXELS_PER_TOKEN = 28 * 28
LEAST_TOKENS, MOST_TOKENS = 6, 16_384
MAX_SIZES = 65_536
START_S = 120.0
ANSWER_S = 30.0
_USUAL_SIZE = (640, 480)
"""Of an image on the web, which is not fetched to plan or count a job."""
_PATTERN_BYTES = 21
_READING_KEYS = ("media_io_kwargs", "mm_processor_kwargs")
"""How a request has its media read, which engines count to what tells them apart."""

PROGRAM = """
import sys
from transformers import AutoProcessor
answers, sys.stdout = sys.stdout, sys.stderr
processor = AutoProcessor.from_pretrained(sys.argv[1], trust_remote_code=False)

def count(height, width):
    try:
        found = processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
        return found.num_image_tokens[0]
    except (AttributeError, TypeError, KeyError, NotImplementedError):
        from PIL import Image
        image = Image.new("RGB", (width, height))
        return len(processor(text=[processor.image_token], images=[image]).input_ids[0])

print("ready", file=answers, flush=True)
for line in sys.stdin:
    height, width = map(int, line.split())
    try:
        print(count(height, width), file=answers, flush=True)
    except Exception as error:
        print("cannot tell:", " ".join(str(error).split())[:200], file=answers, flush=True)
"""


class ProcessorError(Exception):
    """The model's processor does not answer."""


class RefusedSizeError(ProcessorError):
    """The model's processor cannot tell of this size; of others it may."""


class Processor:
    """The image processor of the model in `folder`, in a process that starts with the first
    question; `close` it."""

    def __init__(self, folder: Path, python: Path) -> None:
        self._command = [str(python), "-c", PROGRAM, str(folder)]
        self._child: subprocess.Popen[str] | None = None

    def count(self, width: int, height: int) -> int:
        """Tokens of an image of this size. Raises RefusedSizeError and ProcessorError."""
        try:
            child = self._child or self._start()
            assert child.stdin is not None
            child.stdin.write(f"{height} {width}\n")
            child.stdin.flush()
        except OSError as error:
            raise ProcessorError(f"it cannot be asked: {error}") from None
        answer = _read_line(child, ANSWER_S)
        if answer.startswith("cannot tell:"):
            raise RefusedSizeError(answer)
        if not answer.isdecimal():
            raise ProcessorError(answer)
        return int(answer)

    def close(self) -> None:
        """End the process, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    def _start(self) -> subprocess.Popen[str]:
        env = os.environ | {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
        env["CUDA_VISIBLE_DEVICES"] = ""
        self._child = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            text=True,
        )
        if (answer := _read_line(self._child, START_S)) != "ready":
            raise ProcessorError(answer)
        return self._child


def _read_line(child: subprocess.Popen[str], limit_s: float) -> str:
    """The next line, which comes whole: the child flushes lines. Raises ProcessorError."""
    assert child.stdout is not None
    # `select` knows the first 1,024 open files only.
    waiting = select.poll()
    waiting.register(child.stdout, select.POLLIN)
    if not waiting.poll(limit_s * 1_000):
        raise ProcessorError(f"it says nothing for {limit_s:g} s")
    line = child.stdout.readline()
    if not line:
        raise ProcessorError("it ended (no `transformers`, or files of the model that it lacks)")
    return line.strip()


class ImageTokens:
    """Counts the tokens of images for one model, and puts images into its prompts' texts.

    `folder` None: there are no files to ask. `python` is an interpreter that has `transformers`, as
    that of an engine; None: this one. Blocking; `close` it.
    """

    def __init__(self, folder: Path | None = None, python: Path | None = None) -> None:
        self._sizes = {} if folder is None else _known_sizes(folder, _age_of(folder))
        program = python or Path(sys.executable)
        self._processor = None if folder is None else Processor(folder, program)
        self._has_refused = False

    def count(self, width: int, height: int) -> int:
        """Tokens of an image of so many pixels, at least 1."""
        known = self._sizes.get((width, height))
        return self._asked(width, height) if known is None else known

    def text(
        self, body: Mapping[str, object], layout: Callable[[Mapping[str, object]], bytes]
    ) -> bytes:
        """What `layout` makes of the body, with the bytes of images where it puts them.

        A body without images is laid out as it is.
        """
        if next(media_urls(body), None) is None:
            return layout(body)
        images: dict[bytes, list[bytes]] = {}
        asked = {key: body[key] for key in _READING_KEYS if body.get(key)}
        how = json.dumps(asked, sort_keys=True) if asked else ""

        def stand_in(kind: str, url: str) -> str:
            if kind != "image":
                return url + how
            image = read_image(data_of(url)) if is_data_url(url) else Image(url, "", *_USUAL_SIZE)
            image = replace(image, digest=image.digest + how)
            # An address that stands for the image's bytes: whoever names it, and however.
            mark = media_mark(image.digest).encode()
            images.setdefault(mark, []).append(self._image_bytes(image))
            return image.digest

        text = layout(with_urls(body, stand_in))
        for mark, same in images.items():
            # No more often than the body has it: a prompt may hold what looks like a mark.
            text = text.replace(mark, same[0], len(same))
        return text

    def close(self) -> None:
        """End the processor's process."""
        if self._processor is not None:
            self._processor.close()

    def _asked(self, width: int, height: int) -> int:
        num_tokens = _guessed(width, height)
        if self._processor is None:
            return num_tokens
        try:
            num_tokens = max(1, self._processor.count(width, height))
        except RefusedSizeError as problem:
            if not self._has_refused:
                log.warning("the model's processor %s; images of such a size are guessed", problem)
            self._has_refused = True
        except ProcessorError as problem:
            log.warning("the model's processor: %s; the tokens of images are guessed", problem)
            self._processor.close()
            self._processor = None
            return num_tokens
        if len(self._sizes) < MAX_SIZES:
            self._sizes[width, height] = num_tokens
        return num_tokens

    def _image_bytes(self, image: Image) -> bytes:
        """One token less than the image has: the placeholder of the template counts as one. As
        many at least as tell images apart."""
        number = xxhash.xxh3_64_intdigest(image.digest.encode())
        pattern = bytes(0xF8 | (number >> 3 * place) & 7 for place in range(_PATTERN_BYTES))
        num_tokens = max(self.count(image.width, image.height) - 1, LEAST_TOKENS)
        num_bytes = num_tokens * IMAGE_TOKEN_BYTES
        return (pattern * (num_bytes // _PATTERN_BYTES + 1))[:num_bytes]


def guess_image_tokens(url: str) -> int:
    """Tokens of an image, for whatever model: of usual size on the web, 0 in a broken data URL."""
    if not is_data_url(url):
        return _guessed(*_USUAL_SIZE)
    try:
        image = read_image(data_of(url))
    except ImageError:
        return 0
    return _guessed(image.width, image.height)


def _guessed(width: int, height: int) -> int:
    return min(max(1, width * height // PIXELS_PER_TOKEN), MOST_TOKENS)


def num_image_tokens(text: bytes) -> int:
    """Tokens of the images in a text, or in a part of one."""
    return (len(text) - len(text.translate(None, IMAGE_BYTES))) // IMAGE_TOKEN_BYTES


def show_images(text: bytes) -> bytes:
    """The text with a word for each of its images, for people."""
    return _IMAGES.sub(b"[image]", text)


@lru_cache(8)
def _known_sizes(folder: Path, age_ns: int) -> dict[tuple[int, int], int]:
    """(width, height) -> tokens, as far as this process has been told, for a model of this age."""
    return {}


def _age_of(folder: Path) -> int:
    files = (folder / name for name in ("config.json", "preprocessor_config.json"))
    return max((file.stat().st_mtime_ns for file in files if file.is_file()), default=0)
