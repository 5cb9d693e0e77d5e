"""The command line that starts vLLM, and the checks made before it."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from batchrun.engine.command import (
    ManagedSettings,
    VllmBuild,
    build_argv,
    build_env,
    check_model,
    check_port_free,
    find_vllm,
    prepare_command,
)
from batchrun.errors import ConfigError, EngineError
from batchrun.vllm_waiting import NAPPING, WAIT_VARIABLE


def make_settings(folder: Path, **changes: object) -> ManagedSettings:
    fields = {"name": "e", "model": "org/m", "port": 1, "run_dir": folder, "log_dir": folder}
    return ManagedSettings(**{**fields, **changes})  # type: ignore[arg-type]


def make_build(folder: Path, *, is_cpu: bool = True) -> VllmBuild:
    return VllmBuild(folder, "0.32.0", is_cpu=is_cpu)


def test_the_cpu_build_gets_the_flags_it_needs(tmp_path: Path) -> None:
    argv = build_argv(make_settings(tmp_path), make_build(tmp_path), {})
    assert {"--enforce-eager", "--dtype=float32", "--scheduling-policy=priority"} <= set(argv)
    assert any(arg.startswith("--kv-cache-memory-bytes=") for arg in argv)


def test_the_gpu_build_gets_none_of_the_cpu_flags(tmp_path: Path) -> None:
    argv = build_argv(make_settings(tmp_path), make_build(tmp_path, is_cpu=False), {})
    assert not {"--enforce-eager", "--dtype=float32"} & set(argv)
    assert not any(arg.startswith("--kv-cache-memory-bytes") for arg in argv)


def test_the_users_arguments_come_last_and_verbatim(tmp_path: Path) -> None:
    extra = ("--dtype", "bfloat16", "--additional-config", '{"a": "b c"}')
    argv = build_argv(make_settings(tmp_path, vllm_args=extra), make_build(tmp_path), {})
    assert argv[-4:] == extra


@pytest.mark.parametrize(
    ("vllm_args", "env"),
    [
        (("--kv-cache-memory-bytes=5",), {}),
        (("--kv_cache_memory_bytes", "5"), {}),
        (("--gpu-memory-utilization", "0.5"), {}),
        ((), {"VLLM_CPU_KVCACHE_SPACE": "4"}),
    ],
)
def test_our_kv_size_gives_way_to_the_users(
    tmp_path: Path, vllm_args: tuple[str, ...], env: dict[str, str]
) -> None:
    argv = build_argv(make_settings(tmp_path, vllm_args=vllm_args), make_build(tmp_path), env)
    assert f"--kv-cache-memory-bytes={2 * 1024**3}" not in argv


@pytest.mark.parametrize(
    ("has_launcher", "module"),
    [
        (True, "vllm.entrypoints.launchers.api_server.entry"),
        (False, "vllm.entrypoints.openai.api_server"),
    ],
)
def test_the_server_module_is_the_one_this_vllm_has(
    tmp_path: Path, *, has_launcher: bool, module: str
) -> None:
    if has_launcher:
        launcher = tmp_path / "entrypoints/launchers/api_server/entry.py"
        launcher.parent.mkdir(parents=True)
        launcher.touch()
    assert module in build_argv(make_settings(tmp_path), make_build(tmp_path), {})


def test_adapters_come_before_the_users_arguments(tmp_path: Path) -> None:
    adapters = {"support": "/adapters/support", "hub": "org/adapter"}
    settings = make_settings(tmp_path, adapters=adapters, vllm_args=("--max-loras", "2"))
    argv = build_argv(settings, make_build(tmp_path), {})
    modules = ("--enable-lora", "--lora-modules", "support=/adapters/support", "hub=org/adapter")
    assert argv[-6:] == (*modules, "--max-loras", "2")
    assert "--enable-lora" not in build_argv(make_settings(tmp_path), make_build(tmp_path), {})


@pytest.mark.parametrize("model", ["model", "~model"])
def test_a_model_folder_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    (tmp_path / model).mkdir()
    monkeypatch.chdir(tmp_path)
    argv = build_argv(make_settings(tmp_path, model=f"./{model}"), make_build(tmp_path), {})
    assert f"--model={tmp_path / model}" in argv
    assert f"--served-model-name=./{model}" in argv
    with pytest.raises(EngineError, match=r"it has no config\.json"):
        check_model(f"./{model}")


def test_the_environment_leaves_our_own_variables_out(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, env={"DO_NOT_TRACK": "0", "OMP_NUM_THREADS": "2"})
    env = build_env(settings, {"PATH": "/bin", "BATCHRUN_API_KEY": "secret"})
    assert env == {
        "PATH": "/bin",
        "PYTHONSAFEPATH": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "0",
        "OMP_NUM_THREADS": "2",
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
        "VLLM_MAX_IMAGE_PIXELS": "64000000",
    }


@pytest.mark.parametrize("wanted", [None, "spin"])
def test_processes_of_a_cpu_engine_nap_unless_the_user_wants_it_otherwise(
    tmp_path: Path, wanted: str | None
) -> None:
    settings = make_settings(tmp_path, python=Path(sys.executable))
    if wanted is not None:
        settings = replace(settings, env={WAIT_VARIABLE: wanted})
    assert prepare_command(settings).env[WAIT_VARIABLE] == (wanted or NAPPING)


def test_a_missing_model_folder_gives_one_line(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="does not exist; correct `model`"):
        check_model(str(tmp_path / "none"))


def test_a_folder_without_a_model_gives_one_line(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"it has no config\.json"):
        check_model(str(tmp_path))


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B", "gpt2"])
def test_a_hub_id_is_left_to_the_engine(model: str) -> None:
    check_model(model)


def test_a_missing_python_gives_one_line(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="does not exist; correct `python`"):
        find_vllm(tmp_path / "bin" / "python")


def test_a_python_that_fails_gives_one_line() -> None:
    with pytest.raises(EngineError, match="does not run"):
        find_vllm(Path("/bin/false"))


def test_a_python_without_vllm_is_told_how_to_install_it(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {Path(sys.executable).resolve()} -S -E "$@"\n')
    bare.chmod(0o700)
    with pytest.raises(EngineError, match=r"run `batchrun engine install --cpu`"):
        prepare_command(make_settings(tmp_path, python=bare))


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port} on 127.0.0.1"):
            check_port_free("127.0.0.1", port)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 65])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="engine name"):
        make_settings(tmp_path, name=name)


def test_a_file_of_the_callers_is_no_module_of_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json.py", "types.py"):
        (tmp_path / name).write_text("raise SystemExit('of the caller')")
    monkeypatch.chdir(tmp_path)

    assert find_vllm(Path(sys.executable)) is not None
