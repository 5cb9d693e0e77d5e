"""Nobody reaches a managed engine past the gateway; its daemon does, also after a restart."""

from __future__ import annotations

import stat

from deployment_rig import DeploymentRig
from raw_http import RawHttp


def statuses(port: int, **headers: str) -> dict[str, int]:
    """What an engine answers on some routes."""
    paths = ("/health", "/metrics", "/v1/models")
    return {path: RawHttp(port).call("GET", path, headers=headers).status for path in paths}


REFUSED = {"/health": 200, "/metrics": 401, "/v1/models": 401}


def test_a_managed_engine_asks_for_its_secret_and_keeps_it_over_a_restart(
    rig: DeploymentRig,
) -> None:
    rig.use_fake_engine()
    rig.complete_job(3)
    engine, path = rig.pid_of("engine"), rig.home / "run" / "engine-0.key"
    key = path.read_text()

    assert statuses(rig.engine_port) == REFUSED
    assert statuses(rig.engine_port, Authorization="Bearer another") == REFUSED
    assert set(statuses(rig.engine_port, Authorization=f"Bearer {key}").values()) == {200}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    rig.kill("daemon")
    rig.ask("up", "-d")
    (rig.folder / "out.parquet").unlink()
    rig.complete_job(4)
    assert (rig.pid_of("engine"), path.read_text()) == (engine, key)
    assert RawHttp(rig.port).get("/v1/models").status == 200
    for each in rig.home.rglob("*"):
        is_its_own = each in {path, rig.home / "run" / "upstreams.json"}
        assert is_its_own or not each.is_file() or key.encode() not in each.read_bytes(), each


def test_the_engine_of_an_agent_asks_for_a_secret_that_daemon_and_gateway_know(
    rig: DeploymentRig,
) -> None:
    rig.use_agent()
    rig.complete_job(3)

    assert statuses(rig.engine_port) == REFUSED
    assert RawHttp(rig.port).get("/v1/models").status == 200
