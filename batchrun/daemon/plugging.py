"""What an engine needs to run batchrun's scheduler: the package on its path, and a secret."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import batchrun
from batchrun.config import Deployment
from batchrun.files import write_atomically
from batchrun.home import Home
from batchrun.types import HINT_NONCE_VARIABLE


def scheduler_settings(deployment: Deployment) -> dict[str, object] | None:
    """The settings of batchrun's scheduler, or None when engines run vLLM's own."""
    if deployment.policy is None:
        return None
    return {"policy": deployment.policy, "slo": deployment.slo.model_dump()}


def read_or_make_nonce(home: Home) -> str:
    """The secret that tells this home's hints from forged ones. It outlives daemon and engines."""
    if home.hint_nonce.exists():
        return home.hint_nonce.read_text()
    nonce = secrets.token_urlsafe(32)
    write_atomically(home.hint_nonce, nonce.encode(), mode=0o600)
    return nonce


def plugin_env(home: Home, nonce: str) -> dict[str, str]:
    """Environment variables for an engine: the nonce, and a folder that holds batchrun alone.

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
    return {HINT_NONCE_VARIABLE: nonce, "PYTHONPATH": path}
