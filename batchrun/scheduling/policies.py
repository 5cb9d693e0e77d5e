"""Every policy by name, and every order of the queue of online calls.

A new one is a module of its own and one line here: settings, orders to engines, scenario files,
batchrun.yaml and the command line take their names from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from batchrun.scheduling.echo import EchoOptions, EchoPolicy
from batchrun.scheduling.online_queue import ArrivalOrder, OnlineQueue
from batchrun.scheduling.view import EngineView, Plan


class Policy(Protocol):
    """Decides a step from what the engine shows."""

    def plan(self, view: EngineView) -> Plan:
        """The step to run after those in flight."""
        ...


QUEUES: Mapping[str, Callable[[], OnlineQueue]] = {
    "arrival": ArrivalOrder,
}

POLICIES: Mapping[str, Callable[[OnlineQueue], Policy | None]] = {
    "bs": lambda queue: None,
    "bs+e": partial(EchoPolicy, EchoOptions(is_kv_aware=False, keeps_reserve=False)),
    "bs+e+s": partial(EchoPolicy, EchoOptions(keeps_reserve=False)),
    "echo": partial(EchoPolicy, EchoOptions()),
}
"""`bs` plans nothing: it is vLLM's own order, untouched."""


def make_policy(name: str, online_queue: str = "arrival") -> Policy | None:
    """A policy of this name for one engine, which lets calls in by the queue of that name.

    None: vLLM's own order rules. Raises KeyError for a name that is not in the tables.
    """
    return POLICIES[name](QUEUES[online_queue]())
