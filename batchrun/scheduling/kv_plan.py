"""How long steps may be so that calls find room for their KV later on, not only now."""

from __future__ import annotations

import math

import numpy as np

from batchrun.estimator.call_lengths import EDGES_TOKENS
from batchrun.estimator.step_load import StepLoad
from batchrun.scheduling.view import EngineView

KV_SHARE = 0.8
PLAN_EVERY_S = 0.5
RATE_MEMORY_S = 60.0
FIRST_RATE_S = 5.0
HOLD_S = 30.0
EXCESS = 1.02
AFTER_S = np.array([0, 5, 10, 20, 30, 45, 60, 90, 120, 180, 240, 360.0])
NUM_CHOICES = 9
Z=2.0
TOP=1.0


class KvPlan:
    def __init__(self) -> None:
        self._made_at_s = -math.inf
        self._most_s = math.inf
        self.last = None

    def most_s(self, view: EngineView) -> float:
        if not any(request.is_decode for request in view.online_running):
            return math.inf
        if view.now_s - self._made_at_s >= PLAN_EVERY_S:
            self._made_at_s = view.now_s
            self._most_s = self._plan_s(view)
        return self._most_s

    def _plan_s(self, view: EngineView) -> float:
        size = view.block_tokens
        ages = [request.num_output_tokens for request in view.online_running]
        held = view.online_blocks * size
        prompt = max(0.0, (held - sum(ages)) / len(ages))
        waiting = [r.num_output_tokens for r in view.online_waiting]
        staying = view.call_lengths.staying(ages)
        ages += waiting
        age = np.asarray(ages, np.float64)[:, None]
        later = age + EDGES_TOKENS
        survive = np.interp(later, EDGES_TOKENS, staying)
        survive /= np.maximum(survive[:, :1], 1e-12)
        present = ((prompt + later) * survive).sum(axis=0)
        mids = (EDGES_TOKENS[1:] + EDGES_TOKENS[:-1]) / 2
        grown = np.diff(EDGES_TOKENS) * (prompt + mids) * (staying[1:] + staying[:-1]) / 2
        grown = np.concatenate([[0.0], np.cumsum(grown)])
        v_present=((prompt + later)**2 * survive*(1-survive)).sum(axis=0)
        v_grown=np.concatenate([[0.0], np.cumsum(np.diff(EDGES_TOKENS) * (prompt + mids)**2 * (staying[1:] + staying[:-1]) / 2)])
        rate = view.call_lengths.rate_per_s(view.now_s)
        share = KV_SHARE * view.total_blocks * size
        num = max(1, round(share / max(held / len(ages), 1)))
        load = StepLoad()
        load.add_decodes([round(share / num)] * num)
        alone_s = view.model.predict_s(load)
        new = round(rate * prompt * alone_s)
        if new:
            load.add(new, new)
            alone_s = view.model.predict_s(load)
        top_s = 2 * view.online_slo_tpot_s
        if alone_s >= top_s:
            return 0.0
        steps_s = (alone_s * (top_s / alone_s) ** (np.arange(NUM_CHOICES) / (NUM_CHOICES - 1)))[:, None]
        during, after = np.minimum(AFTER_S, HOLD_S), np.maximum(AFTER_S - HOLD_S, 0)
        tok_after = after / alone_s
        tok = during / steps_s + tok_after
        def total(pres, grown):
            def B(x): return np.interp(x, EDGES_TOKENS, grown)
            return np.interp(tok, EDGES_TOKENS, pres) + rate * (
            alone_s * B(tok_after) + steps_s * (B(tok) - B(tok_after)))
        kv=total(present,grown)+Z*np.sqrt(total(v_present,v_grown))
        most = np.maximum(TOP * view.total_blocks * size, EXCESS * kv[0])
        ok = (kv <= most).all(axis=1)
        self.last = (rate, prompt, alone_s, kv[0].max() / size, grown[-1])
        best = int(np.flatnonzero(ok)[-1]) if ok.all() else int(np.argmin(ok)) - 1
        if best == NUM_CHOICES - 1:
            return math.inf
        if best <= 0:
            return 0.0
        return float(steps_s[best, 0])
