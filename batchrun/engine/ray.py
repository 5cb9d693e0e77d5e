"""All that batchrun has to do with Ray: the placer of a fleet, and the actor that hosts an agent.

`python -m batchrun.engine.ray` is the placer: a process of its own beside the daemon, since Ray
ends a process whose cluster is gone. It reads orders from standard input and writes reports to
standard output, a JSON document a line, and ends with its input. For each wanted replica
there is a placement group of one bundle, which lies on one node and keeps its place while the actor
is started again, and in it a named, detached actor. Ray moves both when their node dies. The groups
of a fleet go where most is left: to different nodes, while there are some.

Only Ray's core is used. It is imported when the placer runs, or by Ray itself in the actor.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec

from batchrun.engine import process
from batchrun.engine.fleet_messages import (
    DRAIN_S,
    FleetNode,
    FleetOrder,
    FleetReport,
    PlacedReplica,
    ReplicaSpec,
)
from batchrun.errors import BatchrunError, EngineError
from batchrun.files import write_atomically
from batchrun.home import DEFAULT_HOME, Home

NAMESPACE = "batchrun"
ROUND_S = 1.0
ANSWER_S = 2.0
"""An actor that has not answered by then is starting, or gone."""
END_LIMIT_S = 90.0
"""An agent that was to end so long ago counts as gone, whatever its actor says."""
SILENT_LIMIT_S = 180.0
"""An actor that answered before and has not for so long is replaced; a busy node may starve one for
100 s."""
LOOK_S = 0.25
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
STEADY_S = 60.0
"""An agent that ran for so long is started again at once."""
ORDER_LASTS_S = 2.5
"""A daemon repeats its order while it leads. After so long without one it may be stopped or cut
off, and another may lead: nothing is placed or ended any more."""
_order_clock_s = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""Also goes on while the machine is suspended, where the platform has such a clock."""
DEATH_PAUSE_S = 15.0
"""A node on which the actor cannot even begin gets it again after so long."""
EXIT_NO_RAY = 3


class ReplicaActor:
    """Runs `batchrun engine serve` on its node, again whenever that ends, and says where it is.

    The agent ends with the actor, however that dies: it holds the end of a pipe. Before an agent is
    started, what an earlier one of this name left on the node is ended, by its nonce. An actor that
    is not wanted any more is told to `end` first: Ray gives its GPUs to others the moment it dies.
    """

    def __init__(self, spec: dict[str, Any], owner: str) -> None:
        self._spec = msgspec.convert(spec, ReplicaSpec)
        self._owner = owner
        self._host = node_address()
        self._home = Home(Path(os.environ.get("BATCHRUN_HOME") or DEFAULT_HOME))
        self._record_path = self._home.replica_process(self._spec.name)
        self._said = "the agent is started"
        self._num_ended, self._last_words = 0, ""
        self._is_ending, self._has_ended = threading.Event(), False
        self._ends_by_s = math.inf
        self._read_end, self._write_end = os.pipe()
        threading.Thread(target=self._keep_agent, daemon=True).start()

    def look(self) -> dict[str, Any]:
        """Where the agent answers, of whose fleet it is, and with what it was started."""
        return {
            "owner": self._owner,
            "digest": self._spec.digest,
            "host": self._host,
            "said": self._said,
            "num_ended": self._num_ended,
            "last_words": self._last_words,
            "is_ending": self._is_ending.is_set(),
            "has_ended": self._has_ended or time.monotonic() > self._ends_by_s + END_LIMIT_S,
        }

    def end(self, within_s: float) -> None:
        """End the agent with its last call, at the latest after so long, and start none again."""
        self._ends_by_s = min(self._ends_by_s, time.monotonic() + within_s)
        self._is_ending.set()

    def _keep_agent(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._is_ending.is_set():
            started_s = time.monotonic()
            try:
                self._run_agent()
            except (OSError, BatchrunError) as error:
                self._last_words = str(error)
                self._said = f"the agent cannot be started: {error}"
                self._num_ended += 1
            if time.monotonic() - started_s > STEADY_S:
                pause_s = FIRST_PAUSE_S
            self._is_ending.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        # What an agent has left that ended by itself.
        process.stop_agent(self._record_path)
        self._has_ended = True

    def _run_agent(self) -> None:
        """Start the agent, and return when it has ended. Raises OSError, ConfigError."""
        spec, home = self._spec, self._home
        log_path = home.log / f"agent-{spec.name}.log"
        # Actors of an older batchrun keep the record of their agent as one of any other.
        for record_path in (home.agent_process(spec.name), self._record_path):
            process.stop_agent(record_path)
        own = home.agent(spec.name)
        own.create()
        secret_file, config = own.path / "fleet-secret", own.path / "batchrun.json"
        write_atomically(secret_file, spec.secret.encode(), mode=0o600)
        write_atomically(config, spec.config.encode(), mode=0o600)
        listen = f"[{self._host}]" if ":" in self._host else self._host
        command = [sys.executable, "-P", "-m", "batchrun", "engine", "serve", "--while-input"]
        command += ["--name", spec.name, "--listen", f"{listen}:{spec.port}"]
        command += ["--secret-file", str(secret_file), "--config", str(config)]
        command += ["--drain-s", f"{DRAIN_S:g}"]
        record = process.spawn(
            [*command, "--home", str(home.path)],
            env=_own_environment(),
            log_path=log_path,
            record_path=self._record_path,
            stdin=self._read_end,
        )
        self._said = _raise_priority(record.pid)
        while process.is_alive(record) and not self._is_ending.wait(LOOK_S):
            pass
        if self._is_ending.is_set():
            self._drain(record)
        self._last_words = _last_line(log_path).removeprefix("batchrun: ")
        self._said = f"the agent ended: {self._last_words}"
        self._num_ended += 1

    def _drain(self, record: process.ProcessRecord) -> None:
        self._said = "ends with its last call"
        if time.monotonic() < self._ends_by_s:
            process.signal_recorded(self._record_path, signal.SIGTERM)
        while process.is_alive(record) and time.monotonic() < self._ends_by_s:
            time.sleep(LOOK_S)


def node_address() -> str:
    """This node's address, as Ray knows it."""
    import ray

    return str(ray.util.get_node_ip_address())


def _own_environment() -> dict[str, str]:
    """The actor's environment, with the GPUs that Ray chose, without what is Ray's own: its token
    is none of an engine's business."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_", "PYTHONBREAKPOINT"))
    }


def _raise_priority(pid: int) -> str:
    """Ray runs its workers, and so what they start, with less priority than all else on the node:
    give the agent the usual one. Says so where that is not allowed."""
    with suppress(ProcessLookupError):
        try:
            os.setpriority(os.PRIO_PROCESS, pid, min(0, os.getpriority(os.PRIO_PROCESS, pid)))
        except PermissionError:
            nice = os.getpriority(os.PRIO_PROCESS, pid)
            return f"runs with nice {nice}: start Ray with RAY_worker_niceness=0"
    return ""


def _last_line(path: Path) -> str:
    with suppress(OSError):
        lines = path.read_text("utf-8", "replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), "without a word")
    return "without a word"


class Placer:
    """Brings the actors of one fleet to what is wanted, a step at each `look`.

    A replica has the same name as its placement group and as its engine. Those of a name of this
    fleet that belong to another deployment are left alone, and told.
    """

    def __init__(self, ray: Any, may_act: Callable[[], bool]) -> None:
        """`may_act`: whether the order still lasts, as Ray may be silent for a while meanwhile."""
        self._ray, self._may_act = ray, may_act
        self._asked: dict[str, Any] = {}
        self._silent_s: dict[str, float] = {}
        self._heard: set[str] = set()
        self._groups: dict[str, dict[str, Any]] = {}
        self._num_groups: Counter[str] = Counter()
        self._deaths: dict[str, tuple[float, str]] = {}

    def look(self, order: FleetOrder) -> FleetReport:
        """Do the next step for every replica, and tell how all of them are. Raises what Ray does
        when it is not there."""
        nodes = [
            FleetNode(
                address=str(node["NodeManagerAddress"]),
                is_alive=bool(node["Alive"]),
                gpus=float(node["Resources"].get("GPU", 0.0)),
                cpus=float(node["Resources"].get("CPU", 0.0)),
            )
            for node in self._ray.nodes()
        ]
        there = {name for name in self._ray.util.list_named_actors() if order.owns(name)}
        self._asked = {name: asked for name, asked in self._asked.items() if name in there}
        self._silent_s = {name: at_s for name, at_s in self._silent_s.items() if name in there}
        self._heard &= there
        answers, self._groups = self._ask(there), self._groups_of(order)
        owners = {name: it["owner"] for name, it in answers.items() if isinstance(it, dict)}
        self._heard |= {name for name, owner in owners.items() if owner == order.owner}
        known = {name for name in there if owners.get(name, order.owner) == order.owner}
        known |= {name for name in self._groups if self._state_of(name) != "PENDING"}
        replicas = [
            msgspec.structs.replace(
                self._serve(order, spec, answers, there), is_there=spec.name in known
            )
            for spec in order.replicas
        ]
        if order.leads:
            for name in (there | self._groups.keys()) - {spec.name for spec in order.replicas}:
                self._remove(name, order, answers)
        return FleetReport(tuple(nodes), tuple(replicas), num_there=len(self._groups_of(order)))

    def _ask(self, names: set[str]) -> dict[str, dict[str, Any] | str]:
        """What each actor says of itself, or why it says nothing."""
        for name in names - self._asked.keys():
            with suppress(ValueError):
                self._asked[name] = self._ray.get_actor(name).look.remote()
                self._silent_s.setdefault(name, time.monotonic())
        pending = list(self._asked.values())
        if pending:
            self._ray.wait(pending, num_returns=len(pending), timeout=ANSWER_S)
        answers: dict[str, dict[str, Any] | str] = {}
        for name, asked in list(self._asked.items()):
            if not self._ray.wait([asked], timeout=0)[0]:
                answers[name] = "Ray starts its actor"
                continue
            del self._asked[name]
            try:
                answers[name] = self._ray.get(asked)
                del self._silent_s[name]
            except self._ray.exceptions.RayError as error:
                answers[name] = "its actor has died; Ray starts it again"
                self._heard.discard(name)
                self._deaths[name] = time.monotonic(), " ".join(str(error).split())[:200]
        return answers

    def _serve(
        self,
        order: FleetOrder,
        spec: ReplicaSpec,
        answers: dict[str, dict[str, Any] | str],
        there: set[str],
    ) -> PlacedReplica:
        name, answer = spec.name, answers.get(spec.name, "Ray looks for its actor")
        if name not in there:
            stage = self._place(order, spec) if order.leads else "no daemon has placed it yet"
            return PlacedReplica(name=name, stage=stage)
        if isinstance(answer, str):
            if order.leads and self._is_given_up(name, order):
                self._remove(name, order, answers)
            stage = self._waits_for_room(name, order) or answer
            is_outdated = self._has_fallen_silent(name)
            return PlacedReplica(name=name, stage=stage, is_outdated=is_outdated)
        if answer["owner"] != order.owner:
            if order.leads and name in self._groups:
                self._remove(name, order, answers)
            stage = f"{name} is of another deployment's fleet: give this one another name"
            return PlacedReplica(name=name, stage=stage)
        is_outdated = answer["digest"] != spec.digest or self._has_other_room(name, order)
        is_renewed = is_outdated and name in order.renewed
        if order.leads and (is_renewed or answer.get("is_ending")):
            if is_renewed or answer["has_ended"]:
                self._remove(name, order, answers)
            return PlacedReplica(name=name, stage="is placed anew, once it has ended")
        return PlacedReplica(
            name=name,
            host=answer["host"],
            stage=answer["said"],
            is_outdated=is_outdated,
            num_ended=answer.get("num_ended"),
            last_words=answer.get("last_words", ""),
        )

    def _place(self, order: FleetOrder, spec: ReplicaSpec) -> str:
        """Ask for room, and start the actor there once there is some."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        died_s, why = self._deaths.get(spec.name, (-math.inf, ""))
        if time.monotonic() - died_s < DEATH_PAUSE_S:
            return f"its actor has died: {why}"
        group_name = order.group_of(spec.name)
        if self._has_other_room(spec.name, order) and self._may_act():
            self._ray.util.remove_placement_group(self._ray.util.get_placement_group(group_name))
            return "Ray looks for other room"
        if spec.name not in self._groups:
            self._ray.util.placement_group(
                [order.room], strategy="STRICT_PACK", name=group_name, lifetime="detached"
            )
            return "Ray looks for room"
        if room := self._waits_for_room(spec.name, order):
            return room
        group = self._ray.util.get_placement_group(group_name)
        if not self._may_act():
            return "no daemon orders anything now"
        with suppress(ValueError):  # An actor of this name is not quite gone.
            self._ray.remote(ReplicaActor).options(
                name=spec.name,
                lifetime="detached",
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=4,
                num_cpus=order.cpus,
                num_gpus=order.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            ).remote(msgspec.to_builtins(spec), order.owner)
        return "Ray starts its actor"

    def _groups_of(self, order: FleetOrder) -> dict[str, dict[str, Any]]:
        """The fleet's placement groups, by replica. Counts how many there are for a replica of that
        name, whosever."""
        table = self._ray.util.placement_group_table().values()
        groups = {group["name"]: group for group in table if group["state"] != "REMOVED"}
        self._num_groups = Counter(name.split("-", 2)[-1] for name in groups)
        ours = {order.group_of(name): name for name in self._num_groups if order.owns(name)}
        return {ours[name]: group for name, group in groups.items() if name in ours}

    def _state_of(self, name: str) -> str:
        return str(self._groups.get(name, {}).get("state", ""))

    def _is_silent(self, name: str, for_s: float) -> bool:
        """Whether an actor that has its place has said nothing for so long."""
        silent_s = time.monotonic() - self._silent_s.get(name, math.inf)
        return self._state_of(name) == "CREATED" and silent_s > for_s

    def _has_fallen_silent(self, name: str) -> bool:
        return name in self._heard and self._is_silent(name, SILENT_LIMIT_S)

    def _is_given_up(self, name: str, order: FleetOrder) -> bool:
        """Whether an actor that says nothing is to be placed anew: as it should be anyway, or as it
        cannot go on where it is, without its group or with one that finds no node."""
        finds_none = self._state_of(name) == "RESCHEDULING" and self._has_other_room(name, order)
        is_renewed = name in order.renewed and self._has_fallen_silent(name)
        return finds_none or is_renewed or not self._num_groups[name]

    def _has_other_room(self, name: str, order: FleetOrder) -> bool:
        group = self._groups.get(name)
        return group is not None and list(group["bundles"].values()) != [order.room]

    def _waits_for_room(self, name: str, order: FleetOrder) -> str:
        """What the replica waits for; nothing where it has its place."""
        if self._state_of(name) in {"", "CREATED"}:
            return ""
        wanted = " and ".join(f"{num:g} {kind}s" for kind, num in order.room.items())
        return f"waits for a node of Ray's with {wanted} free"

    def _remove(
        self, name: str, order: FleetOrder, answers: dict[str, dict[str, Any] | str]
    ) -> None:
        """End a replica that is ours, and give its place back once its engine is gone; with an
        actor that says nothing for as long as an agent may take to end, without waiting for it."""
        answer, state = answers.get(name), self._state_of(name)
        if not self._may_act():
            return
        is_hung = self._is_silent(name, END_LIMIT_S)
        has_answered = isinstance(answer, dict) and answer["owner"] == order.owner
        if isinstance(answer, dict) and has_answered and not answer.get("has_ended", True):
            is_empty = order.emptied is None or name in (*order.emptied, *order.renewed)
            with suppress(ValueError):
                self._ray.get_actor(name).end.remote(0.0 if is_empty else DRAIN_S)
            return
        # An actor that says nothing is ours where it has had its place in our group, and it was
        # heard or nobody else has one for this name. Without any group it keeps the name, and never
        # runs.
        has_lost = is_hung or state == "RESCHEDULING" or not self._num_groups[name]
        is_ours = name in self._heard or self._num_groups[name] < 2
        is_left = not isinstance(answer, dict) and has_lost and is_ours
        if has_answered or is_left:
            self._kill(name)
        if state and (not isinstance(answer, str) or state != "CREATED" or is_hung):
            place = self._ray.util.get_placement_group(order.group_of(name))
            self._ray.util.remove_placement_group(place)

    def _kill(self, name: str) -> None:
        with suppress(ValueError):
            self._ray.kill(self._ray.get_actor(name), no_restart=True)


class _Orders(threading.Thread):
    """Reads orders; the process ends when there can be no more."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.came = threading.Event()
        self._latest: FleetOrder | None = None
        self._came_at_s = 0.0

    @property
    def latest(self) -> FleetOrder:
        """The last one; only to look, where it is older than an order lasts."""
        assert self._latest is not None
        is_old = _order_clock_s() - self._came_at_s > ORDER_LASTS_S
        return msgspec.structs.replace(self._latest, leads=self._latest.leads and not is_old)

    def run(self) -> None:
        for line in sys.stdin.buffer:
            self._latest = msgspec.json.decode(line, type=FleetOrder)
            self._came_at_s = _order_clock_s()
            self.came.set()
        os._exit(0)


def connect(address: str) -> Any:
    """Ray, connected. Raises EngineError, one line."""
    try:
        import ray
    except ImportError as error:
        raise EngineError(
            f"Ray cannot be used: {error}; install it: pip install 'batchrun[ray]'"
        ) from error
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        line = " ".join(str(error).split()) or type(error).__name__
        raise EngineError(f"no Ray at {address}: {line[:300]}") from error
    return ray


def main() -> int:
    """Place replicas until standard input ends."""
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Ray prints what it likes.
    orders = _Orders()
    orders.start()
    orders.came.wait()
    try:
        placer = Placer(connect(orders.latest.address), lambda: orders.latest.leads)
        _place_on(placer, orders, reports)
    except EngineError as error:
        _tell(reports, FleetReport(trouble=str(error)))
        return EXIT_NO_RAY
    except Exception as error:  # noqa: BLE001  # whatever Ray raises: the next placer tries again
        _tell(reports, FleetReport(trouble=" ".join(f"Ray: {error}".split())[:300]))
        return 1
    return 0


def _place_on(placer: Placer, orders: _Orders, reports: IO[bytes]) -> None:
    # Only to look: what is placed before the daemon has met Ray, nobody would end.
    _tell(reports, placer.look(msgspec.structs.replace(orders.latest, leads=False)))
    while True:
        orders.came.clear()
        _tell(reports, placer.look(orders.latest))
        orders.came.wait(ROUND_S)


def _tell(reports: IO[bytes], report: FleetReport) -> None:
    reports.write(msgspec.json.encode(report) + b"\n")
    reports.flush()


if __name__ == "__main__":
    # The actor's class must have its true name where Ray loads it.
    from batchrun.engine.ray import main as placer_main

    sys.exit(placer_main())
