"""The whole suite once more, through the last client of the 2.x series."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from openai_versions import openai_client

VERSION = "2.54.0"
FOLDER = Path(__file__).parent
PROGRAM = "import openai; print(openai.__version__, openai.__file__)"


@pytest.mark.nightly
@pytest.mark.timeout(1_200)
def test_the_suite_passes_with_an_older_client() -> None:
    client = openai_client(VERSION)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(client), str(FOLDER.parents[1])])}
    chosen = "(async_client or not nightly) and not slow and not engine"
    left_out = f"--ignore={FOLDER / 'test_openapi.py'}"
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--numprocesses=2",
        "-m",
        chosen,
        left_out,
        str(FOLDER),
    ]

    used = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=FOLDER.parents[1],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )

    assert used.stdout.split() == [VERSION, str(client / "openai" / "__init__.py")]
    assert done.returncode == 0, done.stdout[-6_000:]
    assert re.search(r"\d+ passed", done.stdout)
