"""A relay before a PostgreSQL server that breaks connections in the middle of a commit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

COMMIT = b"COMMIT"


class CommitRelay:
    """Listens on `port`. While armed, the next commit's connection breaks, and no other does.

    `delivers`: the server gets that commit, and only its answer is lost.
    """

    def __init__(self, server_port: int) -> None:
        self.delivers = True
        self.is_armed = False
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                threading.Thread(target=self._send, args=(client, server), daemon=True).start()
                threading.Thread(target=_pass_on, args=(server, client), daemon=True).start()

    def _send(self, client: socket.socket, server: socket.socket) -> None:
        """Pass on what the client says, but for the one commit."""
        with suppress(OSError):
            while data := client.recv(1 << 16):
                if self.is_armed and COMMIT in data:
                    self.is_armed = False
                    client.shutdown(socket.SHUT_RDWR)
                    if not self.delivers:
                        break
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError), source, target:
        while data := source.recv(1 << 16):
            target.sendall(data)


@contextmanager
def commit_relay(server_port: int) -> Iterator[CommitRelay]:
    """A relay to the server at this port of this machine."""
    relay = CommitRelay(server_port)
    try:
        yield relay
    finally:
        relay.close()
