"""What a dry run tells of a job: when it would be done, what it would cost, by their JSON names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchrun.errors import InputError

HOUR_S = 3600.0
_PRICE = re.compile(r"(\d+(?:\.\d+)?)(?:x([1-9]\d{0,2}))?")


@dataclass(frozen=True, slots=True)
class Eta:
    """Seconds from a submission now to the job's end: the best guess, and a range around it.

    All None while unknown, infinity for a job that never ends. `source` is `daemon`, `simulation`
    or None; `rests_on` says in words what the guess rests on, or what to do for one.
    """

    expected_s: float | None
    low_s: float | None
    high_s: float | None
    source: str | None
    rests_on: str

    def keeps(self, deadline_s: float | None) -> bool | None:
        """Whether the best guess is within the deadline; None where either is unknown."""
        if deadline_s is None or self.expected_s is None:
            return None
        return self.expected_s <= deadline_s


@dataclass(frozen=True, slots=True)
class Price:
    """Of a GPU-hour, in any currency, None where it was not given; and the GPUs of one engine."""

    per_gpu_hour: float | None = None
    gpus: int = 1

    @classmethod
    def parse(cls, text: str) -> Price:
        """From `PRICE[xGPUS]`. Raises InputError."""
        match = _PRICE.fullmatch(text.strip())
        if match is None:
            raise InputError(
                f"--price {text!r}: must be PRICE or PRICExGPUS, such as 1.80 or 2.50x2"
            )
        return cls(float(match[1]), int(match[2] or 1))


@dataclass(frozen=True, slots=True)
class EngineTime:
    """Engine-hours that the job's work takes; None while unknown.

    `source` is `simulation` (engines of its own), `daemon` (the pace beside the calls, so an upper
    bound) or None; `rests_on` as in `Eta`.
    """

    hours: float | None
    source: str | None
    rests_on: str

    def gpu_hours(self, price: Price) -> float | None:
        """With the GPUs of one engine."""
        return None if self.hours is None else self.hours * price.gpus

    def cost(self, price: Price) -> float | None:
        """What they cost; None without a price."""
        gpu_hours = self.gpu_hours(price)
        if gpu_hours is None or price.per_gpu_hour is None:
            return None
        return gpu_hours * price.per_gpu_hour


@dataclass(frozen=True, slots=True)
class Forecast:
    """Both at once."""

    eta: Eta
    engine_time: EngineTime

    @classmethod
    def unknown(cls, no_eta: str, no_cost: str) -> Forecast:
        """Neither is known; what to do about it."""
        return cls(Eta(None, None, None, None, no_eta), EngineTime(None, None, no_cost))


@dataclass(frozen=True, slots=True)
class Prediction:
    """All that a dry run says: `study` are figures of `inspect`, and the tokens that follow."""

    study: Mapping[str, Any]
    deadline_s: float | None
    forecast: Forecast
    price: Price

    def record(self) -> dict[str, Any]:
        """One flat object: seconds, tokens, hours, shares from 0 to 1; null for what is unknown."""
        eta, spent = self.forecast.eta, self.forecast.engine_time
        return {
            **self.study,
            "eta_s": _finite(eta.expected_s),
            "eta_low_s": _finite(eta.low_s),
            "eta_high_s": _finite(eta.high_s),
            "eta_source": eta.source,
            "eta_rests_on": eta.rests_on,
            "deadline_s": self.deadline_s,
            "is_deadline_kept": eta.keeps(self.deadline_s),
            "engine_hours": spent.hours,
            "engine_hours_source": spent.source,
            "engine_hours_rest_on": spent.rests_on,
            "gpus_per_engine": self.price.gpus,
            "gpu_hours": spent.gpu_hours(self.price),
            "price_per_gpu_hour": self.price.per_gpu_hour,
            "cost_alone": spent.cost(self.price),
        }


def study_figures(
    inspected: Mapping[str, Any], prompt_tokens: float, output_tokens: float
) -> dict[str, Any]:
    """The figures of `inspect` that a submission is about, with `computed_tokens`."""
    return {
        "name": inspected["name"],
        "endpoint": inspected["endpoint"],
        "rows": inspected["rows"],
        "rows_that_cannot_run": inspected["rows_with_template_errors"],
        "first_error": inspected["first_error"],
        "prefix_groups": inspected["prefix_groups"],
        "prompt_tokens": round(prompt_tokens),
        "output_tokens": round(output_tokens),
        "output_tokens_a_row": inspected["output_tokens_mean"],
        "output_tokens_source": inspected["output_tokens_source"],
        "max_output_tokens_a_row": inspected["max_output_tokens"],
        "computed_tokens": computed_tokens(inspected, prompt_tokens, output_tokens),
        "expected_hit_rate": inspected["expected_hit_rate"],
        "best_hit_rate": inspected["best_hit_rate"],
        "kv_tokens": inspected["kv_tokens"],
        "kv_tokens_source": inspected["kv_tokens_source"],
        "rows_larger_than_kv": inspected["rows_larger_than_kv"],
        "output_path": inspected["output_path"],
    }


def computed_tokens(study: Mapping[str, Any], prompt_tokens: float, output_tokens: float) -> int:
    """The answers, and the part of the prompts that is expected not to be found in the cache."""
    expected = study["expected_hit_rate"]
    hit_rate = float(study["best_hit_rate"] if expected is None else expected)
    return round(prompt_tokens * (1 - hit_rate) + output_tokens)


def _finite(value_s: float | None) -> float | None:
    return value_s if value_s is not None and math.isfinite(value_s) else None
