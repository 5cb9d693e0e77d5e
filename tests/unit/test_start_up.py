"""What a program does not load before it needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "batchrun.cli.main",
        "batchrun.cli.jobs",
        "batchrun.server.gateway.app",
        "batchrun.daemon.daemon",
    ],
)
def test_programs_start_without_polars(module: str) -> None:
    program = f"import sys, {module}; sys.exit('polars' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
