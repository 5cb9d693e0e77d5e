"""A deterministic stand-in for vLLM's OpenAI server: `python -m batchrun.engine.fake`."""
