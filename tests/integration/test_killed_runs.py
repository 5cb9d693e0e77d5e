"""A test run that is killed leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from reaper import RUN_VARIABLE, processes_of

TESTS = Path(__file__).parents[1]
PROGRAM = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from deployment_rig import DeploymentRig
from reaper import RUN_VARIABLE, begin_run

end = begin_run()
rig = DeploymentRig(Path({folder!r}))
rig.use_fake_engine()
rig.complete_job(1)
print(os.environ[RUN_VARIABLE], flush=True)
time.sleep(600)
"""


def test_a_killed_run_takes_its_daemon_gateway_and_engine_along(tmp_path: Path) -> None:
    program = PROGRAM.format(tests=str(TESTS), folder=str(tmp_path))
    env = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env
    ) as run:
        assert run.stdout is not None
        run_id = run.stdout.readline().strip()
        started = {" ".join(process.cmdline()) for process in processes_of(run_id)}
        run.send_signal(signal.SIGKILL)

    parts = ("batchrun up", "batchrun.server.gateway", "batchrun.engine.fake")
    assert [part for part in parts if not any(part in line for line in started)] == []
    while processes_of(run_id):
        time.sleep(0.05)
