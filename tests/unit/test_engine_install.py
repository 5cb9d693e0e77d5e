"""`install_engine`: what it reports, and the one line when pip fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchrun.cli.operate.engine import a_line_a_stage
from batchrun.engine import command
from batchrun.engine.command import count_requirements, install_engine
from batchrun.errors import EngineError

LOCK = """\
# note

a==1 \\
    --hash=sha256:00
-r other.txt
  b==2
    # via a
"""

MISMATCH = """\
Collecting torch==2.13.0 (from -r engine-cpu.txt (line 3766))
ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated
    torch==2.13.0 from https://index.invalid/torch-2.13.0.whl (from -r engine-cpu.txt (line 3766)):
        Expected sha256 6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b
             Got        a3a9a21312872af8a26950b2c15680335a386a1f56ed03e780653d78b9607e9e

"""


def test_packages_of_a_lock_are_counted() -> None:
    assert count_requirements(LOCK.splitlines()) == 2


def test_a_failing_pip_gives_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_NO_INDEX", "PIP_NO_CACHE_DIR"):
        monkeypatch.setenv(name, "1")
    for name in ("PIP_FIND_LINKS", "PIP_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path))
    stages: list[str] = []
    with pytest.raises(EngineError, match="could not be installed in") as caught:
        install_engine(
            tmp_path / "env", cpu=True, progress=lambda stage, _done, _total: stages.append(stage)
        )
    assert "No matching distribution found" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert stages[0] == f"creating the environment {tmp_path / 'env'}"
    assert (tmp_path / "env" / "bin" / "python").exists()


def test_a_target_that_cannot_be_made_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EngineError, match="could not be installed in"):
        install_engine(tmp_path / "file", cpu=True, progress=lambda _s, _d, _t: None)


def test_each_stage_is_a_line_that_stays(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []
    tell = a_line_a_stage(lambda stage, _done, _total: shown.append(stage))

    for stage in ("creating the environment env", "fetching a", "fetching b", "installing them"):
        tell(stage, 1, 2)

    assert capsys.readouterr().err.splitlines() == [
        *("creating the environment env", "fetching 2 packages", "installing them"),
    ]
    assert len(shown) == 4


def test_the_cpu_build_is_installed_with_the_python_that_it_is_locked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "CPU_PYTHON", (3, 99))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match=r"locked for Python 3\.99, and this is 3\..*python3\.99"):
        install_engine(tmp_path / "env", cpu=True, progress=lambda _s, _d, _t: None)

    other = tmp_path / "python3.99"
    other.write_text("#!/bin/sh\necho it is asked; exit 1\n")
    other.chmod(0o755)
    with pytest.raises(EngineError, match="it is asked"):
        install_engine(tmp_path / "env", cpu=True, progress=lambda _s, _d, _t: None)


def test_another_build_than_the_locked_one_is_named(tmp_path: Path) -> None:
    pip = tmp_path / "pip"
    pip.write_text(f"#!/bin/sh\ncat <<'END'\n{MISMATCH}END\nexit 1\n")
    pip.chmod(0o755)
    with pytest.raises(EngineError, match=r"another build of torch==2\.13\.0.*PIP_EXTRA_INDEX_URL"):
        command._run([str(pip)], tmp_path)
