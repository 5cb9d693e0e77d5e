"""An engine that does not start gives the user one line that names the cause."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from engine_builders import fake_settings, with_program

from batchrun.engine.command import ManagedSettings
from batchrun.engine.engine import ManagedEngine
from batchrun.errors import EngineError
from batchrun.types import EnginePhase


async def start_error(settings: ManagedSettings) -> str:
    """The one line that a failing start gives."""
    engine = ManagedEngine(settings)
    with pytest.raises(EngineError) as caught:
        await engine.start()
    assert engine.state is EnginePhase.FAILED
    await engine.stop()
    line = str(caught.value)
    assert "\n" not in line
    return line


def runs(process: psutil.Process, program: str) -> bool:
    """Whether this is a living process of the program: a killed one may not be reaped yet."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and program in process.cmdline()
    except psutil.NoSuchProcess:
        return False


async def test_death_at_start_gives_the_logs_last_useful_line(tmp_path: Path) -> None:
    program = "import sys; print('loading'); raise ValueError('the weights are torn')"
    settings = with_program(fake_settings(tmp_path), program)
    line = await start_error(settings)
    assert "ValueError: the weights are torn" in line
    assert str(settings.log_path) in line


async def test_running_out_of_memory_at_start_is_said_plainly(tmp_path: Path) -> None:
    program = "raise MemoryError('CUDA out of memory. Tried to allocate 9 GiB')"
    line = await start_error(with_program(fake_settings(tmp_path), program))
    assert "ran out of memory" in line
    assert "smaller model" in line


async def test_an_engine_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    program = "import time; time.sleep(600)"
    settings = with_program(fake_settings(tmp_path, start_timeout_s=0.3), program)
    line = await start_error(settings)
    assert re.search(r"was not ready after \d+ s", line)
    assert not [child for child in psutil.Process().children() if runs(child, program)]


@pytest.mark.parametrize(
    "shows", ["print('downloading', end='\\r', flush=True)", "null.write(bytes(1 << 20))"]
)
async def test_an_engine_that_writes_of_its_start_or_fetches_something_has_longer_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shows: str
) -> None:
    monkeypatch.setattr("batchrun.engine.engine.LONGEST_START", 4)
    program = f"import time\nnull = open('/dev/null', 'wb')\nwhile True: time.sleep(0.1); {shows}"
    settings = with_program(fake_settings(tmp_path, start_timeout_s=1.0), program)
    line = await start_error(settings)
    found = re.search(r"was not ready after (\d+) s", line)
    assert found is not None and int(found[1]) >= 4


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    settings = fake_settings(tmp_path)
    with socket.create_server(("127.0.0.1", settings.port)):
        assert f"port {settings.port} on 127.0.0.1" in await start_error(settings)


async def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    settings = replace(fake_settings(tmp_path), command=("/no/such/engine",))
    assert "/no/such/engine cannot be started" in await start_error(settings)
