"""Fixtures that several test folders share: the tiny model, the real engine, fake engines."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from batch_rig import KIND_PARAMS, MODEL, Caller, connect, engine_rules
from deployment_rig import DeploymentRig
from engine_builders import (
    fake_settings,
    real_settings,
    script_option,
    start_and_let_go,
    stop,
)
from hypothesis import HealthCheck, settings
from postgres_server import PostgresServer
from raw_http import RawHttp
from reaper import begin_run
from xdist.scheduler import LoadScopeScheduling

from batchrun.engine.command import ManagedSettings
from batchrun.engine.engine import ManagedEngine
from batchrun.engine.tiny_model import build_tiny_model
from batchrun.store.database import Store, open_store

if TYPE_CHECKING:
    from object_store import ObjectStore

DEPLOYMENT_FOLDERS = frozenset({"browser", "conformance", "contract", "integration"})
FakeEngineFactory = Callable[..., Awaitable[ManagedSettings]]


# How long an example takes is no reason to fail.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--store=postgresql` runs every deployment of the tests on PostgreSQL."""
    parser.addoption("--store", choices=["sqlite", "postgresql"], default="sqlite")


def pytest_configure(config: pytest.Config) -> None:
    """What this run starts ends with it, also where the run is killed."""
    if not hasattr(config, "workerinput"):
        config.add_cleanup(begin_run())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is about the SQLite file where deployments have none."""
    if config.getoption("--store") == "postgresql":
        for item in items:
            if item.get_closest_marker("sqlite_file"):
                item.add_marker(pytest.mark.skip(reason="is about the SQLite file itself"))


class Queues(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Of several test processes, one runs all tests that start vLLM; files that start other
    deployments go to one process each, and all other tests anywhere."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0]
        if not DEPLOYMENT_FOLDERS & set(path.split("/")):
            return nodeid
        return "vllm" if starts_vllm(path) else path


@cache
def starts_vllm(path: str) -> bool:
    """Whether a test file has the marker `engine`."""
    return "pytest.mark.engine" in (Path(__file__).parents[1] / path).read_text("utf-8")


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Queues:
    """Called with `--numprocesses`."""
    return Queues(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Collect no garbage while a failure's source is parsed.

    A collected object that warns has its traceback parsed too, and a parser within a parser ends
    CPython 3.11.7, and so the whole run, with a SystemError
    (https://github.com/python/cpython/issues/106905).
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight model that the real engine can serve."""
    path = tmp_path_factory.mktemp("tiny") / "model"
    build_tiny_model(path)
    return path


@pytest.fixture(scope="session")
def vllm_engine(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ManagedSettings]:
    """One real vLLM on the CPU for the whole session; its address is `.base_url`.

    Tests and fixtures that ask for it carry the marker `engine`. Not for async fixtures.
    """
    settings = real_settings(tmp_path_factory.mktemp("vllm"), tiny_model)
    start_and_let_go(settings)
    yield settings
    stop(settings)


@pytest.fixture(scope="session")
def shared_fake_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedSettings]:
    """One fake engine without faults for the whole session; its address is `.base_url`."""
    settings = fake_settings(tmp_path_factory.mktemp("fake"), "--tokens-per-s=2000")
    start_and_let_go(settings)
    yield settings
    stop(settings)


@pytest_asyncio.fixture
async def fake_engine(tmp_path: Path) -> AsyncIterator[FakeEngineFactory]:
    """A factory: `await fake_engine("--latency-s=1", rules=[...])` starts a fake engine.

    Returns its settings; all are ended after the test.
    """
    started: list[ManagedEngine] = []

    async def make(*options: str, rules: tuple[dict[str, object], ...] = ()) -> ManagedSettings:
        folder = tmp_path / f"fake-{len(started)}"
        folder.mkdir()
        script = (script_option(folder, *rules),) if rules else ()
        engine = ManagedEngine(fake_settings(folder, *script, *options))
        started.append(engine)
        await engine.start()
        return engine.settings

    yield make
    for engine in started:
        await engine.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One PostgreSQL server for the whole session."""
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def store_location(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """Where a new store is or can be made: a path, and the URL of a database."""
    if request.param == "sqlite":
        return tmp_path / "store.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_store()


@pytest.fixture
def store(store_location: str | Path) -> Iterator[Store]:
    """A store without jobs, on SQLite and on PostgreSQL."""
    opened = open_store(store_location)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def bucket() -> Iterator[ObjectStore]:
    """An S3 server that this process and its children find, for the tests of one file."""
    from object_store import object_store_in_environment

    with pytest.MonkeyPatch.context() as patch, object_store_in_environment(patch) as made:
        yield made


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[DeploymentRig]:
    """A deployment in a folder of its own; the test chooses its engine."""
    made = DeploymentRig(tmp_path)
    if request.config.getoption("--store") == "postgresql":
        made.store_url = request.getfixturevalue("postgres").new_database()
    yield made
    made.close()


@pytest.fixture(scope="session")
def batch_rig(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[DeploymentRig]:
    """One deployment of a fake engine for all tests of the API; words in a prompt are its faults.

    Who holds or kills a part of it brings it back.
    """
    made = DeploymentRig(tmp_path_factory.mktemp("batches"))
    if request.config.getoption("--store") == "postgresql":
        made.store_url = request.getfixturevalue("postgres").new_database()
    made.use_fake_engine(f"--model={MODEL}", rules=engine_rules())
    made.ask("up", "-d")
    yield made
    made.close()


@pytest.fixture(params=KIND_PARAMS)
def caller(batch_rig: DeploymentRig, request: pytest.FixtureRequest) -> Iterator[Caller]:
    """A caller of that deployment, with the sync client and with the async one."""
    with connect(batch_rig.port, request.param) as made:
        yield made


@pytest.fixture
def raw(batch_rig: DeploymentRig) -> RawHttp:
    """Plain HTTP to that deployment."""
    return RawHttp(batch_rig.port)
