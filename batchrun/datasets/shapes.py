"""How long the prompts of a sample are and how much of them is shared.

The full scale has the sizes of table 1 of the Preble paper (number of requests, mean prompt
length, share of the prompt that earlier requests had already). The small scale has the same
form, cut down so that a CPU finishes a job in well under two minutes.

How tokens are counted: generated prose has 4.28 bytes to a token, half-way between the tiny
model's tokenizer (4.19) and the rule of 1.3 tokens to a word (4.38); generated tool documentation
has 3.5 bytes to a token, as the tiny model's tokenizer has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PROSE_BYTES_PER_TOKEN = 4.28
TOOL_BYTES_PER_TOKEN = 3.5

Scale = Literal["small", "full"]


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean and a standard deviation; `long_tail` means log-normal instead of normal."""

    mean: float
    deviation: float = 0.0
    long_tail: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """The planned sizes of one sample.

    A group is the rows that share one long text: a document, a tool list, a video.
    `system_tokens` are shared by all rows, `shared_tokens` by a group, `tail_tokens` belong to
    the row alone. `single_share` (0-1) of the groups have one row only.
    """

    num_rows: int
    rows_per_group: Spread
    shared_tokens: Spread
    tail_tokens: Spread
    system_tokens: int = 0
    single_share: float = 0.0


SHAPES: dict[tuple[str, Scale], Shape] = {
    ("loogle", "full"): Shape(
        num_rows=1951,
        rows_per_group=Spread(18, 8.6),
        shared_tokens=Spread(23_320, 6_105),
        tail_tokens=Spread(140),
        system_tokens=13,
        single_share=0.2,
    ),
    ("loogle", "small"): Shape(
        num_rows=32,
        rows_per_group=Spread(8),
        shared_tokens=Spread(5_500, 1_000),
        tail_tokens=Spread(140),
        system_tokens=13,
    ),
    ("toolbench", "full"): Shape(
        num_rows=210_415,
        rows_per_group=Spread(39, 64, long_tail=True),
        shared_tokens=Spread(1_395, 740, long_tail=True),
        tail_tokens=Spread(200, 50),
        system_tokens=240,
    ),
    ("toolbench", "small"): Shape(
        num_rows=200,
        rows_per_group=Spread(8, 6, long_tail=True),
        shared_tokens=Spread(900, 400, long_tail=True),
        tail_tokens=Spread(120, 30),
        system_tokens=240,
    ),
    ("nextqa", "full"): Shape(
        num_rows=8564,
        rows_per_group=Spread(8.564, 2),
        shared_tokens=Spread(9_790, 5_976, long_tail=True),
        tail_tokens=Spread(75),
    ),
    ("nextqa", "small"): Shape(
        num_rows=200,
        rows_per_group=Spread(8, 2),
        shared_tokens=Spread(900, 400, long_tail=True),
        tail_tokens=Spread(75),
    ),
}
