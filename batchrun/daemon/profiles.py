"""Where an engine's calibration profile lies, and the promises that `slo: auto` makes of it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from batchrun.config import AUTO_SLO_FACTOR, Deployment, EngineConfig, SloConfig
from batchrun.errors import ConfigError
from batchrun.estimator import OnlineLatency, profile_from_json
from batchrun.home import Home


def profile_path(deployment: Deployment, config: EngineConfig, home: Home) -> Path:
    """The file named in the deployment, else one in the home.

    Engines of one model with the same arguments share it.
    """
    if config.profile is not None:
        return deployment.base / Path(config.profile).expanduser()
    content = json.dumps([deployment.model, config.vllm_args, config.python])
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", deployment.model_name)[:64]
    return home.profiles / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}.json"


def existing_profile(deployment: Deployment, config: EngineConfig, home: Home) -> Path | None:
    """The file, where there is one. Raises ConfigError when one that is named is missing."""
    path = profile_path(deployment, config, home)
    if path.is_file():
        return path
    if config.profile is not None:
        raise ConfigError(
            f"engine {config.name}: there is no profile {path}; run `batchrun calibrate -o {path}`"
        )
    return None


def online_slo(deployment: Deployment, home: Home) -> SloConfig:
    """The promises of the deployment; `auto` is AUTO_SLO_FACTOR times the slowest engine's p99.

    Raises ConfigError when `auto` has no profile to go by.
    """
    if isinstance(deployment.slo, SloConfig):
        return deployment.slo
    shown = [
        _online_latency(deployment, config, home) for config in deployment.engines if config.is_vllm
    ]
    if not shown:
        raise ConfigError("slo: auto is for engines that batchrun starts; give ttft_s and tpot_s")
    return SloConfig(
        ttft_s=AUTO_SLO_FACTOR * max(each.ttft_p99_s for each in shown),
        tpot_s=AUTO_SLO_FACTOR * max(each.tpot_p99_s for each in shown),
    )


def slo_classes(deployment: Deployment, home: Home) -> dict[str, SloConfig]:
    """The promises of each class by its name. Raises ConfigError as `online_slo` does, and where
    the bounds of a class contradict each other."""
    runs_scheduler = deployment.runs_scheduler and any(e.is_vllm for e in deployment.engines)
    default = SloConfig() if isinstance(deployment.slo, str) else deployment.slo
    if deployment.slo_classes and runs_scheduler:
        default = online_slo(deployment, home)
    classes = {}
    for name, bounds in deployment.slo_classes.items():
        try:
            classes[name] = bounds.over(default)
        except ValueError as error:
            raise ConfigError(f"slo_classes.{name}: {error}") from error
    return classes


def _online_latency(deployment: Deployment, config: EngineConfig, home: Home) -> OnlineLatency:
    path = existing_profile(deployment, config, home)
    if path is None:
        raise ConfigError(
            f"slo: auto needs a profile of engine {config.name}: run `batchrun calibrate "
            f"--engine {config.name}`, or give ttft_s and tpot_s"
        )
    try:
        online = profile_from_json(path.read_text(encoding="utf-8"), str(path)).online
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if online is None:
        raise ConfigError(
            f"slo: auto: {path} has no online figures, since the model answered no chat calls; "
            "give ttft_s and tpot_s"
        )
    return online
