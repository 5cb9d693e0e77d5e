"""Which store a home has: recorded once, kept to, and never named with its password."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from postgres_server import QUOTED_PASSWORD, PostgresServer

from batchrun.config import load_deployment
from batchrun.control.submitting import hand_over
from batchrun.errors import ConfigError
from batchrun.home import Home
from batchrun.keys import new_key
from batchrun.store import api_keys, files, jobs
from batchrun.store.api_keys import NewApiKey
from batchrun.store.database import name_of
from batchrun.store.files import NewFile
from batchrun.store.jobs import NewJob
from batchrun.store.place import open_for

JOB = NewJob("name", "{}", "{}", "hash", 3)


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    """A new store's URL."""
    return postgres.new_store()


def test_a_home_records_its_database_for_its_owner_alone(url: str, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()

    open_for(home, url).close()

    assert home.store_location == url
    assert home.store_url_file.stat().st_mode & 0o777 == 0o600
    open_for(home, url).close()


@pytest.mark.parametrize("is_file_first", [True, False])
def test_a_home_with_jobs_elsewhere_is_refused_and_unchanged(
    url: str, tmp_path: Path, *, is_file_first: bool
) -> None:
    home = Home(tmp_path)
    first = open_for(home, None if is_file_first else url)
    jobs.create(first, JOB, now_s=0.0)
    first.close()
    before = home.store_location

    with pytest.raises(ConfigError, match=r"and batchrun\.yaml has") as raised:
        open_for(home, url if is_file_first else None)

    assert home.store_location == before
    assert name_of(url) in str(raised.value)
    assert QUOTED_PASSWORD not in str(raised.value)


def test_a_home_whose_database_is_at_another_port_is_refused(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.store_url_file.write_text("postgresql://u:p@h/d\n")

    with pytest.raises(ConfigError, match=r"are in h/d, and batchrun\.yaml has `store` h:5433/d;"):
        open_for(home, "postgresql://u:p@h:5433/d")

    assert name_of("postgresql://h:5432/d") == "h/d"
    assert name_of("postgresql:///d?host=h&port=5433") == "h:5433/d"


@pytest.mark.parametrize("what", ["keys", "files"])
def test_a_home_whose_keys_or_files_are_in_its_own_store_is_refused_too(
    url: str, tmp_path: Path, what: str
) -> None:
    """Else nobody would be asked for a key any more, and no file would be listed."""
    home = Home(tmp_path)
    with closing(open_for(home, None)) as first:
        if what == "keys":
            api_keys.add(first, NewApiKey(new_key()[0], "ops", "admin", "0" * 64), now_s=1.0)
        else:
            files.add(first, NewFile("in", "batch", 1, "0" * 64, None), now_s=1.0)

    with pytest.raises(ConfigError, match=f"^the {what} of .*; leave it out, or use another"):
        open_for(home, url)

    assert home.recorded_store_url is None


def test_a_job_is_added_to_no_store_but_the_one_that_batchrun_yaml_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = Home(tmp_path / "home")
    home.create()
    with closing(open_for(home, None)) as first:
        jobs.create(first, JOB, now_s=0.0)
    Path("batchrun.yaml").write_text("store: postgresql://u:p@h/d\n")

    with pytest.raises(ConfigError, match=r"batchrun\.yaml has `store` h/d; leave it out"):
        hand_over(replace(JOB, id="job_other"), home)


def test_a_job_goes_into_the_database_that_a_home_without_jobs_has_got_since(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = Home(tmp_path / "home")
    home.create()
    open_for(home, None).close()
    Path("batchrun.yaml").write_text(f"store: '{url}'\n")

    assert hand_over(JOB, home) == (JOB.id, True)

    with closing(open_for(home, url)) as store:
        assert [record.id for record in jobs.list_jobs(store)] == [JOB.id]


@pytest.mark.parametrize(
    "text",
    [
        "mysql://u:secret@h/d",
        "postgresql://u:secret@h",
        "postgresql://u:se@cret@h/d",
        "postgresql://u:se/cret@h/d",
        "postgresql://u:se#cret@h/d",
        "17",
    ],
)
def test_what_is_no_url_is_one_line_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("batchrun.yaml").write_text(f"store: '{text}'\n")

    with pytest.raises(
        ConfigError, match=r"batchrun.yaml:1: store: must be postgresql://"
    ) as raised:
        load_deployment(None)

    assert "cret" not in str(raised.value)
