"""What `batchrun calibrate` prints for people."""

from __future__ import annotations

from pathlib import Path

from estimator_builders import A100_LAW, observed, random_loads
from msgspec.structs import replace

from batchrun.cli.operate.engine import _lines
from batchrun.estimator.profile import (
    EngineFacts,
    EngineIdentity,
    OnlineLatency,
    Recording,
    calibrate,
)
from batchrun.simulator.calibrate import Measured

FACTS = EngineFacts(
    EngineIdentity("llama", "0.32.0", "cpu", "float32", 16), 8600, 32_768, 2048, 256, 2048
)
ONLINE = OnlineLatency(99, 9.5, 0.02, 0.08, 0.006, 0.011, 0.012)
RECORDING = Recording(FACTS, observed(A100_LAW, random_loads(0, 60) * 5))
PROFILE = calibrate(RECORDING, measured_at=0.0, online=ONLINE)


def printed(measured: Measured) -> dict[str, list[str]]:
    """The lines by their first word."""
    found: dict[str, list[str]] = {}
    for line in _lines(measured, Path("profile.json")):
        key, _, rest = line.partition(" ")
        found.setdefault(key, []).append(rest.strip())
    return found


def test_every_figure_of_the_profile_is_said() -> None:
    lines = printed(Measured(PROFILE, 300, engine_start_s=31.4, measuring_s=48.2))

    assert lines["engine"] == ["llama, vLLM 0.32.0, cpu, float32, 8,600 KV blocks of 16 tokens"]
    assert lines["steps"] == ["300 in 48 s, after 31 s of starting; 60 held out of the fits"]
    assert lines["model"][0].startswith("roofline: held-out error 0.0%")
    assert [line.endswith(", chosen") for line in lines["model"]] == [True, False, False, False]
    (papers,) = [line for line in lines["model"] if line.endswith(", the paper's")]
    assert papers.startswith("echo: ")
    assert lines["identical"] == ["0.0% mean spread of 300 steps in 60 groups of equal load"]
    assert lines["online"] == [
        "TTFT p50 0.020 s, p99 0.080 s; TPOT p50 6.0 ms, p99 11.0 ms (99 calls alone, 9.5 a second)"
    ]
    assert lines["outside"] == ["12.0 ms of a first token beside its steps: HTTP, tokenizer"]
    assert lines["profile"] == ["profile.json"]


def test_without_online_figures_the_line_says_why() -> None:
    silent = replace(PROFILE, online=None)
    reason = "the model did not answer chat calls"

    lines = printed(Measured(silent, 300, 31.4, 48.2, without_online=reason))

    assert lines["online"] == [f"no figures: {reason}"]
    assert "outside" not in lines


def test_what_calls_take_beside_their_steps_may_be_unknown() -> None:
    partial = replace(PROFILE, online=replace(ONLINE, outside_s=None))

    lines = printed(Measured(partial, 300, engine_start_s=31.4, measuring_s=48.2))

    assert lines["outside"] == ["not measured"]
