"""What batchrun's scheduler cannot be combined with is refused by name at the start."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from scheduler_rig import build
from vllm.config import ECTransferConfig, KVTransferConfig, SpeculativeConfig, VllmConfig

from batchrun.errors import ConfigError
from batchrun.vllm_plugin.settings import refusals

Change = Callable[[VllmConfig], None]


def kv_connector(config: VllmConfig) -> None:
    config.kv_transfer_config = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")


def ec_connector(config: VllmConfig) -> None:
    config.ec_transfer_config = ECTransferConfig(
        ec_connector="ECExampleConnector", ec_role="ec_both"
    )


def speculation(config: VllmConfig) -> None:
    config.speculative_config = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=2,
        prompt_lookup_max=3,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )


def of_parallel(name: str, value: int) -> Change:
    return lambda config: setattr(config.parallel_config, name, value)


def of_scheduler(name: str, value: object) -> Change:
    return lambda config: setattr(config.scheduler_config, name, value)


def of_model(name: str, value: object) -> Change:
    return lambda config: setattr(config.model_config, name, value)


CASES: list[tuple[Change, str]] = [
    (of_parallel("pipeline_parallel_size", 2), "pipeline parallelism"),
    (of_parallel("data_parallel_size", 2), "data-parallel ranks"),
    (of_parallel("data_parallel_index", 1), "data-parallel ranks"),
    (of_parallel("decode_context_parallel_size", 2), "context parallelism"),
    (of_parallel("prefill_context_parallel_size", 2), "context parallelism"),
    (kv_connector, "a KV connector"),
    (ec_connector, "an encoder-cache connector"),
    (speculation, "speculative decoding"),
    (of_model("runner_type", "pooling"), "a pooling model"),
    (of_model("is_diffusion", True), "a diffusion model"),
    (of_model("is_encoder_decoder", True), "an encoder-decoder model"),
    (of_scheduler("enable_chunked_prefill", False), "prefills in one piece"),
    (of_scheduler("max_num_queued_reqs", 10), "a limit on queued requests"),
    (of_scheduler("max_num_queued_tokens", 10), "a limit on queued requests"),
]


@pytest.mark.parametrize(("change", "feature"), CASES)
def test_a_combination_is_refused_by_name(change: Change, feature: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot be combined with {feature}") as caught:
        build(change=change)
    line = str(caught.value)
    assert "--" in line and "\n" not in line
    assert "set `policy: vllm` in batchrun.yaml" in line


def test_every_refusal_has_a_case_and_a_row_in_the_manual() -> None:
    page = (Path(__file__).parents[2] / "docs" / "combinations.md").read_text("utf-8")
    for refusal in refusals(build().vllm_config):
        assert any(refusal.feature.startswith(feature) for _, feature in CASES), refusal.feature
        for option in refusal.option.split(", "):
            assert f"`{option}`" in page, option


def test_every_row_of_the_manual_names_tests_that_exist() -> None:
    root = Path(__file__).parents[2]
    rows = re.findall(r"^\| [^-|].*\|$", (root / "docs" / "combinations.md").read_text(), re.M)
    code = "\n".join(path.read_text("utf-8") for path in (root / "tests").rglob("test_*.py"))
    there = set(re.findall(r"^(?:async )?def (test_\w+)", code, re.M))
    named = [re.findall(r"`(test_\w+)`", row) for row in rows if "| Shown by |" not in row]
    assert len(named) > 25 and all(named), "a row without a test"
    assert {test for tests in named for test in tests} <= there


def test_policy_bs_refuses_nothing() -> None:
    for change, feature in CASES:
        if feature in {"prefills in one piece", "a limit on queued requests"}:
            build(change=change, policy="bs")
