"""batchrun as `uv tool install` and `pip install` leave it, and under a real Jupyter kernel.

All that an environment needs comes from the package index that pip is configured with; without one
these tests are skipped.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from deployment_rig import DeploymentRig
from fresh_user import WAIT_S, FreshUser, build_wheel

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3 * WAIT_S)]

FIRST_STEPS = """\
batchrun --version
batchrun init first
cd first
batchrun doctor
batchrun run jobs/sample.yaml
"""

NOTEBOOK = """\
import sys

import nbclient
import nbformat

class Client(nbclient.NotebookClient):
    def process_message(self, message, cell, cell_index):
        if message["msg_type"] in ("display_data", "update_display_data"):
            print("shown:", message["content"]["data"]["text/plain"])
        return super().process_message(message, cell, cell_index)

notebook = nbformat.v4.new_notebook()
notebook.cells = [nbformat.v4.new_code_cell(sys.stdin.read())]
Client(notebook, timeout=1200, kernel_name="python3").execute()
for output in notebook.cells[0].outputs:
    print("left:", repr(output.get("text", output.get("data"))))
"""

CELL = """\
import polars as pl
import batchrun

frame = pl.DataFrame({"text": [f"review {i}" for i in range(120)]})
answered = batchrun.map(frame, "Classify: {{ text }}", max_tokens=8)
job = batchrun.submit("job.yaml").wait(progress=True)
print(answered["response"].null_count(), job.status()["num_completed"])
"""


def run(*command: str | Path) -> str:
    """What a command says; its errors fail the test."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """uv, in an environment of its own."""
    folder = tmp_path_factory.mktemp("uv")
    run(sys.executable, "-m", "venv", folder)
    install = f"{folder / 'bin' / 'pip'} install --quiet uv"
    if subprocess.run(install.split(), check=False, timeout=WAIT_S).returncode:
        pytest.skip("there is no package index to install from")
    return folder / "bin" / "uv"


def with_uv(uv: Path, wheel: Path, folder: Path) -> Path:
    """The folder of the programs of a tool."""
    places = [f"UV_TOOL_DIR={folder / 'tools'}", f"UV_TOOL_BIN_DIR={folder / 'bin'}"]
    run("env", *places, uv, "tool", "install", "--python", sys.executable, wheel)
    assert "batchrun 0." in run(folder / "bin" / "batchrun", "--version")
    return folder / "tools" / "batchrun" / "bin"


def with_pip(uv: Path, wheel: Path, folder: Path) -> Path:
    """The folder of the programs of a virtual environment."""
    del uv
    run(sys.executable, "-m", "venv", folder / "venv")
    run(folder / "venv" / "bin" / "pip", "install", "--quiet", wheel)
    return folder / "venv" / "bin"


@pytest.mark.parametrize("installed", [with_uv, with_pip])
def test_what_was_installed_runs_a_job(
    installed: Callable[[Path, Path, Path], Path], uv: Path, wheel: Path, tmp_path: Path
) -> None:
    user = FreshUser(tmp_path, installed(uv, wheel, tmp_path) / "python")
    assert user.call("python -c 'import vllm'").returncode == 1
    user.use_fake_engine()

    done = user.call(FIRST_STEPS)

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"batchrun \d+\.\d+", done.stdout)
    assert "MISSING" not in done.stdout
    assert "sample: 16 rows done, 0 failed" in done.stdout


def test_a_notebook_shows_one_line_of_progress_that_goes(
    uv: Path, wheel: Path, tmp_path: Path
) -> None:
    python = with_pip(uv, wheel, tmp_path) / "python"
    run(python, "-m", "pip", "install", "--quiet", "ipykernel", "nbclient")
    rig = DeploymentRig(tmp_path)
    rig.use_fake_engine("--latency-s=0.5", window={"requests": 8})
    rig.write_rows([f"row {i}" for i in range(80)])
    rig.write_job()
    try:
        done = subprocess.run(
            ["env", f"BATCHRUN_HOME={rig.home}", python, "-c", NOTEBOOK],
            input=CELL,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
        )
    finally:
        rig.close()

    assert done.returncode == 0, done.stderr
    shown = [line for line in done.stdout.splitlines() if line.startswith("shown:")]
    assert any(re.search(r"map \w+ .*━.* [1-9]\d*/120 ", line) for line in shown)
    assert any(re.search(r"sample .* [1-9]\d*/80 ", line) for line in shown)
    left = [line for line in done.stdout.splitlines() if line.startswith("left:")]
    assert left[-1] == "left: '0 80\\n'"
    assert set(left[:-1]) == {"left: {'text/plain': ''}"}
