"""Start, watch, restart and call engines."""

from batchrun.engine.attached import AttachedEngine
from batchrun.engine.base import Engine
from batchrun.engine.client import EngineClient
from batchrun.engine.install import install_engine
from batchrun.engine.kv_config import KvConfig
from batchrun.engine.managed import ManagedEngine
from batchrun.engine.settings import AttachedSettings, ManagedSettings

__all__ = [
    "AttachedEngine",
    "AttachedSettings",
    "Engine",
    "EngineClient",
    "KvConfig",
    "ManagedEngine",
    "ManagedSettings",
    "install_engine",
]
