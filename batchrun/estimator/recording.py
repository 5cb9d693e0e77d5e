"""The text in which an engine records its steps: facts about itself, then one line a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from batchrun.errors import EngineError
from batchrun.estimator.engine_facts import EngineFacts, EngineIdentity
from batchrun.estimator.step_gap import ObservedGap
from batchrun.estimator.step_load import StepLoad
from batchrun.estimator.step_table import Observation


@dataclass(frozen=True, slots=True)
class Recording:
    """What an engine recorded of itself. Loads hold totals only: nothing can be removed again."""

    facts: EngineFacts
    observations: Sequence[Observation]
    gaps: Sequence[ObservedGap] = ()
    """Between two steps; none where steps are scheduled ahead."""

    def after(self, earlier: Recording) -> Recording:
        """Without what `earlier`, a shorter reading of the same record, has."""
        return Recording(
            self.facts,
            self.observations[len(earlier.observations) :],
            self.gaps[len(earlier.gaps) :],
        )


def facts_line(facts: EngineFacts) -> str:
    """The first line."""
    return json.dumps(asdict(facts)) + "\n"


def step_line(load: StepLoad, step_s: float, gap: ObservedGap | None = None) -> str:
    """One step, and the gap before it where there was one. 3 us."""
    num_before, gap_s = gap or ("null", "null")
    return (
        f"[{load.num_requests},{load.num_tokens},{load.context_tokens},{load.attention_pairs},"
        f"{load.num_decodes},{load.decode_context_tokens},{load.max_decode_context_tokens},"
        f"{step_s},{num_before},{gap_s}]\n"
    )


def read_recording(text: str) -> Recording:
    """Read what an engine has recorded so far. Raises EngineError when that is something else."""
    first, *lines = text.splitlines() or [""]
    try:
        record = json.loads(first)
        facts = EngineFacts(engine=EngineIdentity(**record.pop("engine")), **record)
        observations: list[Observation] = []
        gaps: list[ObservedGap] = []
        for line in lines:
            *totals, step_s, num_before, gap_s = json.loads(line)
            if gap_s is not None:
                gaps.append((num_before, gap_s))
            if step_s > 0.0:
                observations.append((StepLoad(*totals), step_s))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineError(f"the engine's record of its steps cannot be read: {error}") from error
    return Recording(facts, observations, gaps)
