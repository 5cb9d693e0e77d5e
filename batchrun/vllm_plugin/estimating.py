"""What the plug-in believes of its engine: how long a step takes, how much KV online work needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from batchrun.cache import FORECAST_RESERVE, OnlineReserve
from batchrun.estimator import AnyModel, KvForecast, OnlineFit, StepLoad, StepTimeModel
from batchrun.vllm_plugin.settings import PluginSettings


class Estimates:
    """The step-time model, refined by every step, and the online reserve."""

    def __init__(
        self, settings: PluginSettings, total_blocks: int, calibrated: Sequence[AnyModel] = ()
    ) -> None:
        """`calibrated` are the models of a profile, the best first."""
        self._fit = OnlineFit(calibrated)
        given = settings.reserve
        constant = OnlineReserve("constant", given) if isinstance(given, float) else None
        self._reserve = constant or FORECAST_RESERVE
        self._total_blocks = total_blocks
        self.forecast = KvForecast(
            window_s=settings.forecast_window_s,
            rule=settings.forecast_rule,
            sigmas=settings.forecast_sigmas,
        )
        self.model: StepTimeModel = self._fit.best()

    def predict_s(self, load: StepLoad | None) -> float:
        """How long a step with this load should take; 0 for none."""
        return 0.0 if load is None else self.model.predict_s(load)

    @property
    def error_share(self) -> float:
        """How far predictions of the latest steps were off, on average (0.1: 10 %)."""
        return self._fit.error_share

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
        forecast_blocks = self.forecast.forecast_blocks
        kept = self._reserve.blocks(self._total_blocks, online_blocks, forecast_blocks)
        return max(0, kept - online_blocks)
