"""The engine that is measured: as the deployment starts it, but recording its steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from batchrun.config import Deployment, SloConfig
from batchrun.daemon.plugging import read_or_make_nonce
from batchrun.daemon.supervisor import make_engine
from batchrun.engine import ManagedEngine, process
from batchrun.errors import ConfigError, StateError
from batchrun.estimator import PROBING_SETTINGS
from batchrun.home import Home

ENGINE_NAME = "calibrate"
"""Its record is that of an engine, so `batchrun down` ends it should we be killed."""


def choose_engine(deployment: Deployment, name: str | None) -> int:
    """The index of the engine of this name, or of the first that batchrun starts from `model`.

    Raises ConfigError when there is none.
    """
    for index, config in enumerate(deployment.engines):
        if config.name == name and not config.is_vllm:
            raise ConfigError(f"engine {name} is not a vLLM that batchrun starts; see `engines`")
        if config.is_vllm and name in {None, config.name}:
            return index
    if name is not None:
        known = ", ".join(config.name for config in deployment.engines)
        raise ConfigError(f"there is no engine {name}; the engines are {known}")
    raise ConfigError("no engine to calibrate: batchrun starts none of the `engines` from `model`")


def check_nothing_runs(deployment: Deployment, home: Home) -> None:
    """Raises StateError while an engine of this home holds the machine."""
    for config in deployment.engines:
        record = process.read_record(home.run / f"engine-{config.name}.json")
        if record is not None and process.is_alive(record):
            raise StateError(
                f"engine {config.name} is running, and would be measured against itself; "
                "stop it with `batchrun down` first"
            )


def make_measured_engine(
    deployment: Deployment, home: Home, index: int, steps_path: Path
) -> ManagedEngine:
    """The engine, not started; the profile that it names may be the one that is to be written.

    What a calibration that was killed left running is ended first.
    """
    engines = [each.model_copy(update={"profile": None}) for each in deployment.engines]
    update = {"policy": "echo", "slo": SloConfig(), "engines": engines}
    plain = deployment.model_copy(update=update)
    engine = make_engine(plain, home, index, read_or_make_nonce(home))
    assert isinstance(engine, ManagedEngine)
    settings = replace(
        engine.settings,
        name=ENGINE_NAME,
        scheduler={**PROBING_SETTINGS, "record_steps": str(steps_path)},
    )
    process.stop_recorded(settings.record_path)
    return ManagedEngine(settings)
