"""`python -m batchrun.gateway`: gateways that an older batchrun started begin their workers so."""

from __future__ import annotations

import sys

from batchrun.server.gateway.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
