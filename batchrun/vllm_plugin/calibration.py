"""The engine's side of a calibration: its steps recorded to a file, its profile read at start."""

from __future__ import annotations

import logging
import os
import weakref
from pathlib import Path

import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from batchrun.errors import ConfigError
from batchrun.estimator import (
    AnyModel,
    EngineFacts,
    EngineIdentity,
    ObservedGap,
    StepLoad,
    facts_line,
    profile_from_json,
    step_line,
)

log = logging.getLogger(__name__)

MAX_RECORDED_STEPS = 200_000
MAX_PROFILE_BYTES = 1 << 20


def engine_facts(config: VllmConfig, kv_blocks: int) -> EngineFacts:
    """What the engine of this configuration is, and how large its requests may be."""
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    device = config.device_config.device_type
    if device == "cuda":
        device = current_platform.get_device_name()
    num_devices = config.parallel_config.world_size
    identity = EngineIdentity(
        model=str(model.served_model_name),
        vllm_version=vllm.__version__,
        device=device if num_devices == 1 else f"{num_devices} x {device}",
        dtype=str(model.dtype).removeprefix("torch."),
        block_tokens=cache.block_size,
    )
    return EngineFacts(
        engine=identity,
        kv_blocks=kv_blocks,
        longest_tokens=model.max_model_len,
        token_budget=scheduler.max_num_batched_tokens,
        max_running=scheduler.max_num_seqs,
        vocabulary=model.get_vocab_size(),
    )


def read_models(path: str | None, engine: EngineIdentity) -> tuple[AnyModel, ...]:
    """The models of the profile at `path`; none without one.

    A profile that cannot be read, or was measured with another engine, is ignored with a warning:
    the estimates then start cold and learn from the steps, as without a profile.
    """
    if path is None:
        return ()
    try:
        with Path(path).open(encoding="utf-8") as file:
            profile = profile_from_json(file.read(MAX_PROFILE_BYTES), path)
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        log.warning("batchrun: the calibration profile is ignored: %s", error)
        return ()
    if (mismatch := profile.mismatch(engine)) is not None:
        log.warning(
            "batchrun: the calibration profile %s is ignored: %s; run `batchrun calibrate` again",
            path,
            mismatch,
        )
        return ()
    return profile.models


class StepRecorder:
    """Writes the engine's facts, then each step at once; at most MAX_RECORDED_STEPS."""

    def __init__(self, path: str, facts: EngineFacts) -> None:
        """Replaces what is at `path`; only its owner may read it."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        weakref.finalize(self, os.close, self._fd)
        os.write(self._fd, facts_line(facts).encode())
        self._num_left = MAX_RECORDED_STEPS

    def add(self, load: StepLoad, step_s: float, gap: ObservedGap | None) -> None:
        """A step with this load took so long, after such a gap."""
        if self._num_left > 0:
            self._num_left -= 1
            os.write(self._fd, step_line(load, step_s, gap).encode())
