"""A Prometheus that scrapes one gateway every second; Debian's, where this machine has it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from benchmarks.deployment import free_port

PROMETHEUS = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
WAIT_S = 20.0


class PrometheusServer:
    """Runs from the start to `close`."""

    def __init__(self, folder: Path, target_port: int) -> None:
        assert PROMETHEUS is not None
        self._port = free_port()
        config = folder / "prometheus.json"
        scrape = {
            "job_name": "batchrun",
            "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}],
        }
        config.write_text(
            json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]})
        )
        log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'prometheus'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
            ],
            stdout=log,
            stderr=log,
        )
        log.close()

    def query(self, text: str) -> list[dict[str, Any]]:
        """The samples of an instant query; [] while it has not started."""
        url = f"http://127.0.0.1:{self._port}/api/v1/query?{urlencode({'query': text})}"
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                found: list[dict[str, Any]] = json.load(reply)["data"]["result"]
                return found
        except ConnectionError:
            return []
        except OSError as error:
            if isinstance(getattr(error, "reason", None), ConnectionError):
                return []
            raise

    def wait_for(self, queries: Sequence[str]) -> list[str]:
        """Wait until each has returned a sample; those that have not within `WAIT_S`."""
        left, deadline_s = list(queries), time.monotonic() + WAIT_S
        while left and time.monotonic() < deadline_s:
            left = [query for query in left if not self.query(query)]
            time.sleep(0.5)
        return left

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
