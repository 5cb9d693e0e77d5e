"""The scenarios of design 6.4 and of Echo's evaluation (section 7.1, table 1).

The draws of the first three are those of the trial that made the design's figures, in its order, so
that a seed means the same requests.
"""

from __future__ import annotations

import math

from batchrun.vllm_plugin.virtual.workload import (
    Bounds,
    JobShape,
    LogNormalTokens,
    OnlineTraffic,
    Scenario,
)

CHAT_PROMPT = LogNormalTokens(5.3, 1.0, (8, 2000))
CHAT_OUTPUT = LogNormalTokens(5.0, 0.8, (4, 800))
ECHO_SWING = 5 / 7


def a100_8b(*, burst_factor: float = 4.0) -> Scenario:
    """The reference scenario, 180 s. The stress row has a burst factor of 6."""
    online = OnlineTraffic(
        rate_per_s=2.0,
        burst_factor=burst_factor,
        burst_length_s=8.0,
        burst_period_s=90.0,
        prompt=CHAT_PROMPT,
        output=CHAT_OUTPUT,
        swing=0.8,
    )
    name = "a100-8b" if burst_factor == 4.0 else f"a100-8b-burst-{burst_factor:g}"
    return Scenario(name, 180.0, online)


def kv_pressure() -> Scenario:
    """Long prompts in long bursts, 240 s: where the reserve and eviction matter."""
    return Scenario("kv-pressure", 240.0, _pressing_traffic())


def kv_pressure_tide() -> Scenario:
    """Two hours of `kv-pressure` under one tide: its rate swings by half, once up, once down."""
    duration_s = 7200.0
    online = _pressing_traffic(swing=0.5, swing_s=duration_s / math.tau)
    return Scenario("kv-pressure-tide", duration_s, online, JobShape(num_documents=3_000))


def echo_sharegpt() -> Scenario:
    """Echo's job of conversations: short prompts (308 tokens on average in its table 1), of which
    under 5 % are shared; here none are."""
    job = JobShape(
        num_documents=6_000,
        document_tokens=CHAT_PROMPT,
        questions=(1, 1),
        question_tokens=(1, 1),
        output_tokens=CHAT_OUTPUT,
    )
    return Scenario("echo-sharegpt", 180.0, _echo_traffic(), job)


def echo_qa_short() -> Scenario:
    """Echo's LooGLE QA_Short: prompts of 23,474 tokens on average (its table 1), whose answers
    stand in one place. Numbers of questions and their lengths are LooGLE's."""
    return Scenario("echo-qa-short", 180.0, _echo_traffic(), _loogle_job((12, 25), (8, 34)))


def echo_qa_long() -> Scenario:
    """Echo's LooGLE QA_Long: the same documents with fewer and longer questions."""
    return Scenario("echo-qa-long", 180.0, _echo_traffic(), _loogle_job((6, 11), (15, 101)))


def echo_hit_rate() -> Scenario:
    """`echo_qa_short` with the online load at its peak all the time: the run behind Echo's 78.6 %
    (section 1, figure 9)."""
    online = _echo_traffic(rate_per_s=2.0 * (1 + ECHO_SWING), swing=0.0)
    return Scenario("echo-hit-rate", 180.0, online, echo_qa_short().job)


def _loogle_job(questions: Bounds, question_tokens: Bounds) -> JobShape:
    """76 documents of 23,440 tokens on average, as many as fit a context of 32,768."""
    return JobShape(
        num_documents=76,
        document_tokens=(15_000, 31_880),
        questions=questions,
        question_tokens=question_tokens,
        output_tokens=(4, 64),
    )


def _echo_traffic(*, rate_per_s: float = 2.0, swing: float = ECHO_SWING) -> OnlineTraffic:
    """ShareGPT lengths under a tide whose peak is six times its ebb (Echo, section 2.2), once up
    and down in 180 s, with the bursts of the reference scenario."""
    return OnlineTraffic(
        rate_per_s=rate_per_s,
        burst_factor=4.0,
        burst_length_s=8.0,
        burst_period_s=90.0,
        prompt=CHAT_PROMPT,
        output=CHAT_OUTPUT,
        swing=swing,
        swing_s=180.0 / math.tau,
    )


def _pressing_traffic(*, swing: float = 0.0, swing_s: float = 60.0) -> OnlineTraffic:
    return OnlineTraffic(
        rate_per_s=1.0,
        burst_factor=6.0,
        burst_length_s=20.0,
        burst_period_s=60.0,
        prompt=LogNormalTokens(6.6, 0.9, (8, 4096)),
        output=LogNormalTokens(4.8, 0.8, (4, 600)),
        swing=swing,
        swing_s=swing_s,
    )
