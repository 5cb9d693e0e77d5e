"""`python -m benchmarks.gpu` from end to end, on the CPU with a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.records import read_records

OPTIONS = ("--model-shape=tiny", "--limit-s=120", "--min-phase-s=0.5", "--max-phase-s=2")
FIGURES = ("offline_tokens_per_s", "ttft_p50_s", "tpot_p50_s", "slo_ttft", "slo_tpot", "plan_ms")


@pytest.mark.engine
@pytest.mark.nightly
def test_every_policy_runs_on_one_loaded_model(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *OPTIONS, f"--json={path}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )

    assert done.returncode == 0, done.stderr
    calibration, *phases = read_records(path)
    assert calibration["num_held_out"] > 10
    alone, *others = phases
    assert (alone["order"], alone["offline_rows"]) == (None, 0)
    assert {(phase["policy"], phase["order"]) for phase in others} == {
        ("bs", "shuffled"),
        ("bs", "grouped"),
        ("bs+e", "shuffled"),
        ("bs+e", "planned"),
        ("bs+e+s", "planned"),
        ("echo", "planned"),
    }
    # A phase lasts two seconds: on a busy machine one of them may see no row end.
    assert sum(phase["offline_rows"] for phase in others) > 0
    for phase in others:
        assert phase["offline_computed_tokens_per_s"] >= 0
        assert phase["online"] or phase["arrived"] == 0
        assert not phase["online"] or all(phase[key] is not None for key in FIGURES)
