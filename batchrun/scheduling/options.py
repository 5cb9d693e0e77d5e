"""Which of Echo's parts are on: the ablations of the paper's figure 6."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EchoOptions:
    """`is_kv_aware`: choose among offline candidates by cached KV, else first come, first served.
    `keeps_reserve`: the threshold of section 4.2.
    """

    is_kv_aware: bool = True
    keeps_reserve: bool = True


PRESETS: Mapping[str, EchoOptions] = {
    "bs+e": EchoOptions(is_kv_aware=False, keeps_reserve=False),
    "bs+e+s": EchoOptions(is_kv_aware=True, keeps_reserve=False),
    "echo": EchoOptions(),
}
