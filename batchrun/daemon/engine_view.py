"""What `status` shows of an engine that runs batchrun's scheduler."""

from __future__ import annotations

from typing import Any

import msgspec

from batchrun.daemon.engine_link import EngineLink
from batchrun.wire import ClassTelemetry, LatencyTelemetry, Telemetry


def view_engine(link: EngineLink | None) -> dict[str, Any] | None:
    """Its telemetry as a JSON object, with what follows from it; None while it is not heard.

    Rates cover the last half minute, all else is since the engine's start or of now. Shares are 0
    to 1. What is not known yet is None.
    """
    telemetry = None if link is None else link.telemetry
    if link is None or telemetry is None:
        return None
    view: dict[str, Any] = msgspec.to_builtins(telemetry)
    for name, told in (("online", telemetry.online), ("offline", telemetry.offline)):
        view[name]["hit_rate"] = _share(told.num_hit_tokens, told.num_prompt_tokens)
        view[name]["computed_tokens_per_s"] = _rate(link, name)
    for name, latency in (("shared", telemetry.shared), ("alone", telemetry.alone)):
        view[name] |= _means(latency)
    view["slo"] |= _attainment(telemetry)
    view["step"]["predicted_over_measured"] = _share(
        telemetry.step.predicted_s, telemetry.step.measured_s
    )
    return view


def _means(latency: LatencyTelemetry) -> dict[str, float | None]:
    return {
        "mean_ttft_s": _share(latency.ttft_s, latency.num_first_tokens),
        "mean_tpot_s": _share(latency.gaps_s, latency.num_gaps),
    }


def _attainment(telemetry: Telemetry) -> dict[str, float | None]:
    num_first = telemetry.shared.num_first_tokens + telemetry.alone.num_first_tokens
    met = num_first - telemetry.slo.num_late_first_tokens
    num_tokens = telemetry.slo.num_tokens
    return {
        "ttft_attainment": _share(max(met, 0), num_first),
        "token_attainment": _share(num_tokens - telemetry.slo.num_late_tokens, num_tokens),
    }


def _rate(link: EngineLink, name: str) -> float | None:
    if link.history is None:
        return None
    span_s, first, last = link.history
    before: ClassTelemetry = getattr(first, name)
    now: ClassTelemetry = getattr(last, name)
    return (now.num_computed_tokens - before.num_computed_tokens) / span_s


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
