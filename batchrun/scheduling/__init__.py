"""Policies: from what an engine shows before a step to what the step does."""
