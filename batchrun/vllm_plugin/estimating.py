"""What the plug-in believes of its engine: how long a step takes, how much KV online work needs."""

from __future__ import annotations

from collections.abc import Iterable

from batchrun.estimator import KvForecast, OnlineFit, StepLoad, StepTimeModel
from batchrun.vllm_plugin.settings import PluginSettings

COLD_RESERVE_SHARE = 0.15
"""Share of all blocks kept for online bursts until there are five minutes of data (design 6.2)."""


class Estimates:
    """The step-time model, refined by every step, and the online reserve."""

    def __init__(self, settings: PluginSettings, total_blocks: int) -> None:
        self._fit = OnlineFit()
        self._reserve = settings.reserve
        self._total_blocks = total_blocks
        self.forecast = KvForecast(
            window_s=settings.forecast_window_s, sigmas=settings.forecast_sigmas
        )
        self.model: StepTimeModel = self._fit.best()

    def predict_s(self, load: StepLoad | None) -> float:
        """How long a step with this load should take; 0 for none."""
        return 0.0 if load is None else self.model.predict_s(load)

    def observe(self, load: StepLoad, step_s: float) -> None:
        """A step with this load took so long."""
        self._fit.observe(load, step_s)
        self.model = self._fit.best()

    def sample(self, now_s: float, online_blocks: int) -> None:
        """Online requests hold so many blocks now."""
        self.forecast.sample(now_s, online_blocks)

    def warm_up(
        self, kv_samples: Iterable[tuple[float, int]], steps: Iterable[tuple[StepLoad, float]]
    ) -> None:
        """Earlier observations, oldest first: (now_s, online blocks), and steps with seconds."""
        for at_s, blocks in kv_samples:
            self.sample(at_s, blocks)
        for load, step_s in steps:
            self.observe(load, step_s)

    def reserve_blocks(self, online_blocks: int) -> int:
        """Blocks to keep free for online requests that have not come yet."""
        if self._reserve != "forecast":
            wanted = int(self._reserve * self._total_blocks)
        else:
            expected = self.forecast.forecast_blocks
            cold = int(COLD_RESERVE_SHARE * self._total_blocks)
            wanted = cold if expected is None else expected
        return max(0, wanted - online_blocks)
