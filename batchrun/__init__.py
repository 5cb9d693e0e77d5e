"""batchrun: offline LLM batch jobs on the GPUs that serve your live traffic."""

__version__ = "0.1.0"
