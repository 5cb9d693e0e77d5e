"""A deterministic stand-in for vLLM's OpenAI server: `python -m batchrun.engine.fake`."""

from batchrun.engine.fake.script import Action, Rule, RuleBook, load_rules
from batchrun.engine.fake.server import FakeSettings, build_app

__all__ = ["Action", "FakeSettings", "Rule", "RuleBook", "build_app", "load_rules"]
