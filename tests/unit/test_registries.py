"""Names of policies, orders of calls and orders of eviction: each is a line in one table."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchrun.cache.eviction import EVICTIONS
from batchrun.config import Deployment
from batchrun.daemon.plugin import OTHER_SETTINGS, scheduler_settings
from batchrun.errors import ConfigError
from batchrun.hints import HINT_KEY
from batchrun.home import Home
from batchrun.scheduling.policies import POLICIES, QUEUES, make_policy
from batchrun.vllm_plugin.settings import PluginSettings, read_settings


def settings(**given: object) -> PluginSettings:
    """The plug-in's settings, with these given."""
    return read_settings({HINT_KEY: given})


@pytest.mark.parametrize("name", POLICIES)
def test_the_plug_in_takes_every_policy_and_makes_it(name: str) -> None:
    assert settings(policy=name).policy == name
    assert (make_policy(name) is None) == (name == "bs")


@pytest.mark.parametrize("name", QUEUES)
def test_the_plug_in_takes_every_order_of_calls_and_every_policy_works_with_it(name: str) -> None:
    assert settings(online_queue=name).online_queue == name
    assert all(make_policy(policy, name) for policy in POLICIES if policy != "bs")


@pytest.mark.parametrize("name", EVICTIONS)
def test_the_plug_in_takes_every_order_of_eviction(name: str) -> None:
    assert settings(eviction=name).eviction == name


@pytest.mark.parametrize("key", ["policy", "online_queue", "eviction"])
def test_another_name_stops_the_start_with_one_line(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--additional-config batchrun\.{key}: must be one of"):
        settings(**{key: "unheard-of"})


def test_a_window_that_no_engine_could_keep_stops_the_start_with_one_line() -> None:
    with pytest.raises(ConfigError, match=r"batchrun\.forecast_window_s: .* equal to 604800$"):
        settings(forecast_window_s=604_801)


def test_batchrun_yaml_has_the_defaults_of_the_plug_in(tmp_path: Path) -> None:
    deployment = Deployment(base=tmp_path)

    for key in ("policy", *OTHER_SETTINGS):
        assert getattr(deployment, key) == getattr(settings(), key)


def test_what_batchrun_yaml_sets_is_what_the_plug_in_reads(tmp_path: Path) -> None:
    given = {"eviction": "lru", "reserve": 0.2, "forecast_rule": "mean-sigma"}
    deployment = Deployment.model_validate({"base": tmp_path, **given})
    told = scheduler_settings(deployment, deployment.engines[0], Home(tmp_path))
    assert told is not None

    assert settings(**told).model_dump(include=set(given)) == given
