"""The rules of the house that import-linter and ruff do not hold: sizes, names, ways of the data.

A limit goes down with the figure; it may be raised by a change that adds a capability, with a
sentence that says what for.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "batchrun"

MAX_FILES = 276
"""89 more than the house had, for a capability each: images of rows (6), how long answers will be
(2), patience of every row, steps beside calls by pace, KV and price (4), routers with what all
gateway workers know (8), a planner that leaves room for chance, when a job's last rows end, the
page (7), Python and what it shares with commands (10), engine agents (10), orders of calls by
promise (2), calls that would be late (1), progress of engines, what requests may hold, logs,
figures for Prometheus (3), who hears of a job's end, uploads on the page, bounds of keys, silent
parts, decisions that are explained (12), what callers feel, fleets that Ray places (5), and
whose number follows the calls (3), an engine apart from the way to its agent, calls for
the daemon apart from those for engines, the peak of a trace (3), jobs that wait for cheap
hours, orders to the leader of a database (2), outputs of many files, calls that gateways of all
daemons count, and which numbers of engines a planner tries."""
MAX_LINES = 68_723
"""28,080 more for these, for groups by key portion and rows over engines by speed, several models,
a planner that sizes on several draws, bounds on what callers and engines send and hold, and
daemons that stand by, deployments that calls at once share, processes that watch their parents,
turns for images, places in a cache of data sets, what is cached of waiting calls, answers by class,
agents that have no engine, rows by the content that they were made from, renewed certificates,
fleets that follow their calls, how far back caches reach, settings that reach fleets in turn, plans
and copies of rows that are kept over restarts, jobs that wait for cheap hours, what workers learn
from each other, orders to the leader of a database, outputs of many files and as a stream, engines
of several kinds in a simulation, engines that all gateways know to be emptied, calls that gateways
of all daemons count, agents that drain, draws of a plan side by side, replicas whose GPUs are given
back last, fleets that a rolling restart renews and that nothing leaves behind, and kept values that
Python cannot hold, connections that are a reply behind, replicas of a database that lack
commits, blocks of several KV groups, images that stay whole, rows as they were given, kept
columns that are tried first, sites that call an API without keys, what stands still, files that no
store lists, inputs that are written to while they are read, jobs that meet on several engines,
answers that end outside the engine, what ran before a command, rows that come in another order or
elsewhere, images that do not fit beside each other, questions to another model, inputs that are
fetched again, batches that rest, kept columns whose types differ, what gateways see of odd streams,
signs of life of links and starts, engines that share no model, plans for the engines of a model,
what keys use at all gateways, how responses end, engines that halt, steps of slow cores, stray
quotes, rows that wait at an engine's door, choices of a row, hosts of images that hang, deadlines
of a thousand jobs, rows that leave sick engines, numbers of fleets in the store, what one model's
engines lack, replicas that cannot start, processes that fork, what steps take without rows in the
engine, ETAs of fleets that change, words that are written as numbers, errors in any coding, and how
little few calls tell of their rate, decodes that wait for prompts, values that columns change,
bodies in flight, pictures of many parts, rows that stand still in the engine, text that repeats
within a file, widths in templates, images beside their own rows, what batches store, what a call
takes beside its step, what is measured of slow engines, rows whose answers may find no room, a
job's last rows, and short steps beside long answers."""
MAX_SHORT_FILES = 25
SHORT_LINES = 80
LONGEST_LINES = 500
MAX_FILES_IN_FOLDER = 16
"""One more: what batchrun.yaml says of an engine has outgrown the file of the others."""
MAX_BENCHMARK_LINES = 19_073
"""10,883 more: rows of videos, real traffic and many jobs as scenarios, rows whose answers nobody
knows, the price of rows, reserves, evictions, buckets, a real trace beside jobs, routers and what a
decision costs, orders of calls, rows over engines, the page and Python; parts that hang, 118 odd
engines and 51 callers in bad faith, two tenants, the demo beside vLLM's own order, a search for the
best order of calls, calls of AccelGen and LARRY, memory and threads that run out; routers of others
before the same engines; classes of calls on real engines; a fleet that follows a day; several
gateways and workers, routers in the simulator and beside a job, what routers foretell of caches;
kills in a fleet of real engines beside calls; a job of 20 million rows, one of a million long ones;
a plan of 64 engines; routers beside a job under other settings of the scheduler, ports that no
two tests get, callers that wait for no core, and bars for what a user has."""
MAX_MANUAL_WORDS = 47_948
"""17,043 more: what rows may cost calls, which engine a call goes to, Python, the page, engines on
other machines, orders of calls, rows over engines, time limits, limits of keys, attacks and their
tests, uploads, `on_done`, why a call went where it went, fleets and how to deploy,
what callers feel, calls that would be late, AccelGen's and LARRY's figures, fleets
that follow the tide, gateways that pass on, tables of routers behind several gateways and beside
those of others, a job of 20 million rows, jobs that wait, outputs of many files, engines of several
kinds in a simulation, routing beside a job by the dial, figures of a second
machine, days of the tide, an upgrade of several daemons, what would leave replicas behind, what
containers and units need, replicas of a database that
lack commits, what stands still, what a backup that is put back does not list, two hours of a
trace beside jobs, calls that pass rows at an engine's door, what waiting jobs continue, which
model rows get that name none, bodies in flight, what a key's batches store, ten seeds of each
scenario, cold and warm, predictions as a user has them, slow engines, the dial, and short
steps beside long answers."""
README_FIRST_SCREEN_LINES = 60
MAX_FILES_ON_WAY = {"row": 40, "call": 10, "step": 22, "batch": 24}

SHARED_FILE_NAMES = frozenset(
    {"app", "batches", "client", "engine", "errors", "files", "jobs", "keys", "objects", "results"}
    | {"process", "status", "view"}
)
"""One noun in several rooms: kept by the store, shown by the API, printed by a command."""
SHARED_CLASS_NAMES: frozenset[str] = frozenset()


def modules() -> dict[Path, str]:
    """All modules of the package, with their text."""
    return {path: path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def is_ordinary(path: Path) -> bool:
    """Whether a module is neither a folder's face nor a program's door."""
    return not path.name.startswith("__")


def num_lines(text: str) -> int:
    return text.count("\n")


def test_the_package_has_few_files_and_lines() -> None:
    found = modules()

    assert len(found) <= MAX_FILES
    assert sum(map(num_lines, found.values())) <= MAX_LINES


def test_few_files_are_short_and_none_is_long() -> None:
    sizes = {str(path.relative_to(ROOT)): num_lines(text) for path, text in modules().items()}
    short = [name for name, size in sizes.items() if size < SHORT_LINES]

    assert len([name for name in short if is_ordinary(Path(name))]) <= MAX_SHORT_FILES
    assert [name for name, size in sizes.items() if size > LONGEST_LINES] == []


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    folders = Counter(path.parent for path in modules())

    assert [str(each) for each, num in folders.items() if num > MAX_FILES_IN_FOLDER] == []


def test_the_benchmarks_stay_small() -> None:
    texts = [path.read_text("utf-8") for path in (ROOT / "benchmarks").rglob("*.py")]

    assert sum(map(num_lines, texts)) <= MAX_BENCHMARK_LINES


def test_the_manual_stays_short() -> None:
    """All pages, those that commands make included; a number in a table is no word."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    words = [word for page in pages for word in re.split(r"[\s|]+", page.read_text("utf-8"))]

    assert len([word for word in words if re.search("[A-Za-z]", word)]) <= MAX_MANUAL_WORDS


def test_the_readme_says_what_it_is_in_one_screen() -> None:
    first = (ROOT / "README.md").read_text("utf-8").split("\n## ")[0]

    assert "make demo" in first and "Three promises" in first
    assert num_lines(first) <= README_FIRST_SCREEN_LINES


def test_a_file_name_means_one_thing() -> None:
    names = Counter(path.stem for path in modules() if is_ordinary(path))

    assert {name for name, num in names.items() if num > 1} - SHARED_FILE_NAMES == set()


def test_a_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for path, text in modules().items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))

    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert {name: twice[name] for name in twice.keys() - SHARED_CLASS_NAMES} == {}


@pytest.mark.parametrize(("way", "most"), MAX_FILES_ON_WAY.items())
def test_a_way_crosses_few_files_and_each_is_there(way: str, most: int) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    heading = re.search(rf"^#+ The way of an? (?:\w+ )*{way}\b.*$", page, re.MULTILINE)
    assert heading is not None
    section = re.split(r"^#", page[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    files = set(re.findall(r"`(batchrun/[\w/]+\.py)`", section))

    assert 5 <= len(files) <= most
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_every_file_that_the_architecture_names_is_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    named = set(re.findall(r"`(batchrun/[\w/]+(?:\.py)?)`", page))

    assert [name for name in named if not (ROOT / name).exists()] == []
