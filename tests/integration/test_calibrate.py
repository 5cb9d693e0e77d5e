"""`batchrun calibrate`: its mistakes in one line, and the real engine measured."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
import pytest
from deployment_rig import DeploymentRig

from batchrun.engine.process import NONCE_VARIABLE
from batchrun.estimator.profile import profile_from_json

SMALL_ARGS = ["--kv-cache-memory-bytes=67108864", "--max-model-len=512", "--max-num-seqs=4"]
START_WAIT_S = 180.0


def refused(rig: DeploymentRig, *arguments: str) -> tuple[int, str]:
    """The exit code and the only line of a calibration that does not begin."""
    done = rig.call("calibrate", *arguments)
    (line,) = done.stderr.splitlines()
    assert done.stdout == ""
    assert not list((rig.home / "profiles").glob("*"))
    return done.returncode, line


@pytest.mark.slow
def test_an_engine_that_batchrun_does_not_start_is_refused(rig: DeploymentRig) -> None:
    rig.configure({"attach": "http://127.0.0.1:1"})

    assert refused(rig) == (
        2,
        "batchrun: no engine to calibrate: batchrun starts none of the `engines` from `model`",
    )


@pytest.mark.slow
def test_an_unknown_engine_is_named(rig: DeploymentRig) -> None:
    rig.configure({"name": "a"})

    code, line = refused(rig, "--engine", "b")

    assert (code, line) == (2, "batchrun: there is no engine b; the engines are a")


def test_an_engine_that_is_not_installed_is_one_line(rig: DeploymentRig) -> None:
    rig.configure({"python": "no-such-python", "profile": "absent.json"}, model="some/model")

    code, line = refused(rig)

    assert code == 4
    assert "engine python no-such-python does not exist" in line


@pytest.mark.slow
def test_a_place_that_cannot_be_written_is_refused_before_the_engine_starts(
    rig: DeploymentRig,
) -> None:
    rig.configure({"name": "a"})
    (rig.folder / "file").write_text("")

    code, line = refused(rig, "-o", "file/profile.json")

    assert code == 2
    assert "file/profile.json: cannot be written" in line


@pytest.mark.nightly
def test_beside_a_daemon_or_its_engines_nothing_is_measured(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    assert rig.call("up", "-d").returncode == 0

    code, line = refused(rig)
    rig.kill("daemon")
    code_without_daemon, line_without_daemon = refused(rig)

    assert (code, code_without_daemon) == (4, 4)
    assert "a daemon runs" in line and "`batchrun down`" in line
    assert "engine 0 is running" in line_without_daemon and "`batchrun down`" in line_without_daemon


@pytest.mark.engine
def test_an_interrupted_calibration_leaves_nothing(rig: DeploymentRig) -> None:
    rig.configure({"port": rig.engine_port, "vllm_args": SMALL_ARGS}, model="tiny")
    record = rig.home / "run" / "engine-calibrate.json"
    running = rig.start("calibrate", "-o", "profile.json")
    _wait_for(lambda: record.exists() and json.loads(record.read_text())["pid"] > 0)
    nonce = json.loads(record.read_text())["nonce"]

    running.send_signal(signal.SIGINT)

    assert running.wait(120) == 130
    running.communicate()
    assert not _carriers(nonce)
    assert not record.exists()
    assert not (rig.home / "run" / "calibration-steps.jsonl").exists()
    assert not list(rig.folder.glob("*profile.json*"))


@pytest.mark.engine
@pytest.mark.nightly
def test_the_real_engine_is_measured_and_let_go(rig: DeploymentRig) -> None:
    rig.configure({"port": rig.engine_port, "vllm_args": SMALL_ARGS}, model="tiny", slo="auto")

    found = rig.ask("calibrate")

    profile = profile_from_json(Path(found["path"]).read_text(), found["path"])
    assert profile.engine.model == "tiny"
    assert {each.model.name for each in profile.fitted} == {
        "echo",
        "echo-base",
        "linear",
        "roofline",
    }
    assert profile.spread.num_steps > 0
    assert profile.online is not None and profile.online.num_calls > 0
    assert not (rig.home / "run" / "calibration-steps.jsonl").exists()


def _wait_for(condition: object) -> None:
    assert callable(condition)
    deadline_s = time.monotonic() + START_WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _carriers(nonce: str) -> list[psutil.Process]:
    """Processes that stem from the engine of this nonce."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(NONCE_VARIABLE) == nonce:
                found.append(process)
        except psutil.Error:
            continue
    return found
