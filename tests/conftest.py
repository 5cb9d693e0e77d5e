"""Fixtures that several test folders share: the tiny model, the real engine, fake engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from deployment_rig import DeploymentRig
from engine_builders import (
    fake_settings,
    real_settings,
    script_option,
    start_and_let_go,
    stop,
)

from batchrun.engine import ManagedEngine, ManagedSettings
from batchrun.engine.tiny_model import build_tiny_model

FakeEngineFactory = Callable[..., Awaitable[ManagedSettings]]


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


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DeploymentRig]:
    """A deployment in a folder of its own; the test chooses its engine."""
    made = DeploymentRig(tmp_path)
    yield made
    made.close()
