"""`batchrun calibrate`: an engine of the deployment, measured alone, and its profile."""

from batchrun.calibration.engine import check_nothing_runs, choose_engine
from batchrun.calibration.run import Measured, calibrate_engine

__all__ = ["Measured", "calibrate_engine", "check_nothing_runs", "choose_engine"]
