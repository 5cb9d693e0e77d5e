"""The real NExT-QA multiple-choice questions (the validation set), with stand-ins for videos.

The data set has annotations only. The text of a video is generated, and its length goes with
the video's number of frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from random import Random

from batchrun.datasets.nextqa_sample import LETTERS, video_text
from batchrun.datasets.sources import csv_records, find_file, require_file
from batchrun.datasets.texts import TextSource
from batchrun.datasets.writer import Row
from batchrun.errors import DataError

COLUMNS = ("video", "frame_count", "question", "answer", "qid", "a0", "a1", "a2", "a3", "a4")
NEXTQA = ("", "dataset/nextqa", "nextqa")
LONG_VIDEO_FRAMES = 2_000
SEED = 1


def read_nextqa(source: Path, *, video_tokens: int) -> Iterator[Row]:
    """Rows of `source`, a NExT-QA checkout or a folder with `mc_val.csv` or `val.csv`.

    A video of 2,000 frames or more becomes `video_tokens` tokens, a shorter one fewer in
    proportion.
    """
    path = find_file(source, NEXTQA, "mc_val.csv") or require_file(source, NEXTQA, "val.csv")
    texts = TextSource(SEED)

    @lru_cache(maxsize=256)
    def video(video_id: str, num_frames: int) -> str:
        num_tokens = video_tokens * min(1.0, num_frames / LONG_VIDEO_FRAMES)
        return video_text(video_id, num_tokens, Random(f"{SEED} video {video_id}"), texts)

    for line, record in csv_records(path, COLUMNS):
        where = f"{path}:{line}"
        num_frames = _number(record, "frame_count", where)
        answer = _number(record, "answer", where)
        if answer >= len(LETTERS):
            raise DataError(f"{where}: answer is {answer}, not a number from 0 to 4")
        video_id = record["video"]
        options = (record[f"a{number}"] for number in range(len(LETTERS)))
        row_id = f"{video_id}-{record['qid']}"
        text = video(video_id, num_frames)
        yield row_id, video_id, text, record["question"], *options, LETTERS[answer]


def _number(record: dict[str, str], key: str, where: str) -> int:
    if not record[key].isdecimal():
        raise DataError(f"{where}: {key} is {record[key]!r}, not a number")
    return int(record[key])
