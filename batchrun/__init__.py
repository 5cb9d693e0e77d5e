"""batchrun: offline LLM batch jobs on the GPUs that serve your live traffic."""

from __future__ import annotations

__version__ = "0.1.0"
