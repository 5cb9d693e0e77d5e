"""A Ray cluster of several nodes on one machine, each with an address of loopback of its own, and
deployments whose engines Ray places there."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from deployment_rig import DeploymentRig

from batchrun.control.client import DaemonClient
from batchrun.home import Home
from benchmarks.deployment import free_port

HEAD = "127.0.0.2"
NODES = ("127.0.0.3", "127.0.0.4")
START_WAIT_S = 240
STORE_BYTES = 80_000_000
"""Ray's object store, which batchrun does not use; the least that Ray takes."""
WAIT_S = 240.0
FIRST_PORT_BEYOND = 20_000
"""Ray's workers listen between 10,002 and 19,999."""


REMOVE_GROUPS = """
import sys, ray
from ray.util import get_placement_group, placement_group_table, remove_placement_group
ray.init(address=sys.argv[1], namespace="batchrun", log_to_driver=False)
for group in placement_group_table().values():
    if group["state"] != "REMOVED":
        remove_placement_group(get_placement_group(group["name"]))
"""


class RayCluster:
    """A head that runs nothing, and two nodes with one GPU each, as far as Ray knows. Whoever has
    no token is refused. `close` ends all of it."""

    def __init__(self, folder: Path, head: str = HEAD, nodes: Sequence[str] = NODES) -> None:
        self.folder = folder
        self.head, self.nodes = head, nodes
        self.port = port_outside_ray()
        self.address = f"{head}:{self.port}"
        self._store: tuple[list[str], dict[str, str]] = ([], {})
        self._started: subprocess.Popen[bytes] | None = None
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_gcs_storage": "rocksdb",
            "RAY_gcs_storage_path": str(folder / "gcs"),
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        }

    def start(self) -> None:
        """Start the head, then both nodes at once."""
        self.start_head()
        nodes = [self._begin_node(ip) for ip in self.nodes]
        for node in nodes:
            _see_through(node)

    def start_head(self) -> None:
        """Start the head."""
        _see_through(
            self._ray(self.head, "--head", f"--port={self.port}", "--num-cpus=0", "--num-gpus=0")
        )

    def prefix(self, ip: str) -> Sequence[str]:
        """What makes a command run on the machine of this address."""
        return ()

    def start_node(self, ip: str) -> None:
        """Have a node join, or join again."""
        _see_through(self._begin_node(ip))

    def _begin_node(self, ip: str) -> subprocess.Popen[str]:
        return self._ray(ip, f"--address={self.address}", "--num-cpus=4", "--num-gpus=1")

    def _ray(self, ip: str, *options: str) -> subprocess.Popen[str]:
        home = self.home(ip)
        home.mkdir(parents=True, exist_ok=True)
        # Ray's sockets have paths in there, which must be short.
        command = ["start", f"--node-ip-address={ip}", f"--temp-dir={self._short(ip)}"]
        command += [f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats"]
        if "--head" in options:
            command.append("--include-dashboard=false")
        return subprocess.Popen(
            [*self.prefix(ip), str(Path(sys.executable).parent / "ray"), *command, *options],
            env={**os.environ, **self.environment, "BATCHRUN_HOME": str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _short(self, ip: str) -> Path:
        return Path(f"/tmp/ray-{self.port}-{ip.rpartition('.')[2]}")

    def home(self, ip: str) -> Path:
        """Where agents on that node have what is theirs."""
        return self.folder / f"home-{ip}"

    def raylet(self, ip: str) -> psutil.Process:
        """The process that is a node to Ray."""
        (found,) = self.processes(lambda line: "raylet/raylet" in line, ip)
        return found

    def kill_head(self) -> None:
        """`kill -9` all that runs for the head, its store of the cluster's state among it."""
        (store,) = self.processes(lambda line: "gcs/gcs_server" in line, HEAD)
        self._store = store.cmdline(), store.environ()
        for process in self.processes(lambda line: True, self.head):
            _kill(process)

    def start_head_again(self) -> None:
        """Start the head's store with what it had; `ray start` would take the nodes, on this same
        machine, for a cluster that runs already."""
        command, environment = self._store
        self._started = subprocess.Popen(command, env=environment)

    def processes(self, wanted: Callable[[str], bool], ip: str) -> list[psutil.Process]:
        """Ray's processes of one node, as far as their command lines are `wanted`."""
        home = f"{self.home(ip)}"
        return [
            process
            for process in psutil.process_iter()
            if wanted(line_of(process)) and _environment(process).get("BATCHRUN_HOME") == home
        ]

    def remove_groups(self) -> None:
        """Take all placement groups away, as somebody else might."""
        subprocess.run(
            [sys.executable, "-c", REMOVE_GROUPS, self.address],
            env={**os.environ, **self.environment},
            check=True,
        )

    def close(self) -> None:
        """End every process of the cluster."""
        for ip in (self.head, *self.nodes):
            for process in self.processes(lambda line: True, ip):
                _kill(process)
            subprocess.run(["rm", "-rf", str(self._short(ip))], check=True)
        if self._started is not None:
            self._started.wait()


class FleetRig(DeploymentRig):
    """A deployment of one fleet of fake engines, which write down what they begin."""

    def __init__(self, folder: Path, cluster: RayCluster) -> None:
        super().__init__(folder)
        self.cluster = cluster
        self.fleet_port = port_outside_ray()
        os.environ |= cluster.environment

    def use_fleet(
        self, low: int, high: int, *options: str, gpus: float = 0.5, **more: object
    ) -> None:
        """Write batchrun.yaml."""
        command = [sys.executable, "-m", "batchrun.engine.fake", "--port={port}", "--model=fake"]
        command += [f"--executions={self.executions_path}", *options]
        self.use_replicas(low, high, {"command": command}, gpus=gpus, **more)

    def use_replicas(
        self, low: int, high: int, engine: dict[str, object], *, gpus: float = 0.5, **more: object
    ) -> None:
        """The same with replicas of any engine; two fit on a node, if they need no more `gpus`."""
        ray = {"address": self.cluster.address, "port": self.fleet_port, "gpus": gpus, "cpus": 1}
        ray["replicas"] = {"min": low, "max": high}
        self.configure({"name": "fleet", "ray": ray, **engine}, **more)

    def picture(self) -> dict[str, Any]:
        """The status, asked of the daemon itself: the command takes a second."""
        picture: dict[str, Any] = DaemonClient(Home(self.home)).get("/status")
        return picture

    def placed(self) -> dict[str, str]:
        """The node of each replica that is ready, by name."""
        picture = self.picture()
        (fleet,) = picture["fleets"]
        ready = {each["name"] for each in picture["engines"] if each["state"] == "ready"}
        return {
            name: node["address"]
            for node in fleet["nodes"]
            for name in node["replicas"]
            if name in ready
        }

    def wait_until_placed(self, num_replicas: int) -> dict[str, str]:
        """Wait until so many are ready, and no other is there; where they are."""
        deadline_s = time.monotonic() + WAIT_S
        while len(placed := self.placed()) != num_replicas or self.num_running() != num_replicas:
            assert time.monotonic() < deadline_s, self.picture()
            time.sleep(0.2)
        return placed

    def part(self, what: str, name: str) -> psutil.Process:
        """The `actor`, `agent` or `engine` of a replica."""
        home = self.cluster.home(self.placed()[name])
        engine = home / "agents" / name / "run" / f"engine-{name}.json"
        record = engine if what == "engine" else home / "run" / f"replica-{name}.json"
        process = psutil.Process(int(json.loads(record.read_text())["pid"]))
        parent = process.parent()
        assert parent is not None
        return parent if what == "actor" else process

    def engines(self) -> list[psutil.Process]:
        """The engines that run for this deployment, wherever and whosever they are."""
        mark = f"--executions={self.executions_path}"
        lines = [(each, line_of(each)) for each in psutil.process_iter()]
        return [each for each, line in lines if mark in line and "engine.fake" in line]

    def num_running(self) -> int:
        """How many engines run, wanted or not."""
        return len(self.engines())

    def agents(self) -> list[psutil.Process]:
        """The agents and guards that run for this deployment."""
        ours = [str(self.cluster.home(ip)) for ip in self.cluster.nodes]
        return [
            each
            for each in psutil.process_iter()
            if any(home in line_of(each) for home in ours) and "batchrun" in line_of(each)
        ]


def port_outside_ray() -> int:
    """A free port that Ray gives to no worker of its own."""
    while (port := free_port()) < FIRST_PORT_BEYOND:
        continue
    return port


def kill_9(processes: Sequence[psutil.Process]) -> None:
    """`kill -9`, and see them gone."""
    for process in processes:
        _kill(process)
    psutil.wait_procs(processes, timeout=15)


def line_of(process: psutil.Process) -> str:
    """The command line; nothing of a process that is gone."""
    try:
        is_dead = process.status() == psutil.STATUS_ZOMBIE
        return "" if is_dead else " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _see_through(starting: subprocess.Popen[str]) -> None:
    said, _ = starting.communicate(timeout=START_WAIT_S)
    assert starting.returncode == 0, said
