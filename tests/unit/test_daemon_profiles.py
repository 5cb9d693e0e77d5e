"""Which profile an engine starts from, and what `slo: auto` makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from estimator_builders import write_profile

from batchrun.config import Deployment, SloConfig
from batchrun.daemon.plugin import (
    num_renderers,
    online_slo,
    profile_path,
    scheduler_settings,
    slo_classes,
)
from batchrun.engine_config import EngineConfig
from batchrun.errors import ConfigError
from batchrun.estimator.profile import OnlineLatency
from batchrun.home import Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def deployment(base: Path, *engines: EngineConfig, **keys: object) -> Deployment:
    values = {"base": base, "engines": engines or (EngineConfig(),), **keys}
    return Deployment.model_validate(values)


def latency(*, ttft_p99_s: float = 0.2, tpot_p99_s: float = 0.01) -> OnlineLatency:
    return OnlineLatency(9, 1, 0.1, ttft_p99_s, 0.005, tpot_p99_s)


def test_engines_of_one_model_with_equal_arguments_share_a_profile(home: Home) -> None:
    first = EngineConfig(name="a", env={"CUDA_VISIBLE_DEVICES": "0"})
    second = EngineConfig(name="b", env={"CUDA_VISIBLE_DEVICES": "1"})
    other = EngineConfig(name="c", vllm_args=("--dtype", "bfloat16"))
    pair = deployment(home.path, first, second, other, model="my-org/my-model")

    path = profile_path(pair, first, home)

    assert path == profile_path(pair, second, home) != profile_path(pair, other, home)
    assert path.parent == home.profiles
    assert path.name.startswith("my-org-my-model-")


@pytest.mark.parametrize("profile", ["profiles/a.json", "./~a.json"])
def test_a_named_profile_is_relative_to_the_file(home: Home, tmp_path: Path, profile: str) -> None:
    config = EngineConfig(profile=profile)

    path = profile_path(deployment(tmp_path, config), config, home)

    assert path == tmp_path / profile


def test_an_engine_is_told_of_the_profile_that_is_there(home: Home) -> None:
    plan = deployment(home.path, policy="echo")
    (config,) = plan.engines
    before = scheduler_settings(plan, config, home)
    write_profile(profile_path(plan, config, home), block_tokens=128, online=latency())

    after = scheduler_settings(plan, config, home)

    assert before is not None and "profile" not in before
    assert after is not None and after["profile"] == str(profile_path(plan, config, home))


def test_an_engine_is_told_of_the_settings_that_are_set_and_of_no_other(home: Home) -> None:
    plain = scheduler_settings(deployment(home.path), EngineConfig(), home)
    changed = deployment(home.path, eviction="lru", reserve=0.2, forecast_rule="mean-sigma")

    told = scheduler_settings(changed, EngineConfig(), home)

    assert plain is not None and plain.keys() == {"policy", "slo"}
    assert told == plain | {"eviction": "lru", "reserve": 0.2, "forecast_rule": "mean-sigma"}


@pytest.mark.parametrize(
    ("changes", "arguments", "num"),
    [
        ({"model": "plain"}, (), 2),
        ({"model": "tiny"}, (), 2),
        ({"model": "own"}, (), None),
        ({"model": "broken"}, (), None),
        ({"model": "mistral"}, (), None),
        ({"model": "org/of-the-hub"}, (), None),
        ({"model": "plain", "policy": "vllm"}, (), None),
        ({"model": "plain"}, ("--tokenizer_mode=cohere",), None),
        ({"model": "plain"}, ("--runner", "pooling"), None),
        ({"model": "plain"}, ("--config", "vllm.yaml"), None),
        ({"model": "plain"}, ("--max-num-seqs=8",), 2),
    ],
)
def test_prompts_are_tokenized_two_at_once_where_that_is_known_to_be_safe(
    tmp_path: Path, changes: dict[str, object], arguments: tuple[str, ...], num: int | None
) -> None:
    files = {
        "plain/config.json": '{"model_type": "llama"}',
        "own/config.json": '{"model_type": "deepseek_v32"}',
        "broken/config.json": "{",
        "mistral/tekken.json": "{}",
        "mistral/consolidated.safetensors": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    if (tmp_path / str(changes["model"])).is_dir():
        changes = {**changes, "model": str(tmp_path / str(changes["model"]))}
    plan = deployment(tmp_path, EngineConfig(vllm_args=arguments), **changes)

    assert num_renderers(plan, plan.engines[0]) == num


def test_a_named_profile_that_is_missing_is_one_line(home: Home) -> None:
    plan = deployment(home.path, EngineConfig(profile="absent.json"), policy="echo")

    with pytest.raises(ConfigError, match=r"engine 0: there is no profile .*absent\.json; run"):
        scheduler_settings(plan, plan.engines[0], home)


def test_promises_that_are_given_need_no_profile(home: Home) -> None:
    slo = SloConfig(ttft_s=2.0, tpot_s=0.1)

    assert online_slo(deployment(home.path, slo=slo), home) == slo


def test_auto_begins_at_twice_what_the_slowest_engine_showed_or_the_given_cost(home: Home) -> None:
    fast, slow = EngineConfig(name="fast"), EngineConfig(name="slow", vllm_args=("--swap",))
    plan = deployment(home.path, fast, slow, slo="auto")
    fast_latency = latency(ttft_p99_s=0.2, tpot_p99_s=0.01)
    write_profile(profile_path(plan, fast, home), block_tokens=128, online=fast_latency)
    slow_latency = latency(ttft_p99_s=0.5, tpot_p99_s=0.002)
    write_profile(profile_path(plan, slow, home), block_tokens=128, online=slow_latency)

    slo = online_slo(plan, home)
    given = online_slo(plan.model_copy(update={"online_cost": 1.3}), home)

    assert (slo.ttft_s, slo.tpot_s) == pytest.approx((1.0, 0.02))
    assert (given.ttft_s, given.tpot_s) == pytest.approx((0.65, 0.013))


def test_auto_without_a_profile_begins_at_the_default(home: Home) -> None:
    plan = deployment(home.path, EngineConfig(name="a"), slo="auto", policy="echo")
    assert online_slo(plan, home) == SloConfig()

    write_profile(profile_path(plan, plan.engines[0], home), block_tokens=128)

    assert online_slo(plan, home) == SloConfig()


def test_auto_begins_at_the_default_where_a_calibration_saw_no_time_pass(home: Home) -> None:
    plan = deployment(home.path, slo="auto", policy="echo")
    path = profile_path(plan, plan.engines[0], home)
    write_profile(path, block_tokens=128, online=latency(ttft_p99_s=3.0, tpot_p99_s=0.0))

    assert online_slo(plan, home) == SloConfig(ttft_s=6.0, tpot_s=SloConfig().tpot_s)


def test_engines_learn_the_bounds_of_auto_by_themselves(home: Home) -> None:
    plan = deployment(home.path, slo="auto", policy="echo", online_cost=1.5)

    told = scheduler_settings(plan, EngineConfig(), home)

    assert told == {"policy": "echo", "slo": "auto", "online_cost": 1.5}


def test_auto_with_attached_engines_only_is_refused(home: Home) -> None:
    plan = deployment(home.path, EngineConfig(attach="http://127.0.0.1:1"), slo="auto")

    with pytest.raises(ConfigError, match="auto is for engines that batchrun starts"):
        online_slo(plan, home)


CLASSES = {"chat": {"tpot_s": 0.02}, "report": {"ttft_s": 5, "jct_s": 30}}


@pytest.mark.parametrize("policy", ["echo", "vllm"])
def test_a_class_has_the_bounds_of_slo_where_it_names_none(home: Home, policy: str) -> None:
    slo = {"ttft_s": 2, "tpot_s": 0.1, "jct_s": 9}
    plan = deployment(home.path, slo=slo, slo_classes=CLASSES, policy=policy)

    assert slo_classes(plan, home) == {
        "chat": SloConfig(ttft_s=2, tpot_s=0.02, jct_s=9),
        "report": SloConfig(ttft_s=5, tpot_s=0.1, jct_s=30),
    }


def test_a_class_stands_on_what_the_calibration_showed(home: Home) -> None:
    plan = deployment(home.path, slo="auto", slo_classes=CLASSES, policy="echo")
    path = profile_path(plan, plan.engines[0], home)
    write_profile(path, block_tokens=128, online=latency(ttft_p99_s=0.2))

    assert slo_classes(plan, home)["chat"].ttft_s == pytest.approx(0.4)


def test_a_class_that_contradicts_the_calibration_is_one_line(home: Home) -> None:
    classes = {"quick": {"jct_s": 0.2}}
    plan = deployment(home.path, slo="auto", slo_classes=classes, policy="echo")
    path = profile_path(plan, plan.engines[0], home)
    write_profile(path, block_tokens=128, online=latency(ttft_p99_s=0.2))

    with pytest.raises(ConfigError, match=r"^slo_classes\.quick: jct_s must be more than ttft_s"):
        slo_classes(plan, home)


def test_without_our_scheduler_no_profile_is_asked_for(home: Home) -> None:
    plan = deployment(home.path, slo="auto", slo_classes=CLASSES, policy="vllm")

    assert slo_classes(plan, home)["chat"].tpot_s == 0.02
