"""Stands between `batchrun submit` and the daemon, and kills the daemon as it answers."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

from deployment_rig import DeploymentRig


@contextmanager
def killing_relay(rig: DeploymentRig, *, delivers: bool) -> Iterator[None]:
    """Lead the command's calls through a relay that kills the daemon once it has answered.

    `delivers`: whether its answer still reaches the command.
    """
    record = rig.home / "run" / "daemon.json"
    address = json.loads(record.read_text())

    class Relay(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name: self.headers[name] for name in ("Authorization", "Content-Type")}
            call = urllib.request.Request(address["url"] + self.path, body, headers)
            with urllib.request.urlopen(call) as response:
                answer = response.read()
            rig.kill("daemon")
            if delivers:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Silent."""

    with HTTPServer(("127.0.0.1", 0), Relay) as server:
        record.write_text(json.dumps(address | {"url": f"http://127.0.0.1:{server.server_port}"}))
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield
        finally:
            server.shutdown()
            serving.join()
