"""The power goes at every moment of every way by which something becomes durable: what was
acknowledged is there when it comes back, whatever part of what was not synced is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import file_calls
import pytest
from durable_paths import WAYS, DurableWay
from file_calls import FileCall
from lost_power import Disk, crashes, read_tree, walks, write_tree

PROGRAM = Path(__file__).parents[1] / "call_faults.py"
KINDS = {way.name: way for way in WAYS}
NUM_QUICK = 4
pytestmark = pytest.mark.skipif(not file_calls.HAS_COMPILER, reason="there is no C compiler")
Recorded = dict[str, tuple[Path, list[FileCall]]]


def is_rebuilt(place: str) -> bool:
    """SQLite makes it anew when it finds nobody who uses it."""
    return place.endswith("-shm")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Each way with its folder, as it is after the walk, and all calls from the first on."""
    folder = tmp_path_factory.mktemp("power")
    library, root, log = file_calls.build(folder), folder / "work", folder / "calls.log"
    subprocess.run(
        [sys.executable, str(PROGRAM), "record", str(root)],
        env=file_calls.environment(library, root=root, log=log),
        check=True,
    )
    return {name: (root / name, calls) for name, calls in walks(file_calls.read_calls(log))}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_recorded_is_all_that_was_done(recorded: Recorded, name: str) -> None:
    root, calls = recorded[name]
    disk = Disk(str(root))
    for call in calls:
        if call.what != "mark":
            disk.apply(call)

    found = {place: what.content for place, what in disk.tree().items() if not is_rebuilt(place)}
    assert found == read_tree(root, is_left_out=is_rebuilt)


@pytest.mark.parametrize("name", KINDS)
def test_a_few_losses_of_power_lose_nothing(recorded: Recorded, tmp_path: Path, name: str) -> None:
    root, calls = recorded[name]
    check_crashes(KINDS[name], root, calls, num_checked=NUM_QUICK)


@pytest.mark.nightly
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("name", KINDS)
def test_no_loss_of_power_loses_anything(recorded: Recorded, name: str) -> None:
    root, calls = recorded[name]
    assert check_crashes(KINDS[name], root, calls) > 100


def check_crashes(
    kind: type[DurableWay], root: Path, calls: Sequence[FileCall], *, num_checked: int | None = None
) -> int:
    """Check so many of what losses of power leave, spread over the way, or all; how many."""
    found = list(crashes(str(root), calls, Random(0)))
    wanted = found if num_checked is None else Random(1).sample(found, num_checked)
    kept = root.with_name(f"{root.name}.kept")
    root.rename(kept)
    try:
        for when, tree, said in wanted:
            write_tree(root, tree, is_left_out=is_rebuilt)
            way = kind(root)
            try:
                way.check(said)
                again = list(said)
                way.walk(again.append)
                way.close()
                way.check(again)
            except Exception as error:
                raise AssertionError(f"{kind.name}, {when}, acknowledged {said}") from error
            finally:
                way.close()
    finally:
        write_tree(root, {}, is_left_out=is_rebuilt)
        root.rmdir()
        kept.rename(root)
    return len(wanted)
