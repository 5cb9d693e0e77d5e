"""A machine that does not play along: taken ports, dead engines, full disks, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from deployment_rig import JOB_FILE, DeploymentRig
from openai import APIConnectionError

from batchrun.control.starting import POLL_INTERVAL_S
from batchrun.server.api.process import CLEAN_STOP_S

pytestmark = pytest.mark.slow

WAIT_S = 60.0
TMPFS = "mount -t tmpfs -o size={} tmpfs {}"


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a command that could not start its engine or gateway."""
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (4, "", 1), done.stderr
    return done.stderr


def processes_of(rig: DeploymentRig) -> list[list[str]]:
    """The command lines of whatever still runs for this rig."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if any(str(rig.folder) in word for word in line)]


def test_a_taken_gateway_port_is_named_and_nothing_is_left_running(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    rig.write_rows(["a"])
    rig.write_job()
    with socket.create_server(("127.0.0.1", rig.port)):
        line = refusal(rig.call("run", "job.yaml"))

    assert f"port {rig.port} on 127.0.0.1 cannot be used (Address already in use)" in line
    assert "--listen" in line
    assert processes_of(rig) == []


def test_files_of_the_caller_s_are_not_imported(rig: DeploymentRig) -> None:
    fake = [sys.executable, "-P", "-m", "batchrun.engine.fake", f"--port={rig.engine_port}"]
    rig.configure({"command": [*fake, "--model=fake"], "port": rig.engine_port}, gateway_workers=2)
    for name in ("queue", "secrets", "types"):
        (rig.folder / f"{name}.py").write_text(f"raise ImportError('{name} of the caller')\n")
    command = [sys.executable, "-P", "-m", "batchrun", "up", "-d", "--home", str(rig.home)]

    done = subprocess.run(command, cwd=rig.folder, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_a_taken_engine_port_is_named(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    with socket.create_server(("127.0.0.1", rig.engine_port)):
        line = refusal(rig.call("up", "-d"))

    assert f"port {rig.engine_port} on 127.0.0.1 cannot be used" in line
    assert "give the engine another `port`" in line


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ({"command": ["false"]}, "engine 0 ended while starting the process: it wrote nothing"),
        ({"command": ["no-such-program"]}, "no-such-program cannot be started: No such file"),
        (
            {"command": [sys.executable, "-c", "raise ValueError('torn weights')"]},
            "ValueError: torn weights",
        ),
        ({"python": "/no/such/python"}, "engine python /no/such/python does not exist"),
    ],
)
def test_an_engine_that_does_not_start_is_one_line(
    rig: DeploymentRig, engine: dict[str, object], line: str
) -> None:
    (rig.folder / "llama").mkdir()
    (rig.folder / "llama" / "config.json").write_text("{}")
    rig.configure({"name": "0", **engine}, model="./llama")

    assert line in refusal(rig.call("up", "-d"))


def test_a_model_folder_that_is_missing_or_empty_is_named(rig: DeploymentRig) -> None:
    rig.configure({"name": "0"}, model="./llama")
    assert "llama does not exist; correct `model`" in refusal(rig.call("up", "-d"))

    (rig.folder / "llama").mkdir()
    assert "llama is not a model folder" in refusal(rig.call("up", "-d"))


def test_of_two_ups_at_once_one_is_refused_and_the_deployment_runs(rig: DeploymentRig) -> None:
    rig.use_fake_engine()

    both = [rig.start("up", "-d") for _ in range(2)]
    said = [process.communicate(timeout=WAIT_S)[1] for process in both]

    assert {process.returncode for process in both} <= {0, 4}
    assert any(process.returncode == 0 for process in both), said
    assert rig.ask("status")["engines"][0]["state"] == "ready"
    assert rig.ask("down")["stopped"] == ["daemon", "gateway", "engine 0"]
    assert rig.call("down").stdout == "nothing was running\n"


def test_a_container_that_is_stopped_ends_calls_first(rig: DeploymentRig) -> None:
    rig.use_fake_engine(f"--latency-s={CLEAN_STOP_S + 2}")
    refused = rig.call("up", "-d", "--with-gateway")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    with rig.start("up", "--with-gateway") as up, rig.openai(max_retries=0) as client:
        while '"ready"' not in rig.call("status", "--json").stdout:
            time.sleep(POLL_INTERVAL_S)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(client.completions.create, model="fake", prompt="hello")
            rig.wait_for_executions(1)
            up.send_signal(signal.SIGTERM)
            assert call.result().choices[0].text
        assert up.wait(WAIT_S) == 0
        with pytest.raises(APIConnectionError):
            client.models.list()
    assert rig.ask("down")["stopped"] == ["engine 0"]


@pytest.mark.nightly
def test_an_up_whose_daemon_is_slower_than_anothers_is_refused_and_leaves_nothing(
    rig: DeploymentRig,
) -> None:
    rig.use_fake_engine()
    slower = rig.start("up", "-d")
    daemon = daemon_of(slower)
    daemon.suspend()
    rig.ask("up", "-d")

    # Long enough to see what the other has started, and to take it for its own.
    with suppress(subprocess.TimeoutExpired):
        slower.wait(10 * POLL_INTERVAL_S)
    daemon.resume()
    stderr = slower.communicate(timeout=WAIT_S)[1]

    assert slower.returncode == 4, stderr
    assert "in use by process" in stderr
    assert rig.ask("down")["stopped"] == ["daemon", "gateway", "engine 0"]
    assert rig.call("down").stdout == "nothing was running\n"


def daemon_of(up: subprocess.Popen[str]) -> psutil.Process:
    """The process that an `up -d` has spawned, as soon as it is a daemon's command."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        for child in psutil.Process(up.pid).children():
            with suppress(psutil.NoSuchProcess):
                if "--home" in child.cmdline():
                    return child
        time.sleep(0.002)
    raise AssertionError("waited in vain for the daemon")


def test_up_after_the_daemon_was_killed_adopts_engine_and_gateway(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    rig.ask("up", "-d")
    before = [rig.pid_of("engine"), rig.pid_of("gateway")]
    rig.kill("daemon")

    rig.ask("up", "-d")

    assert [rig.pid_of("engine"), rig.pid_of("gateway")] == before


def interrupt(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Ctrl-C as a terminal sends it, to the whole group; (exit code, stderr)."""
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=WAIT_S)
    return process.returncode, stderr


def start_in_group(rig: DeploymentRig, *arguments: str) -> subprocess.Popen[str]:
    """The command as a shell starts it: leader of a process group."""
    return subprocess.Popen(
        [sys.executable, "-m", "batchrun", *arguments],
        cwd=rig.folder,
        env={**os.environ, "BATCHRUN_HOME": str(rig.home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_until(path: Path, num_lines: int = 0) -> None:
    """Until a file is there, with so many lines."""
    deadline_s = time.monotonic() + WAIT_S
    while not path.exists() or len(path.read_bytes().splitlines()) < num_lines:
        assert time.monotonic() < deadline_s, f"waited in vain for {path}"
        time.sleep(0.02)


@pytest.mark.nightly
def test_ctrl_c_ends_run_and_the_same_command_goes_on(rig: DeploymentRig) -> None:
    rig.use_fake_engine("--latency-s=0.2")
    rig.write_rows([str(i) for i in range(300)])
    rig.write_job()
    running = start_in_group(rig, "run", "job.yaml")
    wait_until(rig.executions_path, 100)

    code, stderr = interrupt(running)

    assert (code, stderr) == (130, "interrupted; `batchrun run job.yaml` goes on where it was\n")
    assert processes_of(rig) == []
    done = rig.ask("status")["jobs"][0]["num_completed"]
    assert 0 < done < 300
    again = rig.call("run", "job.yaml")
    assert again.returncode == 0
    assert f"{done} of 300 rows are done" in again.stderr
    assert len(rig.ask("status")["jobs"]) == 1
    assert [row["id"] for row in rig.output()] == [f"row-{i}" for i in range(300)]


@pytest.mark.parametrize("loaded", ["batchrun.cli", "typer.models", "batchrun.errors"])
def test_ctrl_c_while_the_command_is_loaded_is_no_traceback(tmp_path: Path, loaded: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "batchrun", "status"]
    loading = subprocess.Popen(
        command,
        env={**os.environ, "BATCHRUN_HOME": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert loading.stderr is not None
    for line in loading.stderr:
        if line.split("|")[-1].strip() == loaded:
            break

    code, stderr = interrupt(loading)

    assert code in {-signal.SIGINT, 130}
    assert "Traceback" not in stderr


def test_ctrl_c_while_the_daemon_is_only_starting_leaves_nothing_behind(
    rig: DeploymentRig,
) -> None:
    rig.use_fake_engine()
    rig.write_rows(["a"])
    rig.write_job()
    running = start_in_group(rig, "run", "job.yaml")
    wait_until(rig.home / "run" / "daemon-process.json")

    code, stderr = interrupt(running)

    assert (code, stderr.count("\n")) == (130, 1)
    assert processes_of(rig) == []


def in_a_mount_namespace(rig: DeploymentRig, *lines: str) -> list[dict[str, object]]:
    """Run shell lines where they may mount; each line's exit code and stderr.

    Skips where the machine allows no mounts.
    """
    probe = ["unshare", "--map-root-user", "--mount", "true"]
    if subprocess.run(probe, check=False, capture_output=True).returncode != 0:
        pytest.skip("no mount namespaces here")
    script = "\n".join(
        f"{line} >/dev/null 2>line.err; python -c 'import json,sys;"
        f'print(json.dumps(dict(code=int(sys.argv[1]),err=open("line.err").read())))\' $?'
        for line in lines
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        cwd=rig.folder,
        env={**os.environ, "PATH": path, "BATCHRUN_HOME": str(rig.home)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_full_disk_under_the_output_pauses_and_the_results_are_kept(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    (rig.folder / "small").mkdir()
    rig.write_rows([str(i) for i in range(200)])
    rig.write_job(JOB_FILE.replace("out.parquet", "small/out.jsonl"))

    _, full, copied, _, _, again = in_a_mount_namespace(
        rig,
        TMPFS.format("16k", "small"),
        "batchrun run job.yaml",
        "batchrun results sample -o elsewhere.jsonl",
        "ls -A small > listing",
        "mount -o remount,size=10m small",
        "batchrun run job.yaml",
    )

    assert full["code"] == 4
    assert "small/out.jsonl: no room to write the results" in str(full["err"])
    assert (copied["code"], len(rig.output("elsewhere.jsonl"))) == (0, 200)
    assert again["code"] == 0
    assert len(rig.executions()) == 200


@pytest.mark.nightly
def test_a_full_disk_under_the_store_loses_no_row(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    rig.home.mkdir()
    rig.write_rows([str(i) for i in range(3000)])
    rig.write_job(JOB_FILE.replace("max_tokens: 8", "max_tokens: 400"))

    _, full, _, again = in_a_mount_namespace(
        rig,
        TMPFS.format("700k", rig.home),
        "batchrun run job.yaml",
        f"mount -o remount,size=100m {rig.home}",
        "batchrun run job.yaml",
    )

    assert full["code"] == 4
    assert "no space left on the disk; free some space; then `batchrun run job.yaml`" in str(
        full["err"]
    )
    assert again["code"] == 0
    assert "going on with job_" in str(again["err"])
    assert [row["id"] for row in rig.output()] == [f"row-{i}" for i in range(3000)]


def test_a_home_that_cannot_be_written_is_one_line(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    rig.home.mkdir()
    rig.write_rows(["a"])
    rig.write_job()

    _, submit, up, down = in_a_mount_namespace(
        rig,
        f"mount -t tmpfs -o ro tmpfs {rig.home}",
        "batchrun submit job.yaml",
        "batchrun up -d",
        "batchrun down",
    )

    assert (submit["code"], up["code"], down["code"]) == (2, 2, 0)
    assert "cannot be the home (Read-only file system); choose another" in str(submit["err"])
