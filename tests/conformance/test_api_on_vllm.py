"""The checks of the API's specification for which the engine matters, on the real vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from batch_checks import TOO_LONG, check_error_line, check_output_lines, check_usage, line_for
from batch_rig import CHAT, COMPLETIONS, KIND_PARAMS, RESPONSES, Caller, connect
from deployment_rig import DeploymentRig
from engine_builders import REAL_MODEL

from batchrun.engine.command import ManagedSettings

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="session")
def vllm_rig(
    tmp_path_factory: pytest.TempPathFactory, vllm_engine: ManagedSettings
) -> Iterator[DeploymentRig]:
    """A deployment of the real vLLM."""
    made = DeploymentRig(tmp_path_factory.mktemp("batches-on-vllm"))
    made.configure({"attach": vllm_engine.base_url, "priority": True})
    made.ask("up", "-d")
    yield made
    made.close()


@pytest.fixture(params=KIND_PARAMS)
def vllm_caller(vllm_rig: DeploymentRig, request: pytest.FixtureRequest) -> Iterator[Caller]:
    """A caller of that deployment, with the sync client and with the async one."""
    with connect(vllm_rig.port, request.param) as made:
        yield made


def test_42_an_error_of_vllm_is_a_response(vllm_caller: Caller) -> None:
    """Error line for HTTP 400: `response.status_code` 400, `response.body.error` has four keys,
    top-level `error` is null."""
    check_error_line(vllm_caller, TOO_LONG, REAL_MODEL)


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, RESPONSES])
def test_43_an_answer_is_what_vllm_returns(vllm_caller: Caller, endpoint: str) -> None:
    """Output line: `body` is a dict and parses with the client's own response type."""
    check_output_lines(vllm_caller, endpoint, REAL_MODEL)


def test_47_usage_is_the_sum_on_vllm(vllm_caller: Caller) -> None:
    """`usage` equals the sum of body usages; `total_tokens` = input + output."""
    check_usage(vllm_caller, [line_for(CHAT, i, REAL_MODEL) for i in range(8)])
