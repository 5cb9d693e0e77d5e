"""`python -m batchrun.server.gateway --listen 127.0.0.1:8000 --upstreams FILE [--workers N]`.

Several workers on one port: processes that share it through SO_REUSEPORT.

A worker's standard input is a pipe of the supervisor: when it closes, the worker drains and ends,
so no worker outlives a supervisor that was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import uvloop

from batchrun.errors import BatchrunError, ConfigError
from batchrun.files import short_path, waited_for_core_s
from batchrun.keys import is_loopback
from batchrun.server.gateway.admission import read_keys
from batchrun.server.gateway.app import (
    MAX_BODY_BYTES,
    MAX_HELD_BYTES,
    GatewaySettings,
    parse_listen,
)
from batchrun.server.gateway.daemon_calls import DAEMON_HEAD_S
from batchrun.server.gateway.http import bind, serve
from batchrun.server.gateway.shared_book import create
from batchrun.server.gateway.tally import ENDED, STUCK, Tally, create_tally

log = logging.getLogger(__name__)

RESTART_S = 1.0
KILL_AFTER_S = 5.0
START_S = 60.0
"""One that has not begun to listen by then hangs."""
BEAT_S = 1.0
BEAT_WAIT_S = 2.0
MAX_MISSED = 2
"""A worker that says nothing for so many waits is stuck."""
STARVED_SHARE = 0.25
"""One that waited for a core for so much of that is late, on a machine that is short of CPU."""


async def supervise(
    argv: Sequence[str],
    settings: GatewaySettings,
    *,
    answer_at: Path | None,
    stop: asyncio.Event,
    on_ready: Callable[[], None],
) -> None:
    """Keep `num_workers` workers running until `stop` is set, then end them gently.

    They have the arguments `argv`, and share `settings.port`, which must not be 0. Whoever connects
    to the socket at `answer_at` is told meanwhile that this process lives.
    """
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    listen = f"--listen={host}:{settings.port}"
    num_workers = settings.num_workers
    answering = None if answer_at is None else await _answer_at(answer_at)
    fds = (create(num_workers), create_tally(num_workers))
    tally = Tally(fds[1], num_workers, num_workers)
    shared = (listen, f"--book-fd={fds[0]}", f"--tally-fd={fds[1]}")
    command = [sys.executable, "-P", "-m", "batchrun.server.gateway", *argv, *shared]
    ready = [asyncio.Event() for _ in range(num_workers)]
    keepers = [
        asyncio.create_task(
            _keep_one(
                [*command, f"--worker={number}"],
                settings.drain_s,
                fds=fds,
                tally=tally,
                stop=stop,
                ready=event,
            )
        )
        for number, event in enumerate(ready)
    ]
    announcing = asyncio.create_task(_announce(ready, on_ready))
    await stop.wait()
    announcing.cancel()
    await asyncio.gather(*keepers)
    if answering is not None:
        answering.close()


async def _answer_at(path: Path) -> asyncio.Server:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError):
            await reader.readline()
            writer.write(b"ok\n")
        writer.close()

    await asyncio.to_thread(path.unlink, missing_ok=True)
    with short_path(path) as short:
        return await asyncio.start_unix_server(answer, short)


async def _announce(ready: Sequence[asyncio.Event], on_ready: Callable[[], None]) -> None:
    for event in ready:
        await event.wait()
    on_ready()


async def _keep_one(
    command: Sequence[str],
    drain_s: float,
    *,
    fds: Sequence[int],
    tally: Tally,
    stop: asyncio.Event,
    ready: asyncio.Event,
) -> None:
    while not stop.is_set():
        try:
            worker = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, pass_fds=fds
            )
        except OSError as error:
            log.error("a worker cannot be started: %s; trying again", error)
            await _pause(stop)
            continue
        stopper = asyncio.create_task(_end_on_stop(worker, drain_s, stop=stop))
        why = await _hear(worker, ready)
        exit_code = await worker.wait()
        if not stop.is_set():
            stopper.cancel()
            tally.count_replaced(why)
            log.warning("worker %d ended with %d; starting another", worker.pid, exit_code)
            await _pause(stop)


async def _pause(stop: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(RESTART_S):
            await stop.wait()


async def _hear(worker: Process, ready: asyncio.Event) -> str:
    """Returns when the worker has ended, or was killed because it does not begin, or its loop no
    longer turns: which."""
    beats, num_missed, wait_s = worker.stdout, 0, START_S
    assert beats is not None
    while num_missed < MAX_MISSED:
        before_s = waited_for_core_s(worker.pid)
        try:
            async with asyncio.timeout(wait_s):
                if not await beats.readline():
                    return ENDED
            ready.set()
            num_missed, wait_s = 0, BEAT_WAIT_S
        except TimeoutError:
            # Where this process was stopped itself, beats wait to be read.
            starved_s = waited_for_core_s(worker.pid) - before_s
            num_missed += starved_s < STARVED_SHARE * wait_s
    limit_s = MAX_MISSED * wait_s
    log.error("worker %d has been stuck for %.0f s; it is killed", worker.pid, limit_s)
    with suppress(ProcessLookupError):
        worker.kill()
    return STUCK


async def _beat() -> None:
    """Tell the supervisor once a second that this worker's loop turns."""
    os.set_blocking(sys.stdout.fileno(), False)
    while True:
        await asyncio.sleep(BEAT_S)
        with suppress(OSError):
            os.write(sys.stdout.fileno(), b"\n")


async def _end_on_stop(worker: Process, drain_s: float, *, stop: asyncio.Event) -> None:
    await stop.wait()
    if worker.stdin is not None:
        worker.stdin.close()
    try:
        async with asyncio.timeout(drain_s + KILL_AFTER_S):
            await worker.wait()
    except TimeoutError:
        worker.kill()


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code, 2 for a wrong setting."""
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    logging.basicConfig(format="%(asctime)s gateway[%(process)d] %(levelname)s %(message)s")
    try:
        settings = _settings(options)
        sock = _listen(settings, is_worker=options.worker is not None)
    except BatchrunError as error:
        sys.stderr.write(f"batchrun gateway: {error}\n")
        return error.exit_code
    # What is imported stays: to look through it again and again would hold up every stream.
    gc.freeze()
    with sock:
        uvloop.run(_run(argv, settings, sock, options))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m batchrun.server.gateway", description=__doc__)
    add = parser.add_argument
    add("--listen", default="127.0.0.1:8000", metavar="HOST:PORT")
    add("--upstreams", required=True, type=Path, metavar="FILE", help="JSON list of engines")
    add("--workers", default=1, type=int, metavar="N", help="processes that share the port")
    add("--drain-s", default=30.0, type=float, help="seconds a stream may go on after SIGTERM")
    add("--body-idle-s", default=30.0, type=float, help="longest pause in an upload, in seconds")
    add("--daemon-head-s", default=DAEMON_HEAD_S, type=float, help="wait for the daemon's answer")
    add("--max-body-bytes", default=MAX_BODY_BYTES, type=int)
    add("--max-held-bytes", default=MAX_HELD_BYTES, type=int, help="all bodies in a worker")
    add("--keys", type=Path, metavar="FILE", help="JSON list of API keys; left out: none needed")
    add(
        "--answer-at",
        type=Path,
        metavar="SOCKET",
        help="where several workers' parent says it lives",
    )
    add("--worker", type=int, metavar="NUMBER", help=argparse.SUPPRESS)
    add("--book-fd", type=int, metavar="FD", help=argparse.SUPPRESS)
    add("--tally-fd", type=int, metavar="FD", help=argparse.SUPPRESS)
    return parser


def _settings(options: argparse.Namespace) -> GatewaySettings:
    host, port = parse_listen(options.listen)
    keys = None if options.keys is None else read_keys(options.keys)
    if keys is None and not is_loopback(host):
        raise ConfigError(
            f"--listen: {host} can be reached from other machines, and no API key is asked for; "
            "listen on 127.0.0.1, or name a list of keys with --keys"
        )
    for flag in ("workers", "max_body_bytes", "max_held_bytes"):
        if getattr(options, flag) < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} must be at least 1")
    for flag in ("drain_s", "body_idle_s", "daemon_head_s"):
        if not getattr(options, flag) > 0:
            raise ConfigError(f"--{flag.replace('_', '-')} must be above 0")
    return GatewaySettings(
        host=host,
        port=port,
        upstreams_path=options.upstreams,
        keys_path=options.keys,
        num_workers=options.workers,
        worker=options.worker or 0,
        book_fd=options.book_fd,
        tally_fd=options.tally_fd,
        drain_s=options.drain_s,
        body_idle_s=options.body_idle_s,
        daemon_head_s=options.daemon_head_s,
        max_body_bytes=options.max_body_bytes,
        max_held_bytes=options.max_held_bytes,
    )


def _listen(settings: GatewaySettings, *, is_worker: bool) -> socket.socket:
    if is_worker:
        return bind(settings.host, settings.port, shared=True)
    sock = bind(settings.host, settings.port)
    if settings.num_workers == 1:
        return sock
    # A second gateway could share the port unseen, so it is taken alone first.
    port = sock.getsockname()[1]
    sock.close()
    return bind(settings.host, port, shared=True)


async def _run(
    argv: Sequence[str], settings: GatewaySettings, sock: socket.socket, options: argparse.Namespace
) -> None:
    is_worker = options.worker is not None
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    bound = replace(settings, port=sock.getsockname()[1])

    def announce() -> None:
        sys.stdout.write(f"gateway listening on http://{bound.host}:{bound.port}\n")
        sys.stdout.flush()

    if is_worker:
        _stop_at_end_of_input(stop)
    if bound.num_workers > 1 and not is_worker:
        answer_at = options.answer_at
        await supervise(argv, bound, answer_at=answer_at, stop=stop, on_ready=announce)
        return
    beating: list[asyncio.Task[None]] = []

    def on_ready() -> None:
        announce()
        if is_worker:
            beating.append(asyncio.create_task(_beat()))

    await serve(bound, sock, stop=stop, on_ready=on_ready)
    for task in beating:
        task.cancel()


def _stop_at_end_of_input(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    stdin_fd = sys.stdin.fileno()

    def on_end() -> None:
        loop.remove_reader(stdin_fd)
        stop.set()

    loop.add_reader(stdin_fd, on_end)


if __name__ == "__main__":
    sys.exit(main())
