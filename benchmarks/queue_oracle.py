"""The goodput that a search finds which knows every arrival and the length of every answer.

    python -m benchmarks.queue_oracle [--rates R ...] [--seeds N ...] [--widths W ...] [--json FILE]

The calls of `benchmarks.online_queue` (`classes`) on a light engine of the same law, without noise,
without the time that planning takes, and with one step in flight: all three favour the search. A
beam of `width` states goes on by two seconds at a time under each order and each share of the
tightest bound that a step may take; what counts is how many calls keep all promises. Calls whose
promise is lost are served when nothing else is there. `on_time` is the shipped order on the
virtual engine, with the same law and with a noisy one.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from batchrun.estimator.least_squares import FloatArray
from batchrun.scheduling.on_time import most_on_time
from batchrun.simulator.virtual.setup import A100Law
from benchmarks.online_queue import CALLS_S, DRAIN_S, NUM_BLOCKS, Trial, measure
from benchmarks.queue_calls import PromisedCall, alone_s, classed_calls
from benchmarks.records import Bar, Record, finish, parser, shown

HORIZON_S = 2.0
SHARES = (0.5, 0.75, 1.0)
ORDERS = ("most", "most-later", "shortest", "due")
BUDGET, MOST_RUNNING, BLOCK_TOKENS = 2_048, 256, 16
GROWTH_TOKENS = 64
"""Room that is left for what each running call generates next."""
LEAST_CHUNK = 32
MOST_DISTANCE = 0.10
LAW = A100Law()
PAIR_S = LAW.flop_per_token_pair / LAW.flop_per_s
TOKEN_S = LAW.flop_per_token / LAW.flop_per_s
CONTEXT_S = LAW.kv_bytes_per_token / LAW.bytes_per_s
WEIGHTS_S = LAW.weight_bytes / LAW.bytes_per_s


@dataclass(frozen=True, slots=True)
class Calls:
    """What the search knows of all calls, by number."""

    arrival_s: FloatArray
    prompt: list[int]
    output: list[int]
    ttft_s: list[float]
    tpot_s: list[float]
    jct_s: list[float]
    work_s: list[float]

    @classmethod
    def of(cls, calls: Sequence[PromisedCall]) -> Calls:
        """As columns, with what each prompt takes beside a step that runs anyway."""
        jcts = [call.promise.jct_s for call in calls]
        return cls(
            np.array([call.arrival_at_s for call in calls]),
            [call.num_prompt_tokens for call in calls],
            [call.num_output_tokens for call in calls],
            [call.promise.ttft_s for call in calls],
            [call.promise.tpot_s for call in calls],
            [math.inf if jct_s is None else jct_s for jct_s in jcts],
            [alone_s(call.num_prompt_tokens) - alone_s(1) for call in calls],
        )

    def first_due_s(self, call: int) -> float:
        """When the first token must be there for all promises to be kept."""
        end_s = self.jct_s[call] - self.output[call] * min(self.tpot_s[call], MEAN_STEP_S)
        return float(self.arrival_s[call]) + min(self.ttft_s[call], end_s)


MEAN_STEP_S = 0.05


@dataclass(slots=True)
class State:
    """The engine at an instant. `rows` of a call that generates: call, context, tokens left, and by
    when the last one is due (-inf where a promise is lost)."""

    now_s: float = 0.0
    next_call: int = 0
    kept: int = 0
    rows: FloatArray = field(default_factory=lambda: np.zeros((0, 4)))
    prompts: dict[int, int] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)

    def copy(self) -> State:
        """An independent one."""
        return State(
            self.now_s,
            self.next_call,
            self.kept,
            self.rows.copy(),
            dict(self.prompts),
            self.waiting.copy(),
        )


def run(state: State, calls: Calls, until_s: float, order: str, share: float) -> State:
    """Go on until then."""
    state = state.copy()
    num = len(calls.prompt)
    while state.now_s < until_s:
        while state.next_call < num and calls.arrival_s[state.next_call] <= state.now_s:
            state.waiting.append(state.next_call)
            state.next_call += 1
        if not (len(state.rows) or state.prompts or state.waiting):
            due_s = calls.arrival_s[state.next_call] if state.next_call < num else until_s
            state.now_s = min(until_s, float(due_s))
            continue
        _step(state, calls, order, share)
    return state


def _step(state: State, calls: Calls, order: str, share: float) -> None:
    rows, num = state.rows, len(state.rows)
    limit_s = _limit_s(state, share)
    tokens, pairs, contexts = num, float(rows[:, 1].sum()), float(rows[:, 1].sum())
    free = _free_blocks(state, calls)
    ended: list[int] = []
    for call in _ordered(state, calls, order):
        done, prompt = state.prompts.get(call), calls.prompt[call]
        need = 0 if done is not None else math.ceil(prompt / BLOCK_TOKENS)
        if done is None and (need > free or num + len(state.prompts) >= MOST_RUNNING):
            continue
        computed = done or 0
        most = min(BUDGET - tokens, prompt - computed)
        chunk = _fitting(most, computed, tokens, pairs, contexts, limit_s)
        if chunk <= 0 and tokens == 0:
            chunk = min(most, LEAST_CHUNK)
        if chunk <= 0:
            break
        if done is None:
            state.waiting.remove(call)
        free -= need
        state.prompts[call] = computed + chunk
        pairs += chunk * (computed + chunk / 2)
        contexts += computed + chunk
        tokens += chunk
        if computed + chunk == prompt:
            ended.append(call)
    if not tokens:
        state.now_s += 1e-3
        return
    state.now_s += _seconds(tokens, pairs, contexts)
    _generate(state, state.now_s)
    for call in ended:
        del state.prompts[call]
        _first_token(state, calls, call, state.now_s)


def _limit_s(state: State, share: float) -> float:
    """How long the step may be for the mean times per token that can still be kept."""
    alive = state.rows[:, 3] > state.now_s
    if not alive.any():
        return math.inf
    spare_s = (state.rows[alive, 3] - state.now_s) / state.rows[alive, 2]
    return share * float(spare_s.min())


def _free_blocks(state: State, calls: Calls) -> float:
    """Less what running calls generate next."""
    held = float(np.ceil(state.rows[:, 1] / BLOCK_TOKENS).sum())
    held += sum(math.ceil(calls.prompt[call] / BLOCK_TOKENS) for call in state.prompts)
    growth = (len(state.rows) + len(state.prompts)) * GROWTH_TOKENS / BLOCK_TOKENS
    return NUM_BLOCKS - held - growth


def _generate(state: State, now_s: float) -> None:
    rows = state.rows
    rows[:, 1] += 1
    rows[:, 2] -= 1
    done = rows[:, 2] <= 0
    if done.any():
        state.kept += int((rows[done, 3] >= now_s).sum())
        state.rows = rows[~done]


def _first_token(state: State, calls: Calls, call: int, now_s: float) -> None:
    at_s, left = float(calls.arrival_s[call]), calls.output[call] - 1
    is_kept = now_s - at_s <= calls.ttft_s[call]
    end_s = min(now_s + left * calls.tpot_s[call], at_s + calls.jct_s[call])
    if not left:
        state.kept += is_kept and now_s <= end_s
        return
    row = [call, calls.prompt[call] + 1, left, end_s if is_kept else -math.inf]
    state.rows = np.vstack([state.rows, row])


def _seconds(tokens: float, pairs: float, contexts: float) -> float:
    compute_s = TOKEN_S * tokens + PAIR_S * pairs
    memory_s = WEIGHTS_S + CONTEXT_S * contexts
    shorter_s, longer_s = min(compute_s, memory_s), max(compute_s, memory_s)
    return LAW.overhead_s + longer_s + LAW.overlap_loss * shorter_s


def _fitting(
    most: int, done: int, tokens: float, pairs: float, contexts: float, limit_s: float
) -> int:
    """The largest chunk within the limit."""

    def takes_s(chunk: int) -> float:
        more = chunk * (done + chunk / 2)
        return _seconds(tokens + chunk, pairs + more, contexts + done + chunk)

    if most <= 0 or limit_s == math.inf or takes_s(most) <= limit_s:
        return most
    return bisect_right(range(1, most), limit_s, key=takes_s)


def _ordered(state: State, calls: Calls, order: str) -> list[int]:
    """Prompts, begun or not, whose promise can be kept in this order; then the lost ones."""
    both = [*state.prompts, *state.waiting]
    lefts = [
        calls.work_s[call] * (1 - state.prompts.get(call, 0) / calls.prompt[call]) for call in both
    ]
    dues = [calls.first_due_s(call) - state.now_s for call in both]
    able = [place for place in range(len(both)) if dues[place] >= lefts[place]]
    if order in ("most", "most-later"):
        pace = _pace(state) * (0.7 if order == "most-later" else 1.0)
        first = most_on_time([(dues[place], lefts[place] / pace, place) for place in able])
    elif order == "shortest":
        first = sorted(able, key=lefts.__getitem__)
    else:
        first = sorted(able, key=dues.__getitem__)
    chosen = set(first)
    rest = [place for place in able if place not in chosen]
    if order.startswith("most"):
        # Who is left out for others may still be in time if these go sooner.
        rest.sort(key=lefts.__getitem__)
    if not chosen and not rest:
        return both
    return [both[place] for place in (*first, *rest)]


def _pace(state: State) -> float:
    """Seconds of prompts alone that a second has room for."""
    num, contexts = len(state.rows), float(state.rows[:, 1].sum())
    decodes_s = _seconds(num, contexts, contexts) if num else LAW.overhead_s
    return max(0.2, 1.0 - decodes_s / max(0.1, 2 * decodes_s))


def promising(state: State, calls: Calls) -> tuple[float, float]:
    """How many calls keep their promises, or still can; and less the work that this asks for."""
    rows, now_s = state.rows, state.now_s
    contexts = float(rows[:, 1].sum())
    step_s = _seconds(len(rows), contexts, contexts)
    running = int((rows[:, 3] - now_s >= rows[:, 2] * step_s).sum())
    stop = int(np.searchsorted(calls.arrival_s, now_s + 2 * HORIZON_S))
    soon = range(state.next_call, max(stop, state.next_call))
    jobs: list[tuple[float, float, int]] = []
    pace = _pace(state)
    for call in (*state.prompts, *state.waiting, *soon):
        share = 1 - state.prompts.get(call, 0) / calls.prompt[call]
        jobs.append((calls.first_due_s(call) - now_s, calls.work_s[call] * share / pace, call))
    taken = set(most_on_time(jobs))
    work_s = sum(job[1] for job in jobs if job[2] in taken)
    return state.kept + running + len(taken), -work_s


def search(calls: Sequence[PromisedCall], width: int, end_s: float = CALLS_S + DRAIN_S) -> int:
    """How many calls keep all promises by then, in the best of the runs that were looked at."""
    known = Calls.of(calls)
    beam, until_s = [State()], 0.0
    while until_s < end_s:
        until_s += HORIZON_S
        found: dict[tuple[float, ...], State] = {}
        for state, (order, share) in product(beam, product(ORDERS, SHARES)):
            after = run(state, known, until_s, order, share)
            scores = promising(after, known)
            found.setdefault((*scores, after.now_s, len(after.waiting)), after)
        best = sorted(found, key=lambda key: key[:2], reverse=True)
        beam = [found[key] for key in best[:width]]
    return max(state.kept for state in beam)


def main() -> int:
    """Search, print, save; 1 when the shipped order is too far from what is found."""
    made = parser(__doc__, rates=(5.0, 6.0, 7.0), seeds=(0, 100))
    made.add_argument("--widths", type=int, nargs="+", default=[8, 16])
    options = made.parse_args()
    cells = product(options.rates, options.seeds)
    records = shown(each for rate, seed in cells for each in compare(rate, seed, options.widths))
    return finish(options.json, records, bars(records))


def compare(rate_per_s: float, seed: int, widths: Sequence[int]) -> Iterator[Record]:
    """Records of one cell: one for each width."""
    shipped = {
        law: measure(Trial("classes", "on-time", rate_per_s, seed, law))["goodput_per_s"]
        for law in ("a100", "noisy")
    }
    calls = classed_calls(rate_per_s, CALLS_S, seed)
    for width in widths:
        found = search(calls, width) / CALLS_S
        print(rate_per_s, seed, width, found, shipped, file=sys.stderr, flush=True)
        yield {
            "rate_per_s": rate_per_s,
            "seed": seed,
            "width": width,
            "calls_per_s": len(calls) / CALLS_S,
            "oracle_per_s": found,
            "on_time_per_s": shipped["a100"],
            "on_time_noisy_per_s": shipped["noisy"],
            "distance": 1 - shipped["a100"] / found,
            "distance_noisy": 1 - shipped["noisy"] / found,
        }


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """How far the shipped order may be from the widest search."""
    for record in records:
        name = f"{record['rate_per_s']:g}/s, seed {record['seed']}, width {record['width']}"
        yield Bar(f"{name}: distance", record["distance"], MOST_DISTANCE, is_most=True)


if __name__ == "__main__":
    raise SystemExit(main())
