"""Who holds the store's lock, asked without touching it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchrun.errors import StoreLockedError
from batchrun.files import StoreLock


def test_a_held_lock_names_its_holder(tmp_path: Path) -> None:
    with StoreLock(tmp_path / "store.lock"):
        assert StoreLock(tmp_path / "store.lock").find_holder() == os.getpid()


def test_a_free_lock_has_no_holder_and_looking_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store.lock"
    assert StoreLock(path).find_holder() is None
    assert not path.exists()

    with StoreLock(path):
        pass
    path.write_text("4711")

    assert StoreLock(path).find_holder() is None
    assert path.read_text() == "4711"


def test_a_lock_holds_though_its_file_is_deleted(tmp_path: Path) -> None:
    path = tmp_path / "store.lock"
    with StoreLock(path):
        path.unlink()
        assert StoreLock(path).find_holder() == os.getpid()
        with pytest.raises(StoreLockedError):
            StoreLock(path).acquire()
        assert path.read_text() == ""
        assert StoreLock(path).find_holder() == os.getpid()
    with StoreLock(path):
        pass
