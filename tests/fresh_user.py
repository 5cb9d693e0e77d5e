"""Somebody who has just installed batchrun from its wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.deployment import free_port

ROOT = Path(__file__).parents[1]
WAIT_S = 1_200.0


def build_wheel(folder: Path) -> Path:
    """The wheel of this tree, in `folder`."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    subprocess.run(
        [*build, "--outdir", folder, ROOT], check=True, capture_output=True, timeout=WAIT_S
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


@dataclass
class FreshUser:
    """Somebody with an empty home, and batchrun on the path; `config` is what BATCHRUN_CONFIG says,
    if anything."""

    folder: Path
    python: Path
    config: Path | None = None

    def call(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run shell lines; the first that fails ends them."""
        kept = ("LANG", "LC_ALL", "TMPDIR")
        env = {name: os.environ[name] for name in kept if name in os.environ}
        env |= {"HOME": str(self.folder), "BROWSER": "true", "BATCHRUN_LISTEN": self.listen}
        env["PATH"] = os.pathsep.join([str(self.python.parent), "/usr/bin", "/bin"])
        if self.config is not None:
            env["BATCHRUN_CONFIG"] = str(self.config)
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
        )

    def __post_init__(self) -> None:
        self.listen = f"127.0.0.1:{free_port()}"

    def use_fake_engine(self) -> None:
        """Let every deployment of the user have an engine that answers without a model."""
        port = free_port()
        command = [str(self.python), "-m", "batchrun.engine.fake", f"--port={port}"]
        self.config = self.folder / "fake.yaml"
        self.config.write_text(json.dumps({"engines": [{"command": command, "port": port}]}))
