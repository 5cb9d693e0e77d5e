"""A Prometheus that scrapes one gateway every second: this machine's, or Debian's package of it,
unpacked where tests keep what they fetched once."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from download_cache import download_cache

from batchrun.cli.operate.monitoring import ALERTS, BOARD
from benchmarks.deployment import free_port

WAIT_S = 20.0
FETCH_S = 120.0


@cache
def find_program(name: str) -> Path:
    """`prometheus` or `promtool`. Skips the test where it cannot be had."""
    if (found := shutil.which(name)) is not None:
        return Path(found)
    folder = download_cache() / "prometheus"
    program = folder / "usr" / "bin" / name
    if not program.is_file():
        try:
            with tempfile.TemporaryDirectory() as fetched:
                call = partial(subprocess.run, cwd=fetched, check=True, timeout=FETCH_S)
                call(["apt-get", "download", "prometheus"], capture_output=True)
                (package,) = Path(fetched).glob("prometheus_*.deb")
                call(["dpkg-deb", "-x", package, folder])
        except (OSError, ValueError, subprocess.SubprocessError):
            pytest.skip(f"there is no {name} here, and Debian's package cannot be had")
    return program


def queries_of_the_board() -> list[str]:
    """Of all panels, in order."""
    panels = (panel for row in BOARD.values() for panel in row)
    return [query for panel in panels for query in panel.queries.values()]


def queries_of_the_alerts() -> list[str]:
    """What alerts look at, and what each compares, which is there whether it fires or not."""
    compared = [re.sub(r" (==|>) [\d.]+$", "", alert.query) for alert in ALERTS]
    assert not set(compared) & {alert.query for alert in ALERTS}
    return [*(alert.series for alert in ALERTS), *compared]


class PrometheusServer:
    """Runs from the start to `close`."""

    def __init__(self, folder: Path, target_port: int) -> None:
        program = find_program("prometheus")
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
                program,
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
