"""What an engine needs to run batchrun's scheduler: the package on its path, and a secret."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import batchrun
from batchrun.config import Deployment, EngineConfig
from batchrun.daemon.profiles import existing_profile, online_slo
from batchrun.files import write_atomically
from batchrun.home import Home
from batchrun.last_steps import SUFFIX
from batchrun.types import HINT_NONCE_VARIABLE
from batchrun.wire import CHANNEL_VARIABLE


def scheduler_settings(
    deployment: Deployment, config: EngineConfig, home: Home
) -> dict[str, object] | None:
    """The settings of batchrun's scheduler in an engine, or None when engines run vLLM's own.

    Raises ConfigError when a profile is wanted and missing.
    """
    if not deployment.runs_scheduler:
        return None
    profile = existing_profile(deployment, config, home)
    return {
        "policy": deployment.policy,
        "slo": online_slo(deployment, home).model_dump(exclude_none=True),
        **({} if profile is None else {"profile": str(profile)}),
    }


def read_or_make_nonce(home: Home) -> str:
    """The secret that tells this home's hints from forged ones. It outlives daemon and engines."""
    if home.hint_nonce.exists():
        return home.hint_nonce.read_text()
    nonce = secrets.token_urlsafe(32)
    write_atomically(home.hint_nonce, nonce.encode(), mode=0o600)
    return nonce


def channel_path(home: Home, engine: str) -> Path:
    """Where the sockets of an engine's scheduler lie, without their endings."""
    return home.run / f"engine-{engine}"


def last_steps_path(home: Home, engine: str) -> Path:
    """Where an engine's scheduler writes down what it runs."""
    path = channel_path(home, engine)
    return path.with_name(path.name + SUFFIX)


def plugin_env(home: Home, nonce: str, engine: str) -> dict[str, str]:
    """Environment variables for an engine: the nonce, where its sockets go, and a folder that
    holds batchrun alone.

    An engine in an environment of its own then imports batchrun, and nothing else of ours.
    """
    home.plugin.mkdir(parents=True, exist_ok=True)
    link = home.plugin / "batchrun"
    package = Path(batchrun.__file__).parent
    if not link.is_symlink() or link.readlink() != package:
        link.unlink(missing_ok=True)
        link.symlink_to(package)
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(home.plugin), *([inherited] if inherited else [])])
    return {
        HINT_NONCE_VARIABLE: nonce,
        CHANNEL_VARIABLE: str(channel_path(home, engine)),
        "PYTHONPATH": path,
    }
