"""What a daemon and the placer of a fleet tell each other, and what an actor is started with."""

from __future__ import annotations

from msgspec import Struct

DRAIN_S = 300.0
"""Calls may go on for so long in a replica that is given up."""


class ReplicaSpec(Struct, frozen=True):
    """What a replica's agent is started with: its port on whatever node, the secret of the fleet,
    and its batchrun.yaml. `digest` differs where any of it does."""

    name: str
    port: int
    secret: str
    config: str
    digest: str


class FleetSettings(Struct, frozen=True):
    """One fleet: Ray's address, and the `gpus` and `cpus` of a replica. `owner` is what holders of
    the fleet's secret derive from it."""

    fleet: str
    address: str
    owner: str
    gpus: float
    cpus: float


class FleetOrder(FleetSettings, frozen=True):
    """What the placer is to bring about; where the daemon does not `lead`, only to look at.
    `renewed`: replicas that are placed anew if they are outdated. `emptied`: those that end at once
    where they are not wanted, as others end their calls first; None: all."""

    replicas: tuple[ReplicaSpec, ...]
    leads: bool
    renewed: tuple[str, ...] = ()
    emptied: tuple[str, ...] | None = None

    def owns(self, name: str) -> bool:
        """Whether a replica of this fleet may have this name."""
        head, _, number = name.rpartition("-")
        return head == self.fleet and number.isdecimal()

    def group_of(self, name: str) -> str:
        """The name of a replica's placement group."""
        return f"batchrun-{self.owner}-{name}"

    @property
    def room(self) -> dict[str, float]:
        """What a replica takes of its node, by kind."""
        return {kind: num for kind, num in {"GPU": self.gpus, "CPU": self.cpus}.items() if num}


class FleetNode(Struct, frozen=True):
    """A node of Ray's cluster, with all the GPUs and CPUs that Ray may give away there."""

    address: str
    is_alive: bool
    gpus: float
    cpus: float


class PlacedReplica(Struct, frozen=True):
    """A replica: the `host` of its agent, nothing while it has none, and a few words for people.
    `is_outdated`: it was started with other settings than those of the order, or its actor has
    said nothing for so long that it is to be placed anew. `is_there`: it has an actor, or had its
    place. `num_ended` of its agents have ended by themselves, as far as its actor tells, the last
    with these `last_words`."""

    name: str
    host: str = ""
    stage: str = ""
    is_outdated: bool = False
    is_there: bool = False
    num_ended: int | None = None
    last_words: str = ""


class FleetReport(Struct, frozen=True):
    """What Ray says. `num_there`: replicas that it knows, wanted or not. With `trouble` nothing of
    the rest is known."""

    nodes: tuple[FleetNode, ...] = ()
    replicas: tuple[PlacedReplica, ...] = ()
    num_there: int = 0
    trouble: str = ""
