"""What will fail on the engines that are up is said before it does: at submit and in a dry run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from deployment_rig import JOB_FILE, DeploymentRig

from batchrun.engine.command import has_tool_parser

CONTEXT_TOKENS = 200
SHORT, LONG = "a short one", "word " * 1200
NAMED = f"longer than the model's context of {CONTEXT_TOKENS} tokens"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentRig]:
    made = DeploymentRig(tmp_path_factory.mktemp("fits"))
    made.use_fake_engine(f"--max-model-tokens={CONTEXT_TOKENS}")
    made.ask("up", "-d")
    yield made
    made.close()


def test_rows_longer_than_the_context_are_counted_and_one_is_named(rig: DeploymentRig) -> None:
    rig.write_rows([SHORT, LONG, SHORT, LONG])
    rig.write_job()

    line = rig.ask("submit", "job.yaml", "--dry-run")["warning"]
    submitted = rig.call("submit", "job.yaml")

    assert NAMED in line and "will fail: 2; the first is row 1 of about 1,5" in line
    assert NAMED in submitted.stderr and submitted.returncode == 0
    assert NAMED in rig.call("submit", "job.yaml", "--dry-run").stdout


def test_rows_that_fit_get_no_word(rig: DeploymentRig) -> None:
    rig.write_rows([SHORT, SHORT])
    rig.write_job()

    assert rig.ask("submit", "job.yaml", "--dry-run")["warning"] is None
    assert rig.ask("submit", "job.yaml")["warning"] is None


def test_the_answer_needs_room_too(rig: DeploymentRig) -> None:
    rig.write_rows([SHORT])
    rig.write_job(JOB_FILE.replace("max_tokens: 8", f"max_tokens: {CONTEXT_TOKENS}"))

    line = rig.ask("submit", "job.yaml", "--dry-run")["warning"]

    assert NAMED in line


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
def test_a_model_that_nobody_serves_is_refused(
    rig: DeploymentRig, dry_run: tuple[str, ...]
) -> None:
    rig.write_rows([SHORT])
    rig.write_job(JOB_FILE + "model: another\n")

    code, line = rig.refuse("submit", "job.yaml", *dry_run)

    assert code == 2
    assert "no engine serves 'another'; they serve fake" in line


def test_a_tool_parser_takes_both_arguments() -> None:
    assert has_tool_parser(["--enable-auto-tool-choice", "--tool-call-parser", "hermes"])
    assert has_tool_parser(["--enable_auto_tool_choice", "--tool-call-parser=hermes"])
    assert not has_tool_parser(["--tool-call-parser", "hermes"])
    assert not has_tool_parser(["--enable-auto-tool-choice", "--port", "1"])
