"""What `batchrun calibrate` learned about one engine, as a JSON file.

The caller reads and writes the file; nothing here touches the disk or a clock.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from batchrun.errors import ConfigError
from batchrun.estimator.engine_facts import EngineIdentity
from batchrun.estimator.fit import FittedModel
from batchrun.estimator.identical import IdenticalSpread
from batchrun.estimator.step_gap import StepGap
from batchrun.estimator.step_time import AnyModel, model_from_record, model_to_record

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class OnlineLatency:
    """What online calls saw while the engine had nothing else to do. Percentiles over the calls."""

    num_calls: int
    calls_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float


@dataclass(frozen=True, slots=True)
class CalibrationProfile:
    """Fitted step-time models of one engine, the best first."""

    engine: EngineIdentity
    kv_blocks: int
    """Of the engine that was measured. Step times do not depend on it."""
    fitted: tuple[FittedModel, ...]
    spread: IdenticalSpread
    pivot_tokens: int
    """Tokens per step at which throughput saturates."""
    online: OnlineLatency | None
    """None when the engine could not answer chat calls."""
    measured_at: float
    """UTC epoch seconds."""
    gap: StepGap | None = None
    """Between two steps; None where steps are scheduled ahead, and in profiles from before."""

    @property
    def models(self) -> tuple[AnyModel, ...]:
        """The models alone, the best first: what `OnlineFit` starts from."""
        return tuple(each.model for each in self.fitted)

    def mismatch(self, engine: EngineIdentity) -> str | None:
        """One line that names what differs from `engine`; None when the profile holds for it."""
        differing = [
            f"{each.name} {getattr(self.engine, each.name)!r} (here {getattr(engine, each.name)!r})"
            for each in fields(EngineIdentity)
            if getattr(self.engine, each.name) != getattr(engine, each.name)
        ]
        return f"measured with another {', '.join(differing)}" if differing else None

    def to_json(self) -> str:
        """The file's content; `profile_from_json` gives an equal profile back."""
        record = {
            "version": FORMAT_VERSION,
            "engine": asdict(self.engine),
            "kv_blocks": self.kv_blocks,
            "fitted": [_fitted_record(each) for each in self.fitted],
            "spread": asdict(self.spread),
            "pivot_tokens": self.pivot_tokens,
            "online": None if self.online is None else asdict(self.online),
            "measured_at": self.measured_at,
            "gap": None if self.gap is None else asdict(self.gap),
        }
        return json.dumps(record, indent=2) + "\n"


def profile_from_json(text: str, source: str) -> CalibrationProfile:
    """Read a profile; `source` names it in errors. Raises ConfigError, one line, strict."""
    try:
        return _profile(json.loads(text))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}: not JSON (line {error.lineno}: {error.msg})") from error
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}; run `batchrun calibrate` again") from error


def _profile(value: object) -> CalibrationProfile:
    if isinstance(value, dict):
        value = {"gap": None, **value}
    record = _object(value, "profile", ("version", *_keys(CalibrationProfile)))
    if record["version"] != FORMAT_VERSION:
        raise ConfigError(f"profile version {record['version']!r}, expected {FORMAT_VERSION}")
    fitted = record["fitted"]
    if not isinstance(fitted, list) or not fitted:
        raise ConfigError("fitted must be a list of at least one model")
    models = tuple(_fitted(each) for each in fitted)
    if len({each.model.name for each in models}) != len(models):
        raise ConfigError("fitted names a model twice")
    return CalibrationProfile(
        _engine(record["engine"]),
        _count(record, "kv_blocks"),
        models,
        _spread(record["spread"]),
        _count(record, "pivot_tokens"),
        None if record["online"] is None else _online(record["online"]),
        _number(record, "measured_at"),
        None if record["gap"] is None else _gap(record["gap"]),
    )


def _engine(value: object) -> EngineIdentity:
    record = _object(value, "engine", _keys(EngineIdentity))
    return EngineIdentity(
        _text(record, "model"),
        _text(record, "vllm_version"),
        _text(record, "device"),
        _text(record, "dtype"),
        _count(record, "block_tokens"),
    )


def _spread(value: object) -> IdenticalSpread:
    record = _object(value, "spread", _keys(IdenticalSpread))
    return IdenticalSpread(
        _number(record, "mean_ape"),
        _count(record, "num_steps", least=0),
        _count(record, "num_groups", least=0),
    )


def _online(value: object) -> OnlineLatency:
    names = _keys(OnlineLatency)
    record = _object(value, "online", names)
    return OnlineLatency(
        _count(record, "num_calls"), *[_number(record, name) for name in names[1:]]
    )


def _gap(value: object) -> StepGap:
    record = _object(value, "gap", _keys(StepGap))
    return StepGap(_number(record, "base_s"), _number(record, "request_s"))


def _fitted_record(fitted: FittedModel) -> dict[str, object]:
    return {**asdict(fitted), "model": model_to_record(fitted.model)}


def _fitted(value: object) -> FittedModel:
    record = _object(value, "fitted", _keys(FittedModel))
    return FittedModel(
        model_from_record(record["model"]),
        _number(record, "held_out_mape"),
        _number(record, "held_out_p95_ape"),
        _count(record, "num_held_out"),
    )


def _object(value: object, name: str, keys: tuple[str, ...]) -> dict[str, object]:
    if not isinstance(value, dict) or set(value) != set(keys):
        raise ConfigError(f"{name}: expected an object with the keys {', '.join(keys)}")
    return value


def _keys(of: type[DataclassInstance]) -> tuple[str, ...]:
    return tuple(each.name for each in fields(of))


def _text(record: dict[str, object], key: str) -> str:
    value = record[key]
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key} must be a text that is not empty")
    return value


def _count(record: dict[str, object], key: str, *, least: int = 1) -> int:
    value = record[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key} must be a whole number of at least {least}")
    return value


def _number(record: dict[str, object], key: str) -> float:
    value = record[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"{key} must be a number of at least 0")
    return float(value)
