"""What an engine says of its KV cache: `vllm:cache_config_info` among its metrics."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

METRIC = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True)
class KvConfig:
    """The KV cache of one engine. `num_blocks` is None where the engine does not tell."""

    block_tokens: int
    num_blocks: int | None
    is_prefix_caching_on: bool

    @property
    def num_tokens(self) -> int | None:
        """Tokens that it holds."""
        return None if self.num_blocks is None else self.num_blocks * self.block_tokens


def parse_kv_config(metrics: str) -> KvConfig | None:
    """Read a page of metrics in Prometheus's text format; None where it says nothing of the KV.

    Raises ValueError when the page is no such text.
    """
    lines = [line for line in metrics.splitlines() if line.startswith(METRIC)]
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        for sample in family.samples:
            return _read(sample.labels)
    return None


def _read(labels: dict[str, str]) -> KvConfig | None:
    block_tokens = labels.get("block_size", "")
    num_blocks = labels.get("num_gpu_blocks", "")
    if not block_tokens.isdecimal() or not int(block_tokens):
        return None
    return KvConfig(
        block_tokens=int(block_tokens),
        num_blocks=int(num_blocks) if num_blocks.isdecimal() else None,
        is_prefix_caching_on=labels.get("enable_prefix_caching") == "True",
    )
