"""batchrun inside vLLM: the scheduler class for `--scheduler-cls`."""

from batchrun.vllm_plugin.scheduler import ColocatedScheduler

__all__ = ["ColocatedScheduler"]
