"""Online calls that an engine records for the daemon, on the virtual engine."""

from __future__ import annotations

import math

import msgspec
import pytest
from msgspec import UNSET
from test_steering import Rig

from batchrun.simulator.virtual.engine import RequestRecord
from batchrun.wire import RecordedCall


@pytest.mark.parametrize("policy", ["bs", "echo"])
def test_a_recording_has_every_online_call_from_its_start_on(policy: str) -> None:
    rig = Rig(policy)
    rig.run_until(3.0)
    assert rig.order().recording is UNSET
    calls: list[RecordedCall] = []
    for until_s in (3.0, 10.0, 10.0, math.inf):
        rig.run_until(until_s)
        told = rig.order(is_recording=True, calls_from=len(calls)).recording
        assert told is not UNSET and told.first_number == len(calls)
        calls += told.calls
        open_s = [r.arrival_at_s for r in online_of(rig) if 3 < r.arrival_at_s < rig.engine.now_s]
        ended = {call.arrived_at for call in calls}
        assert told.oldest_open_at == min((at for at in open_s if at not in ended), default=None)
    stopped = rig.order(), rig.order(is_recording=True, calls_from=0)

    expected = [
        (record.arrival_at_s, record.num_prompt_tokens, len(record.output_token_ids))
        for record in online_of(rig)
        if record.arrival_at_s > 3.0
    ]
    assert len(expected) > 20
    assert sorted(msgspec.structs.astuple(call) for call in calls) == expected
    assert stopped[0].recording is UNSET
    assert stopped[1].recording is not UNSET and stopped[1].recording.calls == ()


def online_of(rig: Rig) -> list[RequestRecord]:
    records = (record for record in rig.engine.records.values() if record.is_online)
    return sorted(records, key=lambda record: record.arrival_at_s)
