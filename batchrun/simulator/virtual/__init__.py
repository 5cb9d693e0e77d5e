"""The virtual engine: a real vLLM scheduler class on a virtual clock, without a model."""
