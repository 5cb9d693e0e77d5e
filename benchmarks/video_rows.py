"""Rows in the shape of NExT-QA with frames: questions about videos, each with some real images."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from batchrun.samples.importers import read_nextqa

MODEL = "tiny-vision"
ENDPOINT: Final = "/v1/chat/completions"
SIZES = ((320, 240), (240, 320), (400, 120))
"""(width, height) of frames, by turns."""
QUESTION = (
    "\nQuestion: {{ question }}?\nA. {{ a0 }}\nB. {{ a1 }}\nC. {{ a2 }}\nD. {{ a3 }}\n"
    "E. {{ a4 }}\nAnswer with one letter:"
)
_COLUMNS = ("id", "video_id", "video", "question", "a0", "a1", "a2", "a3", "a4", "answer")
_FOCUS = 12
"""Points of light along each side of a frame."""


@dataclass(frozen=True, slots=True)
class VideoRows:
    """Questions about videos in no order, and the frames of each; `seed` draws both."""

    annotations: Path
    num_rows: int = 400
    num_frames: int = 8
    seed: int = 0
    max_tokens: int = 4

    def write(self, folder: Path, name: str, base_url: str = "") -> Path:
        """The job file NAME.yaml in `folder`, and beside it its rows and a folder of frames, which
        they name by path, or by an address below `base_url`."""
        rows = self.rows()
        for video_id in {row["video_id"] for row in rows}:
            for frame, raw in enumerate(self.frames(video_id)):
                path = folder / _frame_name(name, video_id, frame)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(raw)
        for row in rows:
            names = (_frame_name(name, row["video_id"], frame) for frame in range(self.num_frames))
            row |= {f"frame{frame}": base_url + name for frame, name in enumerate(names)}
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
        content: list[Any] = [
            {"image": {"column": f"frame{frame}"}} for frame in range(self.num_frames)
        ]
        content.append({"type": "text", "text": QUESTION})
        job = {
            "name": name,
            "model": MODEL,
            "input": {
                "path": f"{name}.parquet",
                "id": "id",
                "messages": [{"role": "user", "content": content}],
            },
            "request": {"temperature": 0, "max_tokens": self.max_tokens},
            "output": {"path": f"{name}-answers.parquet"},
        }
        path = folder / f"{name}.yaml"
        path.write_text(json.dumps(job))
        return path

    def batch_lines(self) -> bytes:
        """The same rows as the input of a batch of OpenAI's API, each frame a data URL."""
        shown: dict[str, list[Any]] = {}
        for row in self.rows():
            if row["video_id"] not in shown:
                shown[row["video_id"]] = [image_part(raw) for raw in self.frames(row["video_id"])]
        return b"".join(
            batch_line(row["id"], [*shown[row["video_id"]], _question(row)], self.max_tokens)
            for row in self.rows()
        )

    def rows(self) -> list[dict[str, Any]]:
        """All questions about the first videos of the annotations, shuffled."""
        videos: dict[str, list[dict[str, Any]]] = {}
        for values in read_nextqa(self.annotations, video_tokens=1):
            row = dict(zip(_COLUMNS, values, strict=True))
            del row["video"]
            videos.setdefault(row["video_id"], []).append(row)
        rows = list(islice(chain.from_iterable(videos.values()), self.num_rows))
        Random(self.seed).shuffle(rows)
        return rows

    def frames(self, video_id: str) -> list[bytes]:
        """The frames of a video, as JPEG: spots of light that move a little from one to the next.
        The same bytes each time."""
        rng = np.random.RandomState([self.seed, *video_id.encode()])
        size = SIZES[rng.randint(len(SIZES))]
        lights = rng.uniform(0, 255, (_FOCUS, _FOCUS, 3))
        frames = []
        for _ in range(self.num_frames):
            lights = np.clip(lights + rng.normal(0, 20, lights.shape), 0, 255)
            image = Image.fromarray(lights.astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)
            file = io.BytesIO()
            image.save(file, "JPEG", quality=80)
            frames.append(file.getvalue())
        return frames


def image_part(raw: bytes) -> dict[str, Any]:
    """A JPEG as a part of a message."""
    url = f"data:image/jpeg;base64,{base64.b64encode(raw).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def batch_line(custom_id: str, content: Sequence[Any], max_tokens: int) -> bytes:
    """One request of a batch: a user's message of these parts."""
    messages = [{"role": "user", "content": list(content)}]
    body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    line = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}
    return json.dumps(line).encode() + b"\n"


def _frame_name(name: str, video_id: str, frame: int) -> str:
    return f"{name}-frames/{video_id}-{frame}.jpg"


def _question(row: dict[str, Any]) -> dict[str, str]:
    text = QUESTION
    for column in ("question", "a0", "a1", "a2", "a3", "a4"):
        text = text.replace(f"{{{{ {column} }}}}", row[column])
    return {"type": "text", "text": text}
