"""batchrun inside vLLM: the scheduler class for `--scheduler-cls`."""

from __future__ import annotations

from batchrun.vllm_plugin.scheduler import ColocatedScheduler

__all__ = ["ColocatedScheduler"]
