"""Chat calls sent to an OpenAI endpoint, each at its time whatever became of the others."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from batchrun.errors import EngineError

_COMMON = """
a about after all also and any are as at back be because but by can come could day do even
find first for from get give go good great hand have he her here him his how I if in into it
its just know last life like line long look make man many may me more most much my name new
no not now of off old on one only or other our out over own part people place point right
same say see she short show side small so some still take tell than that the their them then
there these they thing think this time to two under up us use very want water way we well
what when where which who will with word work world would write year you your
"""
WORDS = tuple(_COMMON.split())


@dataclass(frozen=True, slots=True)
class CallArrival:
    """One online call: `at_s` after the start of the trace; `max_tokens` caps its answer."""

    at_s: float
    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Log-normal token counts: `mu` and `sigma` of the logarithm, clipped to the two bounds."""

    mu: float
    sigma: float
    min_tokens: int
    max_tokens: int

    def draw(self, rng: random.Random) -> int:
        """One token count."""
        return max(
            self.min_tokens, min(self.max_tokens, round(rng.lognormvariate(self.mu, self.sigma)))
        )


CHAT_PROMPT = TokenRange(mu=4.0, sigma=0.8, min_tokens=8, max_tokens=400)
CHAT_ANSWER = TokenRange(mu=3.0, sigma=0.6, min_tokens=4, max_tokens=100)


def make_prompt(num_words: int, *, rng: random.Random) -> str:
    """Text of common words; no two prompts share more than a few leading words."""
    return " ".join(rng.choices(WORDS, k=num_words))


@dataclass(frozen=True, slots=True)
class OnlineResult:
    """One call. Instants are seconds from the trace's start, durations from the planned arrival.

    `ttft_s` is None when no token came; `e2e_s` and the counts cover what came before an `error`;
    `is_late`: that was the target's `timeout_s`.
    `token_ids` are there where the body asks for them (vLLM's `return_token_ids`).
    """

    arrived_at_s: float
    ttft_s: float | None
    e2e_s: float
    itl_s: tuple[float, ...]
    num_output_tokens: int
    error: str | None = None
    token_ids: tuple[int, ...] = ()
    is_late: bool = False

    @property
    def tpot_s(self) -> float | None:
        """(end-to-end - TTFT) / (output tokens - 1); None under two tokens or after an error."""
        if self.error is not None or self.ttft_s is None or self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    if not values:
        return None
    rank = max(1, math.ceil(share * len(values)))
    value = sorted(values)[rank - 1]
    return None if math.isinf(value) else value


MAX_LINE_BYTES = 2**20
_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass(frozen=True, slots=True)
class ReplayTarget:
    """Where the calls go: `base_url` ends in `/v1`; `timeout_s` bounds one call.

    `extra_body` is added to each body, for example `{"ignore_eos": True}` for vLLM, and `headers`
    go with each call.
    """

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 120.0
    extra_body: Mapping[str, object] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


async def replay(arrivals: Sequence[CallArrival], target: ReplayTarget) -> list[OnlineResult]:
    """Results in the order of `arrivals`; a failed call is a result with its error, no exception.

    Time counts from the planned arrival, so a late start of ours is not hidden.
    """
    key = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={**key, **target.headers},
        read_bufsize=MAX_LINE_BYTES,
    ) as session:
        started_at_s = asyncio.get_running_loop().time()
        calls = [_call(session, target, arrival, started_at_s) for arrival in arrivals]
        return list(await asyncio.gather(*calls))


async def _call(
    session: aiohttp.ClientSession, target: ReplayTarget, arrival: CallArrival, started_at_s: float
) -> OnlineResult:
    """One call, and what was seen of it."""
    clock, planned_at_s = asyncio.get_running_loop().time, started_at_s + arrival.at_s
    times_s: list[float] = []
    token_ids: list[int] = []
    num_output_tokens, error, is_late = 0, None, False
    await asyncio.sleep(planned_at_s - clock())
    try:
        async with asyncio.timeout_at(planned_at_s + target.timeout_s):
            async for event in _events(session, target, arrival):
                choices = event.get("choices") or ()
                if any(_carries_token(choice) for choice in choices):
                    times_s.append(clock() - planned_at_s)
                token_ids += [token for each in choices for token in each.get("token_ids") or ()]
                if usage := event.get("usage"):
                    num_output_tokens = usage.get("completion_tokens", 0)
    except TimeoutError:
        is_late = True
        error = f"no complete answer within {target.timeout_s:g} s"
    except EngineError as cause:
        error = str(cause)
    except (aiohttp.ClientError, OSError, ValueError) as cause:
        error = f"{type(cause).__name__}: {cause}"
    return OnlineResult(
        arrived_at_s=arrival.at_s,
        ttft_s=times_s[0] if times_s else None,
        e2e_s=times_s[-1] if times_s else clock() - planned_at_s,
        itl_s=tuple(b - a for a, b in pairwise(times_s)),
        num_output_tokens=num_output_tokens or len(times_s),
        error=error,
        token_ids=tuple(token_ids),
        is_late=is_late,
    )


async def _events(
    session: aiohttp.ClientSession, target: ReplayTarget, arrival: CallArrival
) -> AsyncIterator[dict[str, Any]]:
    """The events of the streamed answer. Raises EngineError when it is none, or not a whole one."""
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": arrival.prompt}],
        "max_tokens": arrival.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra_body,
    }
    is_done = False
    url = target.base_url.rstrip("/") + "/chat/completions"
    async with session.post(url, json=body) as reply:
        if reply.status != 200:
            text = (await reply.content.read(2_000)).decode(errors="replace")
            raise EngineError(f"HTTP {reply.status}: {text.strip()}")
        async for line in reply.content:
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                is_done = True
            elif line.startswith(b"data:"):
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    raise EngineError(f"error in the stream: {event['error']}")
                yield event
    if not is_done:
        raise EngineError("the stream ended early")


def _carries_token(choice: Mapping[str, Any]) -> bool:
    # Bytes of half a character are a token with empty text, and a reasoning parser may leave only
    # the id; the first event, which only names the role, is none.
    delta = choice.get("delta") or {}
    if choice.get("token_ids") or (delta.get("role") is None and "content" in delta):
        return True
    return any(delta.get(key) for key in _TEXT_KEYS)
