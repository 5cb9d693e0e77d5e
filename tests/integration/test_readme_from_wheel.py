"""The README from its first line on, with batchrun from its wheel in an environment of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from fresh_user import ROOT, WAIT_S, FreshUser, build_wheel

README = (ROOT / "README.md").read_text("utf-8")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENGINES_ONLY = re.compile(r"(vllm|torch|batchrun|__editable__)[\w.+-]*|.*\.pth", re.IGNORECASE)
"""What the new environment does not get; the engines' has it."""
DONE_BY_THE_TEST = ("uv tool install ", "batchrun engine install", "make ")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment: the wheel, and what it needs from this one, but no vLLM."""
    folder = tmp_path_factory.mktemp("environment")
    wheel = build_wheel(folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    made = folder / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(made), "install"]
    subprocess.run(
        [*install, "--no-deps", "--no-index", wheel],
        check=True,
        capture_output=True,
        timeout=WAIT_S,
    )
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not ENGINES_ONLY.fullmatch(path.name):
            (borrowed / path.name).symlink_to(path)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (folder / "venv" / "lib" / version / "site-packages" / "borrowed.pth").write_text(str(borrowed))
    return made


@pytest.fixture
def user(python: Path, tmp_path: Path) -> Iterator[FreshUser]:
    """A user for whom `batchrun engine install` has run: the engines' environment is this one."""
    state = tmp_path / ".local" / "state" / "batchrun"
    state.mkdir(parents=True)
    (state / "engine-env").symlink_to(sys.prefix)
    made = FreshUser(tmp_path, python)
    yield made
    assert made.call("batchrun down").returncode == 0


def blocks(language: str) -> list[str]:
    """The fenced blocks of the README in this language."""
    return [text for name, text in FENCE.findall(README) if name == language]


def commands() -> list[str]:
    """What the README's consoles type, in order."""
    typed = [
        line[2:] for text in blocks("console") for line in text.splitlines() if line[:1] == "$"
    ]
    return [line for line in typed if not line.startswith(DONE_BY_THE_TEST)]


def script_of_the_readme() -> str:
    """Install, the job file and the DataFrame after `init`, and then all the rest."""
    (*before, init), rest = commands()[:1], commands()[1:]
    assert before == [] and init.startswith("batchrun init ")
    return "\n".join([
        *(init, "cp ~/reviews.yaml jobs/", "cp ~/reviews.csv data/"),
        *("batchrun run jobs/reviews.yaml", "python ~/frame.py", *rest),
    ])


def write_snippets(folder: Path) -> None:
    """The README's job file with an input, and its Python."""
    (folder / "reviews.yaml").write_text(blocks("yaml")[0])
    (folder / "reviews.csv").write_text('text\nGreat soup.\n"Cold, and late."\n')
    (folder / "frame.py").write_text("\n".join(blocks("python")))


def asked_before() -> list[str]:
    """The commands of the table of questions."""
    _, _, section = README.partition("\n## Know before you run\n")
    return re.findall(r"`(batchrun [^`]+)`", section.partition("\n## ")[0])


def check_first_day(user: FreshUser) -> None:
    """Run all that the README types; everything that it promises to be there is there."""
    write_snippets(user.folder)

    done = user.call(script_of_the_readme())

    assert done.returncode == 0, done.stderr
    assert "sample: 16 rows done, 0 failed" in done.stdout
    assert "reviews: 2 rows done, 0 failed" in done.stdout
    assert f"online endpoint http://{user.listen}/v1" in done.stdout
    assert "offline work is off" in done.stdout
    results = user.folder / "first" / "results"
    for name, num_rows in (("sample", 16), ("reviews", 2)):
        answers = pl.read_parquet(results / f"{name}.parquet")
        assert (len(answers), answers["error"].null_count()) == (num_rows, num_rows)


@pytest.mark.slow
def test_every_command_and_snippet_of_the_readme_runs(user: FreshUser) -> None:
    user.use_fake_engine()
    where = user.call("cd / && python -c 'import batchrun; print(batchrun.__file__)'")
    assert where.stdout.startswith(str(user.python.parents[1])), where.stderr

    check_first_day(user)


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_they_run_on_vllm_in_an_environment_of_its_own(user: FreshUser) -> None:
    assert "No module named 'vllm'" in user.call("python -c 'import vllm'").stderr

    check_first_day(user)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_what_is_asked_before_a_run_is_answered(user: FreshUser) -> None:
    calls = "".join(f"2026-11-01 10:{at_s // 60:02}:{at_s % 60:02},200,40\n" for at_s in range(90))
    (user.folder / "day.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{calls}")
    prepared = ["batchrun init first", "cd first", "mv ~/day.csv .", f"cp {ROOT}/jobs/simu* jobs/"]
    asked = [f"{line} || exit 3" for line in asked_before()]
    assert {line.split()[1] for line in asked} == {
        "inspect",
        "submit",
        "status",
        "plan",
        "simulate",
    }

    done = user.call("\n".join([*prepared, *asked]))

    assert done.returncode == 0, done.stderr
    assert len(list((user.folder / "first" / "evening").glob("*.svg"))) >= 5
    assert "at best 8" in done.stdout and "chosen" in done.stdout
