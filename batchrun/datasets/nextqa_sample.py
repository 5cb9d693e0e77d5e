"""Generated NExT-QA: multiple-choice questions on one video.

The text of a video is generated prose that stands in for the video's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from random import Random

from batchrun.datasets.plan import SHUFFLED_GROUPS, SamplePlan
from batchrun.datasets.texts import TextSource, paragraphs
from batchrun.datasets.writer import Row
from batchrun.prose import fill

QUESTIONS = (
    "why did the {adj} {noun} {verb} the {noun} {prep} the {noun}",
    "what does the {noun} do after the {noun} has {past} the {adj} {noun}",
    "how do the {nouns} {verb} the {noun} at the end of the video",
)
OPTION = "{verb} the {adj} {noun} {prep} the {noun}"
LETTERS = "ABCDE"


def nextqa_rows(plan: SamplePlan, source: TextSource) -> Iterator[Row]:
    """Rows in the order of the plan; a video is made once per window of the plan."""

    @lru_cache(maxsize=SHUFFLED_GROUPS)
    def video(group: int) -> str:
        rng = Random(f"{plan.seed} video {group}")
        return video_text(f"{group:05}", float(plan.shared_tokens[group]), rng, source)

    for row in plan.rows():
        rng = Random(f"{plan.seed} question {row.group} {row.index}")
        yield (
            f"nextqa-{row.group:05}-{row.index:03}",
            f"video-{row.group:05}",
            video(row.group),
            fill(rng.choice(QUESTIONS), rng),
            *(fill(OPTION, rng) for _ in LETTERS),
            rng.choice(LETTERS),
        )


def video_text(video_id: str, num_tokens: float, rng: Random, source: TextSource) -> str:
    """A text of about `num_tokens` tokens that no other `video_id` begins with."""
    return f"video {video_id}\n\n{paragraphs(source.sentences(rng, num_tokens))}"
