"""The deployment: batchrun.yaml, BATCHRUN_* and flags, read once, checked, frozen."""

from batchrun.config.file import (
    AUTO_SLO_FACTOR,
    TINY_MODEL,
    DeploymentFile,
    EngineConfig,
    SloClassConfig,
    SloConfig,
    WindowConfig,
)
from batchrun.config.loading import Deployment, Environment, load_deployment, load_home

__all__ = [
    "AUTO_SLO_FACTOR",
    "TINY_MODEL",
    "Deployment",
    "DeploymentFile",
    "EngineConfig",
    "Environment",
    "SloClassConfig",
    "SloConfig",
    "WindowConfig",
    "load_deployment",
    "load_home",
]
