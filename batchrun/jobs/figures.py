"""The figures of a job's study, by the names under which `inspect --json` prints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchrun.jobs.spec import JobSpec
from batchrun.jobs.study import HitRates, JobStudy, KvSize, OutputEstimate, output_limit

Values = npt.NDArray[np.float64] | npt.NDArray[np.int64]

MAX_STRETCHES = 20
PERCENTILES = tuple(range(101))


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """One of figure 4's: `values` of all rows, or of all key portions. Shares are 0 to 1."""

    title: str
    values: Values
    is_share: bool = False

    @property
    def percentiles(self) -> list[float]:
        """The values below which 0, 1, ... 100 per cent lie."""
        return [float(value) for value in np.percentile(self.values, PERCENTILES)]


@dataclass(frozen=True, slots=True, eq=False)
class Inspected:
    """Everything that `inspect` found out about a job."""

    spec: JobSpec
    job: JobStudy
    outputs: OutputEstimate
    kv: KvSize

    def distributions(self) -> dict[str, Distribution]:
        """Preble's figure 4 (section 3), and the lengths of table 1; outputs where known by row."""
        study = self.job.study
        found = {
            "prompt_tokens": Distribution("prompt tokens", study.prompts),
            "shared_share": Distribution("shared share of a prompt", study.shared_shares, True),
            "key_portion_share": Distribution("key portion of a prompt", study.key_shares, True),
            "rows_per_key_portion": Distribution("rows per key portion", study.rows_per_key),
        }
        outputs = self.outputs.tokens[self.job.tree.rows]
        known = ~np.isnan(outputs) & (outputs > 0)
        if known.any():
            ratios = study.prompts[known] / outputs[known]
            found["output_tokens"] = Distribution("output tokens", outputs[known])
            found["prompt_to_output_ratio"] = Distribution("prompt tokens per output token", ratios)
        return {name: each for name, each in found.items() if len(each.values)}

    def figures(self) -> dict[str, Any]:
        """All figures, flat but for the order and the distributions."""
        rates = self.job.hit_rates(self.kv, self.outputs)
        distributions = self.distributions()
        return {
            **self._job_figures(),
            **self._study_figures(),
            **self._output_figures(distributions),
            **self._hit_figures(rates),
            "prefix_groups": self.job.plan.num_groups,
            "length_buckets": 1,
            "order": [asdict(stretch) for stretch in self.job.stretches(MAX_STRETCHES)],
            "distributions": {name: each.percentiles for name, each in distributions.items()},
            "output_path": self.spec.output.path,
        }

    def _job_figures(self) -> dict[str, Any]:
        errors = self.job.plan.errors
        return {
            "name": self.spec.name,
            "endpoint": self.spec.endpoint,
            "rows": self.job.plan.num_rows,
            "rows_with_template_errors": len(errors),
            "first_error": next((f"row {row}: {e.message}" for row, e in errors.items()), None),
        }

    def _study_figures(self) -> dict[str, Any]:
        study, counted = self.job.study, self.job.counted
        computed = study.prompts.sum() - self.job.planned_shared.sum()
        return {
            "prompt_tokens_total": float(study.prompts.sum()),
            "prompt_tokens_computed": float(computed),
            **_mean_and_std("prompt_tokens", study.prompts),
            "bytes_per_token": counted.bytes_per_token,
            "rows_tokenised": counted.num_rows,
            "bytes_tokenised": counted.num_bytes,
            **_mean_and_std("shared_share", study.shared_shares),
            "shared_share_of_tokens": _share(study.shared.sum(), study.prompts.sum()),
            **_mean_and_std("common_share", study.common_shares),
            **_mean_and_std("key_portion_share", study.key_shares),
            **_mean_and_std("rows_per_key_portion", study.rows_per_key),
            "key_portions": len(study.rows_per_key),
        }

    def _output_figures(self, distributions: Mapping[str, Distribution]) -> dict[str, Any]:
        ratio = distributions.get("prompt_to_output_ratio")
        return {
            "output_tokens_mean": self.outputs.mean,
            "output_tokens_std": self.outputs.std,
            "output_tokens_source": self.outputs.source,
            "max_output_tokens": output_limit(self.spec),
            "prompt_to_output_ratio_mean": None if ratio is None else float(ratio.values.mean()),
        }

    def _hit_figures(self, rates: HitRates) -> dict[str, Any]:
        return {
            "best_hit_rate": rates.best,
            "block_tokens": self.kv.block_tokens,
            "block_tokens_source": self.kv.block_source,
            "kv_tokens": self.kv.tokens,
            "kv_tokens_source": self.kv.source,
            "expected_hit_rate": rates.expected,
            "expected_hit_rate_as_written": rates.as_written,
            "rows_larger_than_kv": rates.num_too_large,
        }


def _mean_and_std(name: str, values: Values) -> dict[str, float]:
    mean, std = (float(values.mean()), float(values.std())) if len(values) else (0.0, 0.0)
    return {f"{name}_mean": mean, f"{name}_std": std}


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
