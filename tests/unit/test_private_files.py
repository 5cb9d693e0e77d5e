"""What the home holds of callers is its owner's alone, whatever umask and the home's own mode."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from durable_paths import BatchEnd, Export, Upload

OTHERS = 0o077


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def is_open_to_others(path: Path) -> bool:
    return bool(path.stat().st_mode & OTHERS)


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("kind", [Upload, BatchEnd])
def test_what_callers_sent_and_got_is_its_owner_s_alone(
    tmp_path: Path, kind: type[Upload | BatchEnd]
) -> None:
    way = kind(tmp_path)
    way.home.path.mkdir(mode=0o755)
    way.prepare()
    for path in way.home.files.iterdir():
        path.chmod(0o600)
    way.walk(lambda _: None)

    made = [path for path in way.home.path.rglob("*") if path != way.home.path]
    assert [str(path) for path in made if is_open_to_others(path)] == []
    assert {"store.db", "store.db-wal"} <= {path.name for path in made}
    assert list(way.home.files.iterdir())
    way.close()


@pytest.mark.usefixtures("open_umask")
def test_an_output_has_the_mode_of_its_owner_s_umask(tmp_path: Path) -> None:
    way = Export(tmp_path)
    way.prepare()
    way.walk(lambda _: None)
    way.close()

    assert way.output.stat().st_mode & 0o777 == 0o644
