"""The manual says what the code does: commands, keys, exit codes, figures, examples, links."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cli_page
import pytest
from pydantic import BaseModel
from ruamel.yaml import YAML

from batchrun import errors
from batchrun.cli.main import INTERRUPTED
from batchrun.config import (
    DeploymentFile,
    Environment,
    KeyLimitsConfig,
    SloClassConfig,
    SloConfig,
    TimeoutsConfig,
    WindowConfig,
)
from batchrun.control.following import STALL_PATIENCE_S
from batchrun.daemon import faults as backoff
from batchrun.daemon import faults as breaker
from batchrun.daemon import faults as trials
from batchrun.daemon import writer
from batchrun.daemon.ending import OUTPUT_TRIES
from batchrun.engine import command as vllm_command
from batchrun.engine.command import ManagedSettings
from batchrun.engine_config import EngineConfig, RayConfig, ReplicasConfig
from batchrun.errors import BatchrunError, ConfigError
from batchrun.estimator import caller_margin, online_fit
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.spec import OUTPUT_COLUMNS, InputSpec, JobFile, OutputSpec
from batchrun.pool.prefix_keys import CHUNK_BYTES
from batchrun.server.api.watch import ENDED_S, SHOWN_S
from batchrun.server.gateway.app import MAX_BODY_BYTES
from batchrun.server.gateway.shared_book import FAILURES, FIRST_EJECTION_S, LONGEST_EJECTION_S
from batchrun.store import jobs
from batchrun.strict import load_strict
from batchrun.types import JobState
from batchrun.wire import NUM_STEPS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ERROR_NAME = re.compile(r"\w+Error")
SOURCE_PATH = re.compile(r"`(batchrun/[\w/.]*)`")
FOREIGN_ASSET = re.compile(r"<(?:link|script|img)\b[^>]*(?:href|src)=[\"']?(?:https?:)?//[^>]*>")

MAX_FILES_OF_WAYS = {"a row": 40, "a chat call": 10, "an engine step": 22, "a batch": 24}
"""The most of our files that each main way of the data may cross."""

MAX_FAILED_STARTS = ManagedSettings.__dataclass_fields__["max_failed_starts"].default

KEY_TABLES: list[tuple[type[BaseModel], str, str]] = [
    (JobFile, "job-file.md", ""),
    (InputSpec, "job-file.md", "input."),
    (OutputSpec, "job-file.md", "output."),
    (DeploymentFile, "configuration.md", ""),
    (EngineConfig, "configuration.md", "engines[]."),
    (RayConfig, "configuration.md", "engines[].ray."),
    (ReplicasConfig, "configuration.md", "engines[].ray.replicas."),
    (SloConfig, "configuration.md", "slo."),
    (SloClassConfig, "configuration.md", "slo_classes.NAME."),
    (WindowConfig, "configuration.md", "window."),
    (TimeoutsConfig, "configuration.md", "timeouts."),
    (KeyLimitsConfig, "configuration.md", "key_limits."),
]
SECTIONS = {"input", "output"}
"""Keys that hold keys; the manual names the inner ones."""

FIGURES = [
    ("reliability.md", f"at most {writer.MAX_DELAY_S:g} s or {writer.MAX_BATCH} rows"),
    ("reliability.md", f"half to all of {backoff.FIRST_DELAY_S:g} s"),
    ("reliability.md", f"up to {backoff.LONGEST_DELAY_S:g} s"),
    ("reliability.md", f"{breaker.IDENTICAL_ERRORS_LIMIT} rows in a row"),
    ("reliability.md", f"scheduled in its last {NUM_STEPS} steps"),
    ("reliability.md", f"{trials.MAX_SOLO_ROWS} suspects or fewer run **solo**"),
    ("reliability.md", f"with which {trials.MAX_SOLO_DEATHS} engines died while it ran solo"),
    ("reliability.md", f"in flight at {trials.MAX_PRESENCES} deaths"),
    ("reliability.md", f"for {trials.COMPANY_WAIT_S:g} s. With one engine"),
    ("reliability.md", f"exit code 4 after {STALL_PATIENCE_S:g} s"),
    ("reliability.md", f"fails to start {MAX_FAILED_STARTS} times in a row"),
    ("reliability.md", f"without progress for {SHOWN_S:g} s is told"),
    ("reliability.md", f"After {ENDED_S:g} s the daemon ends itself"),
    ("reliability.md", f"output of such a job cannot be written {OUTPUT_TRIES} times"),
    ("gateway.md", f"After {FAILURES} calls in a row"),
    ("gateway.md", f"for {FIRST_EJECTION_S:g} s, then 2, 4 and so on up to {LONGEST_EJECTION_S:g}"),
    ("engines.md", f"--kv-cache-memory-bytes={vllm_command.CPU_KV_CACHE_BYTES}"),
    ("gateway.md", f"`--max-body-bytes` ({MAX_BODY_BYTES >> 20} MiB)"),
    ("pool.md", f"pieces of {CHUNK_BYTES} bytes"),
    (
        "scheduler.md",
        f"either bound {caller_margin.WANTED_LATE:.0%}".replace("%", " %") + " of calls are late",
    ),
    ("scheduler.md", f"told anything for {caller_margin.HEARD_S:g} s"),
    ("scheduler.md", f"the last {online_fit.SLOW_MEMORY_STEPS} steps of a kind"),
    ("scheduler.md", f"took over {100 * online_fit.FORGIVEN_SHARE:g} % longer"),
]


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages."""
    return [text for name, text in FENCE.findall(page.read_text()) if name in languages]


def table(name: str, header: str) -> dict[str, list[str]]:
    """First cell -> the other cells, over all tables of a page whose first column is `header`."""
    rows: dict[str, list[str]] = {}
    is_wanted = False
    for line in FENCE.sub("", (DOCS / name).read_text()).splitlines():
        if not line.startswith("|"):
            is_wanted = False
            continue
        first, *rest = [cell.strip() for cell in line.strip("|").split("|")]
        if is_wanted:
            rows[first.strip("`")] = rest
        is_wanted = is_wanted or first == header
    rows.pop("---", None)
    return rows


def yaml_blocks() -> list[object]:
    """Every YAML block, named by its page and number."""
    return [
        pytest.param(text, id=f"{page.name}-{number}")
        for page in PAGES
        for number, text in enumerate(blocks(page, "yaml"), start=1)
    ]


def keys_of(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str | None]]:
    """(dotted key, default as the manual writes it, or None when it is no plain value)."""
    for key, field in model.model_fields.items():
        default = None
        if field.is_required():
            default = "required"
        elif isinstance(field.default, float):
            default = f"{field.default:g}"
        elif isinstance(field.default, int | str):
            default = json.dumps(field.default).strip('"')
        if prefix + key not in SECTIONS:
            yield prefix + key, default


def local_links(page: Path) -> Iterator[tuple[Path, str]]:
    """(file, anchor) of each link of a page that stays within the project."""
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield (page.parent / path if path else page), anchor


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site and code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in words}


def test_the_command_page_shows_every_command_as_help_prints_it() -> None:
    _, marker, generated = cli_page.PAGE.read_text().partition(cli_page.MARKER)

    assert marker + generated == cli_page.render(), "run: .venv/bin/python tests/cli_page.py"


@pytest.mark.parametrize("words", [words for words, _ in cli_page.commands()], ids=" ".join)
def test_every_command_and_each_of_its_options_has_help(words: tuple[str, ...]) -> None:
    command = dict(cli_page.commands())[words]
    unexplained = [param.name for param in command.params if not getattr(param, "help", None)]

    assert command.help
    assert unexplained == []


@pytest.mark.parametrize(("model", "page", "prefix"), KEY_TABLES)
def test_every_key_is_in_the_manual_with_its_default(
    model: type[BaseModel], page: str, prefix: str
) -> None:
    rows = table(page, "Key")

    for key, default in keys_of(model, prefix):
        assert key in rows
        assert default in {None, rows[key][0].strip("`")}, key


@pytest.mark.parametrize("page", ["job-file.md", "configuration.md"])
def test_the_manual_names_no_key_that_is_not_there(page: str) -> None:
    sections = [(model, prefix) for model, where, prefix in KEY_TABLES if where == page]
    known = {key for model, prefix in sections for key, _ in keys_of(model, prefix)}

    assert table(page, "Key").keys() - known == set()


def test_every_environment_variable_is_in_the_manual() -> None:
    variables = {f"BATCHRUN_{name.upper()}" for name in Environment.model_fields}

    assert table("configuration.md", "Variable").keys() == variables


def test_every_output_column_is_in_the_manual() -> None:
    assert set(OUTPUT_COLUMNS) <= table("job-file.md", "Column").keys()


def test_every_job_state_and_the_drawing_of_the_moves_are_in_the_manual() -> None:
    page = (DOCS / "reliability.md").read_text()
    drawing = re.search(r"\n\n((?:    .*\n)+)", jobs.__doc__ or "")

    assert drawing is not None and drawing[1] in page
    assert [state for state in JobState if f"`{state}`" not in page] == []


def test_the_exit_codes_are_those_of_the_errors() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.__name__: kind.exit_code for kind in kinds if issubclass(kind, BatchrunError)}
    rows = table("cli.md", "Code")
    named = [(name, int(code)) for code, row in rows.items() for name in ERROR_NAME.findall(row[1])]

    assert sorted(named) == sorted(codes.items())
    assert {int(code) for code in rows} == {0, *codes.values(), INTERRUPTED}


@pytest.mark.parametrize(("page", "figure"), FIGURES)
def test_figures_in_the_manual_are_those_of_the_code(page: str, figure: str) -> None:
    assert figure in " ".join((DOCS / page).read_text().split())


@pytest.mark.parametrize("text", yaml_blocks())
def test_every_yaml_example_is_a_job_file_or_a_deployment_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    path.write_text(text)

    if "input" in YAML(typ="safe").load(text):
        load_job_file(path, cwd=tmp_path)
    else:
        load_strict(path, DeploymentFile, ConfigError)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_example_is_python(page: Path) -> None:
    for text in blocks(page, "python"):
        compile(text, page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in local_links(page):
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), f"{target}#{anchor}"


def test_every_module_stands_in_the_table_of_layers() -> None:
    page = (DOCS / "architecture.md").read_text()
    inside = [path for path in (ROOT / "batchrun").iterdir() if not path.name.startswith("__")]
    names = [path.name for path in inside if path.is_dir() or path.suffix == ".py"]

    assert [name for name in names if f"`batchrun/{name}`" not in page] == []


@pytest.mark.parametrize(("way", "most"), MAX_FILES_OF_WAYS.items())
def test_no_main_way_crosses_too_many_files(way: str, most: int) -> None:
    _, _, rest = (DOCS / "architecture.md").read_text().partition(f"\n## The way of {way}\n")
    files = SOURCE_PATH.findall(rest.partition("\n## ")[0])

    assert len(set(files)) == len(files)
    assert 0 < len(files) <= most


def test_every_path_on_the_architecture_page_exists() -> None:
    page = (DOCS / "architecture.md").read_text()

    assert [path for path in SOURCE_PATH.findall(page) if not (ROOT / path).exists()] == []


def test_every_benchmark_in_the_table_of_measurements_is_there() -> None:
    named = [name for cell in table("performance.md", "Module") for name in cell.split("`, `")]
    there = [ROOT / "benchmarks" / name for name in named]

    assert named
    assert [p.name for p in there if not (p.is_dir() or p.with_suffix(".py").exists())] == []


def test_the_readme_installs_first_and_then_shows_the_two_commands_of_a_clone() -> None:
    install, clone, *_ = blocks(ROOT / "README.md", "console", "sh", "text", "")
    first, second = (
        [line.split("#")[0].strip("$ ") for line in text.splitlines()] for text in (install, clone)
    )

    assert first[0] == "uv tool install batchrun" and "pip install batchrun" in install
    assert second == ["make demo", "make test"]


def test_no_help_text_is_cut() -> None:
    assert [words for words, _ in cli_page.commands() if "..." in _listed(words)] == []


def _listed(words: tuple[str, ...]) -> str:
    """What the help says of the commands of a group."""
    return cli_page.help_of(words).partition("\nCommands:\n")[2]


def test_the_readme_names_every_command() -> None:
    page = (ROOT / "README.md").read_text()
    names = [words[0] for words, _ in cli_page.commands() if len(words) == 1]

    assert [name for name in names if not re.search(rf"`(batchrun )?{name}\b", page)] == []


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(list(DOCS.glob("*.md"))) - 1
    assert [FOREIGN_ASSET.findall(page.read_text()) for page in pages] == [[]] * len(pages)
