"""Engines as processes: adoption, death, restart, and the line a user gets when a start fails."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from conftest import FakeEngineFactory
from engine_builders import (
    fake_settings,
    make_request,
    script_option,
    with_program,
)

from batchrun.engine.command import AttachedSettings, ManagedSettings
from batchrun.engine.engine import AttachedEngine, Engine, ManagedEngine
from batchrun.engine.process import ProcessRecord, find_family, is_alive, read_record
from batchrun.errors import EngineError
from batchrun.files import write_atomically
from batchrun.types import EnginePhase, OutcomeKind
from benchmarks.deployment import free_port


@asynccontextmanager
async def watched(engine: Engine) -> AsyncIterator[None]:
    """The engine started and watched; stopped at the end."""
    await engine.start()
    watch = asyncio.create_task(engine.watch())
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.wait([watch])
        await engine.stop()


async def wait_for(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds; the test's own time limit bounds the wait."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.02)


def record_of(settings: ManagedSettings) -> ProcessRecord:
    """The record of the engine that runs now."""
    record = read_record(settings.record_path)
    assert record is not None
    return record


def spoil(option: str) -> None:
    """Make a script of faults unreadable, so that the fake does not start again."""
    Path(option.removeprefix("--script=")).write_text("not a script")


async def test_a_started_engine_answers_and_a_stopped_one_is_gone(tmp_path: Path) -> None:
    settings = fake_settings(tmp_path)
    engine = ManagedEngine(settings)
    await engine.start()
    record = record_of(settings)
    assert (engine.state, engine.stage) == (EnginePhase.READY, "ready")
    assert (await engine.client.execute(make_request())).kind is OutcomeKind.OK
    await engine.stop()
    assert engine.state is EnginePhase.STOPPED
    assert not is_alive(record)
    assert not settings.record_path.exists()


async def test_a_second_daemon_adopts_the_same_process(fake_engine: FakeEngineFactory) -> None:
    settings = await fake_engine()
    before = record_of(settings)
    again = ManagedEngine(settings)
    await again.start()
    assert again.state is EnginePhase.READY
    assert record_of(settings) == before
    await again.client.close()


async def test_other_arguments_end_the_old_engine_and_start_a_new_one(tmp_path: Path) -> None:
    settings = fake_settings(tmp_path)
    assert settings.command is not None
    first = ManagedEngine(settings)
    await first.start()
    old = record_of(settings)
    second = ManagedEngine(replace(settings, command=(*settings.command, "--model=m2")))
    await second.start()
    assert await second.client.models() == ("m2",)
    assert not is_alive(old)
    await first.client.close()
    await second.stop()


async def test_the_engine_outlives_a_starter_that_is_killed(tmp_path: Path) -> None:
    settings = fake_settings(tmp_path)
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from batchrun.engine.process import spawn\n"
        "spawn(sys.argv[3:], env=dict(os.environ), log_path=Path(sys.argv[1]),"
        " record_path=Path(sys.argv[2]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    paths = [str(settings.log_path), str(settings.record_path)]
    argv = [sys.executable, "-c", program, *paths, *(settings.command or ())]
    starter = await asyncio.to_thread(subprocess.run, argv, check=False)
    assert starter.returncode == -signal.SIGKILL
    before = record_of(settings)
    engine = ManagedEngine(settings)
    await engine.start()
    assert record_of(settings) == before
    await engine.stop()


async def test_stop_ends_children_that_a_killed_engine_left(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('child started', flush=True)\n"
        "time.sleep(600)\n"
    )
    settings = with_program(fake_settings(tmp_path), program)
    engine = ManagedEngine(settings)
    starting = asyncio.create_task(engine.start())
    await wait_for(
        lambda: (
            settings.record_path.exists()
            and settings.log_path.exists()
            and "child" in settings.log_path.read_text()
        )
    )
    starting.cancel()
    await asyncio.wait([starting])
    record = record_of(settings)
    os.kill(record.pid, signal.SIGKILL)
    await wait_for(lambda: not is_alive(record))
    assert len(find_family(record)) == 1
    await engine.stop()
    assert find_family(record) == []


async def test_a_start_cut_off_before_its_pid_was_noted_leaves_nothing(tmp_path: Path) -> None:
    settings = fake_settings(tmp_path)
    first = ManagedEngine(settings)
    await first.start()
    started = record_of(settings)
    unfinished = replace(started, pid=0)
    write_atomically(settings.record_path, json.dumps(asdict(unfinished)).encode())
    second = ManagedEngine(settings)
    await second.start()
    assert not is_alive(started)
    assert record_of(settings).pid not in {0, started.pid}
    await first.client.close()
    await second.stop()


async def test_a_reused_pid_is_not_taken_for_the_engine(fake_engine: FakeEngineFactory) -> None:
    record = record_of(await fake_engine())
    assert is_alive(record)
    assert not is_alive(replace(record, nonce="another"))
    assert not is_alive(replace(record, pid=os.getpid()))


async def test_a_clock_that_is_stepped_takes_no_engine_for_another(
    fake_engine: FakeEngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_of(await fake_engine())
    booted_s = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted_s + 60)
    assert is_alive(record)


async def test_record_and_log_are_for_the_owner_only(fake_engine: FakeEngineFactory) -> None:
    settings = await fake_engine()
    for path in (settings.record_path, settings.log_path):
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"pid": "x"}', "\x00"])
async def test_a_damaged_record_is_no_record(tmp_path: Path, content: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(content)
    assert read_record(path) is None


async def test_a_killed_engine_is_started_again(tmp_path: Path) -> None:
    settings = fake_settings(tmp_path)
    engine = ManagedEngine(settings)
    async with watched(engine):
        before = record_of(settings)
        os.kill(before.pid, signal.SIGKILL)
        await wait_for(lambda: engine.state is EnginePhase.RESTARTING)
        await wait_for(lambda: engine.state is EnginePhase.READY)
        assert record_of(settings).pid != before.pid
        assert (await engine.client.execute(make_request())).kind is OutcomeKind.OK


@pytest.mark.parametrize("num_kills", [1, 2])
async def test_an_engine_that_is_killed_at_its_first_start_is_started_once_more(
    tmp_path: Path, num_kills: int
) -> None:
    settings = fake_settings(tmp_path)
    assert settings.command is not None
    killed = " ".join(
        f"[ -e killed{n} ] || {{ touch killed{n}; kill -9 $$; }};" for n in range(num_kills)
    )
    script = f"cd {tmp_path}; {killed} exec {shlex.join(settings.command)}"
    engine = ManagedEngine(replace(settings, command=("sh", "-c", script)))
    if num_kills == 1:
        await engine.start()
        assert engine.state is EnginePhase.READY
    else:
        with pytest.raises(EngineError, match="ended while starting the process"):
            await engine.start()
        assert engine.state is EnginePhase.FAILED
    await engine.stop()


async def test_an_engine_whose_first_start_fails_stays_failed_until_it_begins_anew(
    tmp_path: Path,
) -> None:
    settings = fake_settings(tmp_path)
    engine = ManagedEngine(with_program(settings, "raise ValueError('torn')"))
    with pytest.raises(EngineError, match="torn"):
        await engine.start()
    told = engine.state, engine.stage
    watch = asyncio.create_task(engine.watch())
    await asyncio.wait([watch], timeout=1.0)
    assert (engine.state, engine.stage) == told

    engine.begin_anew(settings)
    await wait_for(lambda: engine.state is EnginePhase.READY)
    watch.cancel()
    await asyncio.wait([watch])
    await engine.stop()


async def test_a_row_that_killed_the_engine_is_lost_and_may_be_tried_again(tmp_path: Path) -> None:
    rule: dict[str, object] = {"match": {"row": 3}, "action": {"die": True}, "times": 1}
    settings = fake_settings(tmp_path, script_option(tmp_path, rule))
    engine = ManagedEngine(settings)
    async with watched(engine):
        before = record_of(settings)
        assert (await engine.client.execute(make_request(row=3))).kind is OutcomeKind.RETRY
        await wait_for(lambda: read_record(settings.record_path) not in {before, None})
        await wait_for(lambda: engine.state is EnginePhase.READY)
        assert (await engine.client.execute(make_request(row=3))).kind is OutcomeKind.OK


async def test_an_engine_that_keeps_failing_to_start_is_given_up(tmp_path: Path) -> None:
    option = script_option(tmp_path)
    settings = fake_settings(tmp_path, option, max_failed_starts=2)
    engine = ManagedEngine(settings)
    async with watched(engine):
        spoil(option)
        os.kill(record_of(settings).pid, signal.SIGKILL)
        await wait_for(lambda: engine.state is EnginePhase.FAILED)
        assert "2 starts failed in a row" in engine.stage
        assert "script.json" in engine.stage


@pytest.mark.nightly
async def test_an_engine_that_lives_without_answering_is_unreachable(tmp_path: Path) -> None:
    settings = fake_settings(tmp_path)
    engine = ManagedEngine(settings)
    async with watched(engine):
        os.kill(record_of(settings).pid, signal.SIGSTOP)
        await wait_for(lambda: engine.state is EnginePhase.UNREACHABLE)
        os.kill(record_of(settings).pid, signal.SIGCONT)
        await wait_for(lambda: engine.state is EnginePhase.READY)


@pytest.mark.nightly
async def test_an_engine_that_hangs_for_too_long_is_started_again(tmp_path: Path) -> None:
    settings = fake_settings(tmp_path, unresponsive_restart_s=0.5)
    engine = ManagedEngine(settings)
    async with watched(engine):
        before = record_of(settings)
        os.kill(before.pid, signal.SIGSTOP)
        await wait_for(lambda: read_record(settings.record_path) not in {before, None})
        await wait_for(lambda: engine.state is EnginePhase.READY)
        assert not is_alive(before)


async def test_an_attached_engine_is_followed_but_never_ended(
    fake_engine: FakeEngineFactory,
) -> None:
    settings = await fake_engine()
    attached = AttachedEngine(
        AttachedSettings(name="far", url=settings.base_url, check_interval_s=0.05)
    )
    async with watched(attached):
        assert attached.state is EnginePhase.READY
        started = attached.started
        os.kill(record_of(settings).pid, signal.SIGSTOP)
        await wait_for(lambda: attached.state is EnginePhase.UNREACHABLE)
        os.kill(record_of(settings).pid, signal.SIGCONT)
        await wait_for(lambda: attached.state is EnginePhase.READY)
        assert attached.started == started
    assert is_alive(record_of(settings))


async def test_an_attached_engine_that_was_started_anew_is_known_by_its_metrics(
    fake_engine: FakeEngineFactory,
) -> None:
    settings = await fake_engine()
    attached = AttachedEngine(
        AttachedSettings(name="far", url=settings.base_url, check_interval_s=0.05)
    )
    async with watched(attached):
        started = attached.started
        os.kill(record_of(settings).pid, signal.SIGKILL)
        await wait_for(lambda: attached.state is EnginePhase.UNREACHABLE)
        again = ManagedEngine(settings)
        await again.start()
        await wait_for(lambda: attached.state is EnginePhase.READY)
        assert attached.started != started
        await again.stop()


async def test_an_attached_engine_that_is_not_there_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    engine = AttachedEngine(AttachedSettings(name="far", url=url, start_timeout_s=0.1))
    with pytest.raises(EngineError, match=f"engine far: nothing answers at {url}/health"):
        await engine.start()
    await engine.stop()


@pytest.mark.engine
async def test_the_real_engine_is_adopted_without_a_reload(vllm_engine: ManagedSettings) -> None:
    before = record_of(vllm_engine)
    engine = ManagedEngine(vllm_engine)
    await engine.start()
    assert record_of(vllm_engine) == before
    await engine.client.close()


@pytest.mark.engine
@pytest.mark.nightly
async def test_the_real_engine_comes_back_after_kill_9(vllm_engine: ManagedSettings) -> None:
    engine = ManagedEngine(vllm_engine)
    await engine.start()
    before = record_of(vllm_engine)
    watch = asyncio.create_task(engine.watch())
    assert len(find_family(before)) > 1
    os.kill(before.pid, signal.SIGKILL)
    await wait_for(lambda: engine.state is EnginePhase.RESTARTING)
    await wait_for(lambda: engine.state is EnginePhase.READY)
    watch.cancel()
    await asyncio.wait([watch])
    await engine.client.close()
    assert find_family(before) == []
