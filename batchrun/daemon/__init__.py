"""The loop that feeds engines, collects outcomes and commits them."""

from batchrun.daemon.closing import export
from batchrun.daemon.daemon import Daemon
from batchrun.daemon.engine_view import view_engine
from batchrun.daemon.slots import Slot
from batchrun.daemon.supervisor import DaemonUpstream, Supervisor
from batchrun.daemon.view import Foretold, JobView, view_job

__all__ = [
    "Daemon",
    "DaemonUpstream",
    "Foretold",
    "JobView",
    "Slot",
    "Supervisor",
    "export",
    "view_engine",
    "view_job",
]
