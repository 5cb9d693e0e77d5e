"""Three machines in one: network namespaces on a bridge, whose links can be cut, and a deployment
over them: Ray's head with the first daemon, and two nodes with an engine each, of which one has a
second daemon. The database is a machine of its own, where the test is too."""

from __future__ import annotations

import ctypes
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import requests
from deployment_rig import DeploymentRig
from postgres_server import PostgresServer
from ray_rig import RayCluster, line_of, port_outside_ray

from batchrun.control.client import DaemonClient
from batchrun.errors import BatchrunError
from batchrun.home import Home
from batchrun.mutual_tls import read_or_make_secret
from benchmarks.noted_calls import FILE_VARIABLE

ROOT = Path(__file__).parents[1]
BOOT_ID = "/proc/sys/kernel/random/boot_id"
CLONE_NEWNET = 0x40000000
WHO_AM_I_THERE = f'mount --bind "$0" {BOOT_ID} && exec "$@"'
MODEL = "tiny"
READY_WAIT_S = 300.0
_libc = ctypes.CDLL(None, use_errno=True)


class Machines:
    """Namespaces `1`, `2`, `3`; each has its own loopback, and takes itself for another machine."""

    def __init__(self, folder: Path) -> None:
        self._mark = f"b{secrets.token_hex(2)}"
        self._net = f"10.{64 + secrets.randbelow(64)}.{secrets.randbelow(256)}"
        self.here = self.address(0)
        self._folder = folder

    def start(self) -> None:
        """Make them."""
        _ip("link", "add", self._mark, "type", "bridge")
        _ip("addr", "add", f"{self.here}/24", "dev", self._mark)
        _ip("link", "set", self._mark, "up")
        for number in (1, 2, 3):
            name, link = self._name(number), self._link(number)
            (self._folder / f"boot-id-{number}").write_text(f"{number:08}-0000-0000-0000-0\n")
            _ip("netns", "add", name)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", link, "master", self._mark, "up")
            _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")

    def address(self, number: int) -> str:
        """Of a machine; 0 is where the test runs."""
        return f"{self._net}.{number + 1}"

    def prefix(self, number: int) -> list[str]:
        """What makes a command run on a machine."""
        boot_id = str(self._folder / f"boot-id-{number}")
        return ["ip", "netns", "exec", self._name(number), "sh", "-c", WHO_AM_I_THERE, boot_id]

    @contextmanager
    def on(self, number: int) -> Iterator[None]:
        """This thread is on that machine, as far as the network goes."""
        with Path("/proc/self/ns/net").open("rb") as here:
            _enter(f"/var/run/netns/{self._name(number)}")
            try:
                yield
            finally:
                _set_namespace(here.fileno())

    def cut(self, number: int) -> None:
        """Take its link down."""
        _ip("link", "set", self._link(number), "down")

    def join(self, number: int) -> None:
        """Take its link up again."""
        _ip("link", "set", self._link(number), "up")

    def close(self) -> None:
        """End all that runs there, and remove them."""
        for number in (1, 2, 3):
            with suppress(subprocess.CalledProcessError):
                for pid in _ip("netns", "pids", self._name(number)).split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                _ip("netns", "del", self._name(number))
                _ip("link", "del", self._link(number))
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._mark)

    def _name(self, number: int) -> str:
        return f"{self._mark}-{number}"

    def _link(self, number: int) -> str:
        return f"{self._mark}v{number}"


class MachineCluster(RayCluster):
    """The head on machine 1, nodes on 2 and 3."""

    def __init__(self, folder: Path, machines: Machines) -> None:
        one, *others = (machines.address(number) for number in (1, 2, 3))
        super().__init__(folder, one, others)
        self._machines = machines
        self.environment["PYTHONPATH"] = str(ROOT)

    def prefix(self, ip: str) -> Sequence[str]:
        """See `RayCluster`."""
        return self._machines.prefix(int(ip.rpartition(".")[2]) - 1)


class MachineRig(DeploymentRig):
    """The home of a daemon and gateway on one of the machines."""

    def __init__(self, folder: Path, machines: Machines, number: int) -> None:
        folder.mkdir()
        super().__init__(folder)
        self.machines, self.number = machines, number
        self.url = f"http://{machines.address(number)}:{self.port}"
        self.wrapper = tuple(machines.prefix(number))

    def ask_daemon(self, path: str) -> dict[str, Any]:
        """A control route of its daemon; nothing where none answers soon."""
        with suppress(BatchrunError, OSError), self.machines.on(self.number):
            return dict(DaemonClient(Home(self.home), timeout_s=3.0).get(path))
        return {}

    def job(self, job_id: str) -> dict[str, Any]:
        """See `DeploymentRig`; a standby shows the jobs too."""
        deadline_s = time.monotonic() + READY_WAIT_S
        while time.monotonic() < deadline_s:
            for view in self.ask_daemon("/status").get("jobs", ()):
                if view["id"] == job_id:
                    return dict(view)
            time.sleep(0.2)
        raise AssertionError(f"nobody answers for job {job_id}")

    @property
    def leads(self) -> bool:
        """Whether its daemon is the one that leads."""
        return bool(self.ask_daemon("/status").get("leadership", {}).get("role") == "leader")


@dataclass
class MachineFleet:
    """Two daemons on one database, and a fleet of two real vLLM, one on each of two machines."""

    folder: Path
    machines: Machines
    cluster: MachineCluster
    postgres: PostgresServer
    key: str = ""
    port: int = field(default_factory=port_outside_ray)

    def __post_init__(self) -> None:
        names = {"first": 1, "second": 2}
        self.rigs = [MachineRig(self.folder / n, self.machines, m) for n, m in names.items()]
        self.noted = self.folder / "noted.jsonl"

    def start(self, vllm_args: Sequence[str], **more: object) -> None:
        """Bring all up, and wait until two engines are ready."""
        url = self.postgres.new_database()
        ray = {"address": self.cluster.address, "port": self.port, "gpus": 1, "cpus": 1}
        ray["replicas"] = {"min": 2, "max": 2}
        args = [*vllm_args, "--middleware=benchmarks.noted_calls.NotedCalls"]
        secret = self.folder / "fleet-secret"
        read_or_make_secret(secret)
        engine = {"name": "fleet", "ray": ray, "vllm_args": args, "secret_file": str(secret)}
        engine["env"] = {FILE_VARIABLE: str(self.noted)}
        for rig in self.rigs:
            rig.store_url, rig.executions_path = url, self.noted
            listen = rig.url.removeprefix("http://")
            rig.configure(engine, model=MODEL, **{"listen": listen, "gateway_url": rig.url}, **more)
        os.environ |= self.cluster.environment
        self.key = str(self.rigs[0].ask("keys", "create", "ops", "--role", "admin")["key"])
        for rig in self.rigs:
            rig.ask("up", "-d")
        self.wait_until_whole()

    def leader(self) -> MachineRig:
        """The home whose daemon leads."""
        deadline_s = time.monotonic() + READY_WAIT_S
        while not (leaders := [rig for rig in self.rigs if rig.leads]):
            assert time.monotonic() < deadline_s, "nobody leads"
            time.sleep(0.2)
        return leaders[0]

    def wait_until_whole(self) -> None:
        """One leads, one stands by, both gateways answer, two engines run and are ready, and Ray
        counts on both of their nodes."""
        deadline_s = time.monotonic() + READY_WAIT_S
        while not self.is_whole():
            assert time.monotonic() < deadline_s, [r.ask_daemon("/status") for r in self.rigs]
            self.keep()
            time.sleep(0.3)

    def is_whole(self) -> bool:
        """See `wait_until_whole`."""
        pictures = [rig.ask_daemon("/status") for rig in self.rigs]
        roles = sorted(str(each.get("leadership", {}).get("role")) for each in pictures)
        if roles != ["leader", "standby"] or not all(map(self.answers, self.rigs)):
            return False
        if len(self.engines()) != 2:
            return False
        (led,) = (each for each in pictures if each["leadership"]["role"] == "leader")
        ready = [each for each in led["engines"] if each["state"] == "ready"]
        (fleet,) = led["fleets"]
        # Ray may have given a node up whose engine runs on: it ends when that node goes on.
        alive = {each["address"] for each in fleet["nodes"] if each["is_alive"]}
        return len(ready) == 2 and not fleet["trouble"] and alive >= set(self.cluster.nodes)

    def answers(self, rig: MachineRig) -> bool:
        """Whether a home's gateway knows a model."""
        headers = {"Authorization": f"Bearer {self.key}"}
        with suppress(requests.RequestException):
            reply = requests.get(f"{rig.url}/v1/models", headers=headers, timeout=1.0)
            return reply.ok and bool(reply.json()["data"])
        return False

    def part(self, what: str, rng: random.Random) -> list[psutil.Process]:
        """The processes of the leading `daemon`, its `gateway`, `postgres`, or, of any replica, the
        `actor`, `agent`, `engine` or `raylet`; empty while there are none."""
        with suppress(OSError, ValueError, psutil.Error):
            if what == "postgres":
                return [self.postgres.process(), *self.postgres.process().children()]
            if what in {"daemon", "gateway"}:
                process = psutil.Process(self.leader().pid_of(what))
                return [process, *process.children()] if what == "gateway" else [process]
            if what == "raylet":
                return [self.cluster.raylet(rng.choice(self.cluster.nodes))]
            return [self._of_replica(what, rng.choice(("fleet-0", "fleet-1")))]
        return []

    def engines(self) -> list[psutil.Process]:
        """The API servers that run for this fleet, wanted or not."""
        mark = "benchmarks.noted_calls"
        processes = [(each, line_of(each)) for each in psutil.process_iter()]
        return [each for each, line in processes if mark in line and "api_server" in line]

    def keep(self) -> None:
        """What systemd does on each machine: start again the daemon and the node that are gone."""
        for ip in self.cluster.nodes:
            if not self.cluster.processes(lambda line: "raylet/raylet" in line, ip):
                for process in self.cluster.processes(lambda line: "gcs_server" not in line, ip):
                    with suppress(psutil.Error):
                        process.kill()
                self.cluster.start_node(ip)
        for rig in self.rigs:
            if not psutil.pid_exists(rig.pid_of("daemon")):
                rig.ask("up", "-d")

    def down(self) -> None:
        """`batchrun down` on both machines, the standby's first."""
        for rig in sorted(self.rigs, key=lambda rig: rig.leads):
            rig.ask("down")

    def close(self) -> None:
        """End all."""
        for rig in self.rigs:
            rig.close()

    def _of_replica(self, what: str, name: str) -> psutil.Process:
        for ip in self.cluster.nodes:
            home = self.cluster.home(ip)
            engine = home / "agents" / name / "run" / f"engine-{name}.json"
            record = engine if what == "engine" else home / "run" / f"replica-{name}.json"
            with suppress(OSError, ValueError, psutil.Error):
                process = psutil.Process(int(json.loads(record.read_text())["pid"]))
                return process.parents()[0] if what == "actor" else process
        raise psutil.NoSuchProcess(0)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def _enter(path: str) -> None:
    with Path(path).open("rb") as namespace:
        _set_namespace(namespace.fileno())


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")


def can_make_machines() -> bool:
    """Whether namespaces are to be had here: root's, on Linux."""
    return sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") is not None
