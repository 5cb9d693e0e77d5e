"""What online calls see of an engine that has nothing else to do."""

from __future__ import annotations

from batchrun.estimator import EngineFacts, OnlineLatency, StepLoad, StepTimeModel
from batchrun.replay import ReplayTarget, TokenRange, TraceShape, generate_trace, replay, summarize

DURATION_S = 20.0
BUSY_SHARE = 0.5
"""How busy the online calls alone keep the engine, by its model."""
MOST_CALLS_PER_S = 20.0

_PROMPT = TokenRange(mu=4.0, sigma=0.8, min_tokens=8, max_tokens=400)
_OUTPUT = TokenRange(mu=3.0, sigma=0.6, min_tokens=4, max_tokens=100)
_TYPICAL_PROMPT_TOKENS = 80
_TYPICAL_OUTPUT_TOKENS = 24
_TYPICAL_BATCH = 4


async def observe_online(
    base_url: str, served_model: str, facts: EngineFacts, model: StepTimeModel
) -> OnlineLatency | None:
    """Poisson chat calls for DURATION_S; None when some were not answered.

    That is so with a model that has no chat template.
    """
    rate_per_s = calls_per_s(model)
    longest_tokens = facts.longest_tokens // 8
    shape = TraceShape(
        duration_s=DURATION_S,
        rate_per_s=rate_per_s,
        burst_factor=1.0,
        prompt=TokenRange(_PROMPT.mu, _PROMPT.sigma, _PROMPT.min_tokens, min(400, longest_tokens)),
        output=TokenRange(_OUTPUT.mu, _OUTPUT.sigma, _OUTPUT.min_tokens, min(100, longest_tokens)),
    )
    target = ReplayTarget(f"{base_url}/v1", served_model, extra_body={"ignore_eos": True})
    results = await replay(generate_trace(shape, seed=0), target)
    figures = summarize(results, slo_ttft_s=1.0, slo_tpot_s=1.0)
    latencies = [figures[f"{what}_{share}_s"] for what in ("ttft", "tpot") for share in _SHARES]
    if figures["failed"] or None in latencies:
        return None
    return OnlineLatency(len(results), rate_per_s, *[float(each or 0.0) for each in latencies])


_SHARES = ("p50", "p99")


def calls_per_s(model: StepTimeModel) -> float:
    """The rate at which typical calls take BUSY_SHARE of the engine's time."""
    prefill_s = model.predict_s(StepLoad.of([(_TYPICAL_PROMPT_TOKENS,) * 2 + (False,)]))
    context_tokens = _TYPICAL_PROMPT_TOKENS + _TYPICAL_OUTPUT_TOKENS
    batch_s = model.predict_s(StepLoad.of([(1, context_tokens, True)] * _TYPICAL_BATCH))
    call_s = prefill_s + _TYPICAL_OUTPUT_TOKENS * batch_s / _TYPICAL_BATCH
    return min(MOST_CALLS_PER_S, BUSY_SHARE / max(call_s, 1e-6))
