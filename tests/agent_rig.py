"""An engine's agent within the test's own loop, and connections to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from engine_builders import fake_settings

from batchrun.engine.agent.engine import AgentEngine
from batchrun.engine.agent.remote import AgentAddress, AgentClient
from batchrun.engine.agent.server import Agent, AgentSettings
from batchrun.engine.engine import AttachedEngine, ManagedEngine
from batchrun.mutual_tls import read_or_make_secret, server_context
from benchmarks.deployment import free_port


class AgentRig:
    """One agent of a fake engine, in a folder. Start it with `running`, as often as you like."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.executions = folder / "executions.jsonl"
        self.secret_file = folder / "secret"
        self.secret = read_or_make_secret(self.secret_file)
        self.channel = folder / "run" / "engine-fake"
        self.engine_settings = fake_settings(folder, f"--executions={self.executions}", *options)
        self.url = f"https://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(
        self,
        certificate: Path | None = None,
        key: Path | None = None,
        beside: AttachedEngine | None = None,
    ) -> AsyncIterator[Agent]:
        """The agent, until the block ends; its engine is ready, and `beside` it or its own."""
        engine = beside or ManagedEngine(self.engine_settings)
        self.channel.parent.mkdir(exist_ok=True)
        settings = AgentSettings(
            name="fake",
            host="127.0.0.1",
            port=self.port,
            tls=server_context(self.secret, certificate, key),
            channel=self.channel,
            last_steps=self.channel.with_suffix(".steps"),
            kept=self.folder / "outcomes.db",
            log=self.engine_settings.log_path,
            certificate=certificate,
            key=key,
        )
        agent = Agent(engine, settings)
        listening = asyncio.Event()
        run = asyncio.create_task(agent.run(listening.set))
        try:
            await listening.wait()
            await until(lambda: engine.state == "ready" or run.done())
            yield agent
        finally:
            agent.stop()
            await run

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[AgentEngine]:
        """The engine as a daemon has it; closed at the end."""
        engine = AgentEngine(AgentAddress(name="a", url=self.url, secret_file=self.secret_file))
        try:
            await engine.start()
            yield engine
        finally:
            await engine.stop()

    def num_executions(self) -> int:
        """How many rows the engine has begun."""
        return len(self.executions.read_text().splitlines()) if self.executions.exists() else 0


async def inherited(client: AgentClient) -> set[int]:
    """The rows of job `job` that the agent had when this client came."""
    await client.has_met.wait()
    return set(client.inherited.get("job", ()))


async def until(condition: Callable[[], object]) -> None:
    """Returns when the condition holds; the test's own time limit bounds the wait."""
    while not condition():
        await asyncio.sleep(0.01)


def write_certificate(folder: Path, address: str, *, is_rsa: bool = False) -> tuple[Path, Path]:
    """A certificate of an operator for an address, and its key, as PEM files."""
    import ipaddress
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec, rsa

    key = (
        rsa.generate_private_key(65_537, 2_048)
        if is_rsa
        else ec.generate_private_key(ec.SECP256R1())
    )
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "operator")])
    now = datetime.now(UTC)
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    made = (
        x509
        .CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(alternative, critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths
