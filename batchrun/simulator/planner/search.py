"""Which numbers of engines are tried, from where on, and how many of them are simulated."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator

from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.planner.peak import PeakLoad
from batchrun.simulator.traces.trace import cached_tokens

WHOLE_ENGINES, PART_ENGINES = 16, 8
"""Up to so many engines are simulated; of more a part, with its share of the calls: what fewer
engines share varies more, so that a part holds no earlier than the whole. Not where a trace tells
what calls share: a part of a conversation shares less."""
FINE_ENGINES = 32
"""Up to so many engines each number is tried; of twice as many each second one, and so on."""
ROOM_SHARE = 0.15
"""For chance so many engines are added at most, and one where that is less."""
SPARE = 1.25
"""As many times the engines that calls keep busy at least are tried first."""


def num_simulated(num_engines: int) -> int:
    """Of so many engines."""
    return num_engines if num_engines <= WHOLE_ENGINES else PART_ENGINES


def sizes(most: int) -> Iterator[int]:
    """The numbers of engines up to `most` that are tried, `most` among them."""
    num, step = 1, 1
    while num < most:
        yield num
        step *= 1 + (num == FINE_ENGINES * step)
        num += step
    yield most


def first_guess(load: PeakLoad, engine: EnginePlan) -> int:
    """A number of engines to begin the search with, whatever is promised: by the time that prompts
    take in full steps, and answers in full batches."""
    shape, law, calls = engine.shape, engine.law.expected, load.calls
    is_judged = load.is_judged()
    if not is_judged.any():
        return 1
    prompts, answers = (
        tokens[is_judged] for tokens in (calls.num_prompt_tokens, calls.num_output_tokens)
    )
    budget, context = shape.token_budget, max(1, int(prompts.mean()))
    num_running = max(1, min(shape.max_num_seqs, shape.num_blocks * shape.block_tokens // context))
    prompt_s = law.step_s([(budget, budget, False)]) / budget
    answer_s = law.step_s([(1, context, True)] * num_running) / num_running
    missed = prompts - cached_tokens(calls)[is_judged]
    busy_s = missed.sum() * prompt_s + answers.sum() * answer_s
    return max(1, round(SPARE * float(busy_s) / (load.judged_s[1] - load.judged_s[0])))


def smallest(holds: Callable[[int], bool], most: int, first: int = 1) -> int | None:
    """A number of `sizes` that holds while the one below it, if any, does not; None: `most` does
    not. From `first` on by steps twice as long each, up or down, then by bisection: a question that
    holds wherever another does is asked along the same path until they differ, so its answer is
    never larger, whatever gaps the answers have.
    """
    nums = list(sizes(most))
    at, step = max(bisect_right(nums, first) - 1, 0), 1
    low, high = -1, len(nums)
    while low < at < high:
        if holds(nums[at]):
            high, at = at, max(at - step, 0)
        else:
            low, at = at, min(at + step, len(nums) - 1)
        step *= 2
    between = nums[low + 1 : high]
    found = low + 1 + bisect_left(between, True, key=holds)
    return nums[found] if found < len(nums) else None


def enough(as_given: int) -> int:
    """So many engines need no room for chance, where the trace as given needs `as_given`."""
    return as_given + max(1, int(ROOM_SHARE * as_given))
