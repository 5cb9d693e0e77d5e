"""Where `inspect` learns how much KV an engine has."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from deployment_rig import DeploymentRig
from estimator_builders import write_profile

from batchrun.cli.inspect import find_kv_size
from batchrun.config import Deployment
from batchrun.daemon.plugin import profile_path
from batchrun.engine_config import EngineConfig
from batchrun.errors import ConfigError
from batchrun.home import Home
from batchrun.jobs.study import KvSize


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def deployment(base: Path, *vllm_args: str, profile: str | None = None) -> Deployment:
    engine = EngineConfig(vllm_args=vllm_args, profile=profile)
    return Deployment.model_validate({"base": base, "engines": (engine,)})


def test_without_flag_daemon_or_profile_it_is_unknown(home: Home) -> None:
    kv = find_kv_size(None, deployment(home.path), home)
    assert kv == KvSize(None, "unknown", 16, "vLLM's default")


def test_the_flag_comes_before_the_profile(home: Home) -> None:
    here = deployment(home.path)
    write_profile(profile_path(here, here.engines[0], home), block_tokens=32)

    assert find_kv_size(5_000, here, home).tokens == 5_000
    profiled = "the calibration profile"
    assert find_kv_size(None, here, home) == KvSize(3_200, profiled, 32, profiled, 3_200)


def test_a_running_engine_comes_before_the_profile(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    rig.ask("up", "-d")
    here, home = deployment(rig.home), Home(rig.home)
    write_profile(profile_path(here, here.engines[0], home), block_tokens=32)
    while not rig.ask("status")["engines"][0]["kv"]:
        time.sleep(0.1)

    running, tokens = "the running engine", 65_536 * 16
    assert find_kv_size(None, here, home) == KvSize(tokens, running, 16, running, tokens)
    named = here.model_copy(update={"file": rig.home / "batchrun.yaml"})
    assert find_kv_size(None, named, home).source == running
    other = named.model_copy(update={"engines": (EngineConfig(name="other"),)})
    assert find_kv_size(None, other, home).source == "the calibration profile"


@pytest.mark.parametrize(
    "arguments", [("--block-size", "64"), ("--block-size=64",), ("--block_size=64", "--seed=1")]
)
def test_the_block_size_among_the_engines_arguments_holds(
    home: Home, arguments: tuple[str, ...]
) -> None:
    kv = find_kv_size(None, deployment(home.path, *arguments), home)
    assert (kv.block_tokens, kv.block_source) == (64, "vllm_args in batchrun.yaml")


def test_a_profile_that_cannot_be_read_is_one_line(home: Home, tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(ConfigError, match=r"torn\.json"):
        find_kv_size(None, deployment(tmp_path, profile="torn.json"), home)
