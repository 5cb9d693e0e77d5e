"""The files of deploy/: what they name is there, and what batchrun reads of them it takes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_page import commands
from ruamel.yaml import YAML

from batchrun.config import load_deployment

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("docker/*.Dockerfile"))
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
COMPOSE = DEPLOY / "compose" / "compose.yaml"


def documents(path: Path) -> list[dict[str, Any]]:
    """All YAML documents of a file."""
    return list(YAML(typ="safe", pure=True).load_all(path.read_text("utf-8")))


def manifests() -> Iterator[dict[str, Any]]:
    """Everything that the manifests describe."""
    for path in MANIFESTS:
        yield from documents(path)


def named(kind: str) -> dict[str, dict[str, Any]]:
    """What there is of a kind, by name."""
    return {each["metadata"]["name"]: each for each in manifests() if each["kind"] == kind}


def pods() -> dict[str, dict[str, Any]]:
    """What pods are made of, by the name of what makes them; that of the first key among them."""
    made = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in manifests()
        if each["kind"] in {"Deployment", "StatefulSet"}
    }
    made["keys"] = json.loads((DEPLOY / "kubernetes" / "keys.json").read_text())["spec"]
    return made


def check_command(arguments: Sequence[str]) -> None:
    """That batchrun has this command, with these options."""
    every = dict(commands())
    words = list(arguments)
    name = next(tuple(words[:n]) for n in (2, 1) if tuple(words[:n]) in every)
    command, words = every[name], words[len(name) :]
    known = {option for parameter in command.params for option in parameter.opts}
    given = {word.partition("=")[0] for word in words if word.startswith("--") and word != "--"}
    assert given <= known | {"--help"}, (arguments, given - known)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_made_of_what_is_there_and_runs_as_nobody_special(path: Path) -> None:
    text = path.read_text("utf-8").replace("\\\n", " ")
    steps = [line.split(None, 1) for line in text.splitlines() if line and line[0] not in "# "]
    stages = {rest.split()[2] for word, rest in steps if word == "FROM" and " AS " in rest}
    for word, rest in steps:
        *sources, _ = rest.split()
        if word == "COPY" and sources[0].startswith("--from="):
            assert sources[0].removeprefix("--from=") in stages
        elif word == "COPY":
            assert [each for each in sources if not (ROOT / each).exists()] == []
    last = dict(steps)
    assert last["USER"] == "batchrun"
    assert json.loads(last["ENTRYPOINT"]) == ["tini", "--", "batchrun"]
    check_command(json.loads(last["CMD"]))
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    built = set(re.findall(r'"(\S+)"', re.findall(r"packages = (.*)", project)[0]))
    copied = {source for word, rest in steps if word == "COPY" for source in rest.split()}
    assert built | {"pyproject.toml", "README.md", "LICENSE"} <= copied


def test_compose_names_what_is_there() -> None:
    (compose,) = documents(COMPOSE)
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source, target = volume.split(":")[:2]
            is_file = source.startswith("./")
            assert is_file or source in compose["volumes"]
            assert target.startswith("/")
        assert set(service.get("depends_on", ())) <= compose["services"].keys()
        if "build" in service:
            assert ((COMPOSE.parent / service["build"]["context"]).resolve()) == ROOT
            assert (ROOT / service["build"]["dockerfile"]).exists()
    check_command(compose["services"]["engine"]["command"])
    deployment = load_deployment(COMPOSE.parent / "batchrun.yaml")
    check_engines(deployment.engines, {"engine-0": ("engine", compose["services"]["engine"])})


def check_engines(engines: Sequence[Any], servers: Mapping[str, tuple[str, Any]]) -> None:
    """That the deployment's engines are those that are started, where it looks for them."""
    assert {each.name for each in engines} == servers.keys()
    for engine in engines:
        host, server = servers[engine.name]
        words = server.get("command") or server["args"]
        assert engine.agent == f"https://{host}:8100"
        assert "--listen=0.0.0.0:8100" in words
        assert any(word.startswith("--secret-file=") for word in words)


def test_the_manifests_name_what_is_there() -> None:
    secrets, maps = named("Secret"), named("ConfigMap")
    for name, pod in pods().items():
        claims = {
            claim["metadata"]["name"]
            for claim in named("StatefulSet")
            .get(name, {})
            .get("spec", {})
            .get("volumeClaimTemplates", ())
        }
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        (container,) = pod["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == volumes.keys() | claims, name
        for volume in volumes.values():
            if (claim := volume.get("persistentVolumeClaim")) is not None:
                assert claim["claimName"] in named("PersistentVolumeClaim")
            if (secret := volume.get("secret")) is not None:
                held = secrets[secret["secretName"]]["stringData"]
                assert {item["key"] for item in secret["items"]} <= held.keys()
                assert not secret["defaultMode"] & 0o004, "all may read the secret"
            if (config := volume.get("configMap")) is not None:
                assert config["name"] in maps
        for variable in container.get("env", ()):
            if "secretKeyRef" in variable.get("valueFrom", {}):
                key = variable["valueFrom"]["secretKeyRef"]
                assert key["key"] in secrets[key["name"]]["stringData"]
        if "args" in container:
            check_command(container["args"])


def test_services_and_sets_select_their_pods() -> None:
    labels = []
    for each in manifests():
        if each["kind"] in {"Deployment", "StatefulSet"}:
            made = each["spec"]["template"]["metadata"]["labels"]
            assert each["spec"]["selector"]["matchLabels"] == made
            labels.append(made)
        if each["kind"] == "StatefulSet":
            service = named("Service")[each["spec"]["serviceName"]]["spec"]
            assert (service["clusterIP"], service["selector"]) == ("None", made)
    for service in named("Service").values():
        assert service["spec"]["selector"] in labels


def test_the_manifests_deployment_has_the_engines_of_the_set(tmp_path: Path) -> None:
    path = tmp_path / "batchrun.yaml"
    path.write_text(named("ConfigMap")["batchrun"]["data"]["batchrun.yaml"])
    engines = load_deployment(path).engines
    spec = named("StatefulSet")["engine"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    names = [f"engine-{number}" for number in range(spec["replicas"])]

    check_engines(engines, {name: (f"{name}.{spec['serviceName']}", container) for name in names})


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_what_there_is(path: Path) -> None:
    (start,) = re.findall(r"^ExecStart=/usr/bin/env (.*)$", path.read_text("utf-8"), re.MULTILINE)
    program, *arguments = start.split()
    assert program in {"batchrun", "ray"}
    if program == "batchrun":
        check_command([each for each in arguments if not each.startswith("$")])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_takes_every_unit(tmp_path: Path, path: Path) -> None:
    unit = tmp_path / path.name.replace("@.", "@x.")
    unit.write_text(path.read_text("utf-8"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_an_image_keeps_belongs_to_who_runs_in_it(path: Path) -> None:
    text = path.read_text("utf-8")
    kept = re.findall(r"/[\w./]+", " ".join(re.findall(r"^VOLUME (.*)$", text, re.MULTILINE)))
    (made,) = re.findall(
        r"install --directory --owner batchrun --mode 700 (.*)$", text, re.MULTILINE
    )

    assert kept and set(kept) == set(made.split())
    assert "\nUSER batchrun\n" in text


def test_only_the_head_of_a_cluster_is_told_what_only_a_head_takes() -> None:
    """Ray refuses to start a node that is told of the dashboard, and a head that is not told how
    it was described starts no nodes."""
    (document,) = documents(DEPLOY / "ray" / "cluster.yaml")
    unit = (DEPLOY / "systemd" / "batchrun-ray@.service").read_text("utf-8")
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    head, node = (document[f"{kind}_start_ray_commands"][-1] for kind in ("head", "worker"))

    assert "--include-dashboard=false" in head and "--autoscaling-config=" in head
    for text in (node, start):
        assert "dashboard" not in text and "--head" not in text
    assert "# RAY_OPTIONS=--head --port=6379 --num-cpus=0 --include-dashboard=false\n" in unit


def test_ray_is_asked_for_a_token_and_for_time_wherever_it_is_started() -> None:
    cluster = (DEPLOY / "ray" / "cluster.yaml").read_text("utf-8")
    unit = (DEPLOY / "systemd" / "batchrun-ray@.service").read_text("utf-8")
    (document,) = documents(DEPLOY / "ray" / "cluster.yaml")
    starts = [
        command
        for key in ("head_start_ray_commands", "worker_start_ray_commands")
        for command in document[key]
        if "ray start" in command
    ]
    assert len(starts) == 2 and cluster.count("ray start") == 2
    for text in (*starts, unit):
        assert "RAY_AUTH_MODE=token" in text
        assert "RAY_worker_niceness=0" in text
        assert "RAY_gcs_rpc_server_reconnect_timeout_s=86400" in text
