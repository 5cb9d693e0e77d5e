"""Every policy by name, and every order of the queue of online calls.

A new one is a module of its own and one line here: settings, orders to engines, scenario files,
batchrun.yaml and the command line take their names from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from batchrun.scheduling.echo import EchoOptions, EchoPolicy
from batchrun.scheduling.on_time import OnTimeOrder
from batchrun.scheduling.online_queue import ArrivalOrder, OnlineQueue
from batchrun.scheduling.promise_orders import SlackOptions, SlackOrder
from batchrun.scheduling.queue_orders import DEFAULT_ALPHA, GroupsOrder, LarryOrder
from batchrun.scheduling.view import EngineView, Plan


class Policy(Protocol):
    """Decides a step from what the engine shows."""

    def plan(self, view: EngineView) -> Plan:
        """The step to run after those in flight."""
        ...


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """What an order may be told: `larry_alpha` weighs waiting under `larry`."""

    larry_alpha: float = DEFAULT_ALPHA


DEFAULT_QUEUE = "auto"
QUEUES: Mapping[str, Callable[[QueueOptions], OnlineQueue]] = {
    DEFAULT_QUEUE: lambda options: OnTimeOrder(),
    "arrival": lambda options: ArrivalOrder(),
    "on-time": lambda options: OnTimeOrder(),
    "larry": lambda options: LarryOrder(options.larry_alpha),
    "groups": lambda options: GroupsOrder(),
    "slack": lambda options: SlackOrder(),
    "slack-printed": lambda options: SlackOrder(SlackOptions(is_printed=True)),
    "slack-pivot": lambda options: SlackOrder(SlackOptions(has_pivot_budget=True)),
    "slack-euclid": lambda options: SlackOrder(SlackOptions(is_euclid=True)),
}
"""`auto`: on time before late, in the steps that are planned anyway."""
VLLMS_QUEUES = frozenset({DEFAULT_QUEUE, "arrival"})
"""Under these vLLM plans the steps without offline work and classes itself, by arrival."""

POLICIES: Mapping[str, Callable[[OnlineQueue], Policy | None]] = {
    "bs": lambda queue: None,
    "bs+e": partial(EchoPolicy, EchoOptions(is_kv_aware=False, keeps_reserve=False)),
    "bs+e+s": partial(EchoPolicy, EchoOptions(keeps_reserve=False)),
    "echo": partial(EchoPolicy, EchoOptions()),
}
"""`bs` plans nothing: it is vLLM's own order, untouched."""


def make_policy(
    name: str,
    online_queue: str = DEFAULT_QUEUE,
    options: QueueOptions = QueueOptions(),
    ttft_seen_at_s: dict[float, float] | None = None,
) -> Policy | None:
    """A policy of this name for one engine, which lets calls in by the queue of that name. The
    bounds that another queue saw count on in it.

    None: vLLM's own order rules. Raises KeyError for a name that is not in the tables.
    """
    queue = QUEUES[online_queue](options)
    if ttft_seen_at_s is not None:
        queue.ttft_seen_at_s = ttft_seen_at_s
    return POLICIES[name](queue)
