"""The scheduler on other vLLM versions, from the sources in their wheels, on the virtual clock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_sources import vllm_sources

TESTS = Path(__file__).parents[1]
CONTRACT = [
    TESTS / "contract" / f"test_{name}.py"
    for name in (
        "vllm_hooks",
        "self_test",
        "scheduler_features",
        "kv_groups",
        "refused_combinations",
    )
]
VIRTUAL = TESTS / "simulation" / "test_colocated_scheduler.py"
KV_SLOTS = TESTS / "simulation" / "test_every_kv_slot.py"

OLD_PROGRAM = """
from scheduler_rig import build
build()
"""


def run_with(version: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with this vLLM in the place of the installed one."""
    env = dict(os.environ)
    env["BATCHRUN_TEST_VLLM"] = version
    env["PYTHONPATH"] = os.pathsep.join([str(vllm_sources(version)), str(TESTS)])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=TESTS.parent,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


FILES = {"0.33.0": [*CONTRACT, VIRTUAL, KV_SLOTS]}
"""All other tests run on 0.32.0."""


@pytest.mark.nightly
@pytest.mark.parametrize("version", FILES)
def test_every_hook_holds_and_no_kv_slot_is_corrupted(version: str) -> None:
    # Their own warnings are of no concern: compiled parts and Triton are missing.
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "-m", "not slow and not nightly"]
    done = run_with(version, "-m", "pytest", *options, *map(str, FILES[version]))
    assert done.returncode == 0, f"vLLM {version}:\n{done.stdout[-4_000:]}\n{done.stderr[-2_000:]}"
    assert "passed" in done.stdout


@pytest.mark.nightly
def test_a_version_without_our_hooks_is_refused_in_one_line() -> None:
    done = run_with("0.26.0", "-c", OLD_PROGRAM)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert "EngineError: vLLM 0.26.0 cannot run batchrun's scheduler" in last
    assert "KVCacheManager.prefix_cache_lookup_enabled is missing" in last
    assert "install vLLM 0.32 or 0.33" in last
