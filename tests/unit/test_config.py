"""batchrun.yaml, BATCHRUN_* and flags: what they make, and one clear line for each mistake."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from postgres_server import NOBODY

from batchrun.cache.eviction import EVICTIONS
from batchrun.config import Deployment, SloConfig, load_deployment, load_home
from batchrun.control.starting import read_deployment
from batchrun.daemon.plugin import profile_path
from batchrun.daemon.supervisor import make_engine
from batchrun.engine.engine import ManagedEngine
from batchrun.errors import ConfigError
from batchrun.home import DEFAULT_HOME, Home
from batchrun.scheduling.policies import POLICIES, QUEUES


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No batchrun.yaml and no variables of the caller's are in the way."""
    for name in ("HOME", "CONFIG", "MODEL", "LISTEN"):
        monkeypatch.delenv(f"BATCHRUN_{name}", raising=False)
    monkeypatch.chdir(tmp_path)


def load(text: str, **flags: str) -> Deployment:
    """The deployment of a batchrun.yaml of this text in the present folder."""
    Path("batchrun.yaml").write_text(text)
    return load_deployment(None, **flags)


def test_without_a_file_batchrun_starts_one_engine_with_the_tiny_model() -> None:
    deployment = load_deployment(None)

    assert (deployment.model, deployment.listen) == ("tiny", "127.0.0.1:8000")
    assert [engine.is_vllm for engine in deployment.engines] == [True]


def test_a_folder_that_may_not_be_searched_holds_no_file(tmp_path: Path) -> None:
    def load_as_nobody() -> None:
        if os.getuid() == 0:
            os.setuid(NOBODY)
        load_deployment(None, model="of/a-hub")

    tmp_path.chmod(0)
    child = multiprocessing.get_context("fork").Process(target=load_as_nobody)
    child.start()
    child.join()
    tmp_path.chmod(0o700)

    assert child.exitcode == 0


def test_a_file_of_comments_only_is_a_file_of_defaults() -> None:
    assert load("# listen: 127.0.0.1:9000\n").listen == "127.0.0.1:8000"


def test_flags_come_before_variables_and_variables_before_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "model: of-the-file\nlisten: 127.0.0.1:1\n"
    monkeypatch.setenv("BATCHRUN_MODEL", "of-the-variable")
    monkeypatch.setenv("BATCHRUN_LISTEN", "127.0.0.1:2")
    monkeypatch.setenv("BATCHRUN_GATEWAY_URL", "http://10.1.2.3:8000")

    deployment = load(f"{text}gateway_url: http://file:8000\n", listen="127.0.0.1:3")

    assert (deployment.model, deployment.listen) == ("of-the-variable", "127.0.0.1:3")
    assert deployment.gateway_for_others == "http://10.1.2.3:8000"


def test_a_variable_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.yaml").write_text("model: other\n")
    monkeypatch.setenv("BATCHRUN_CONFIG", str(tmp_path / "other.yaml"))

    assert load("model: ignored\n").model == "other"


@pytest.mark.parametrize("model", ["llama", "~llama"])
def test_a_model_folder_is_relative_to_the_file(tmp_path: Path, model: str) -> None:
    config = tmp_path / "deploy" / "batchrun.yaml"
    (config.parent / model).mkdir(parents=True)
    config.write_text(f"model: ./{model}\n")

    deployment = load_deployment(config)

    assert deployment.model == str(config.parent / model)
    assert deployment.model_folder(Home(tmp_path)) == config.parent / model


MODELS = """
model: ./small
engines:
  - {name: a}
  - {name: b, model: ./large, adapters: {support: ./support, hub: org/adapter}}
  - {name: c, model: tiny, served_model_name: toy}
"""


def test_engines_have_models_and_adapters_of_their_own(tmp_path: Path) -> None:
    for folder in ("small", "large"):
        (tmp_path / folder).mkdir()
    (tmp_path / "batchrun.yaml").write_text(MODELS)
    home, deployment = Home(tmp_path / "home"), load_deployment(tmp_path / "batchrun.yaml")

    engines = [make_engine(deployment, home, index) for index in range(3)]

    settings = [each.settings for each in engines if isinstance(each, ManagedEngine)]
    served = [(each.served_model_name, each.model) for each in settings]
    assert served == [
        ("small", str(tmp_path / "small")),
        ("large", str(tmp_path / "large")),
        ("toy", str(home.models / "tiny")),
    ]
    assert settings[1].adapters == {"support": str(tmp_path / "support"), "hub": "org/adapter"}
    assert len({profile_path(deployment, each, home) for each in deployment.engines}) == 3
    folders = [deployment.model_folder(home, name) for name in ("support", "toy", "default", "x")]
    small, large = tmp_path / "small", tmp_path / "large"
    assert folders == [large, home.models / "tiny", small, small]


@pytest.mark.parametrize("kind", ["command: [serve]", "attach: http://h:1", "agent: https://h:1"])
@pytest.mark.parametrize("key", ["model: m", "served_model_name: m", "adapters: {a: b}"])
def test_a_model_belongs_to_a_vllm_that_batchrun_starts(kind: str, key: str) -> None:
    name = key.partition(":")[0]
    with pytest.raises(ConfigError, match=f"'{name}' belongs to a vLLM that batchrun starts"):
        load(f"engines:\n  - {kind}\n    {key}\n")


def test_an_alias_of_a_number_is_text_only_where_text_is_meant() -> None:
    text = (
        "window: {requests: &n 0x100}\nengines:\n  - {name: a, vllm_args: [--max-num-seqs, *n]}\n"
        "  - {name: b, env: {PORT: &p 8_001}, port: *p}\n  - &c {name: c, env: {ID: 007}}\n"
        "  - {<<: *c, name: d}\n  - {name: e, <<: {env: {ID: 007}}}\n"
    )

    deployment = load(text)

    a, b, c, d, e = deployment.engines
    assert (deployment.window.requests, a.vllm_args) == (256, ("--max-num-seqs", "0x100"))
    assert (b.port, b.env) == (8001, {"PORT": "8_001"})
    assert c.env == d.env == e.env == {"ID": "007"}


def test_numbers_among_arguments_and_variables_are_text_as_they_stand_there() -> None:
    text = (
        "engines:\n  - name: 01\n    vllm_args: [--max-model-len, 8192, --revision, 12e4567]\n"
        "    env: {OMP_NUM_THREADS: 2, ID: 007, TAG: 1.10, ROWS: 1_000, MASK: 0x1F}\n"
        "on_done: [tell, 1e5]\n"
    )

    deployment = load(text)

    (engine,) = deployment.engines
    assert engine.name == "01"
    assert engine.vllm_args == ("--max-model-len", "8192", "--revision", "12e4567")
    assert list(engine.env.values()) == ["2", "007", "1.10", "1_000", "0x1F"]
    assert deployment.on_done is not None and deployment.on_done.command == ("tell", "1e5")


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("model: tiny\n", SloConfig(ttft_s=1.0, tpot_s=0.05)),
        ("slo: {ttft_s: 2}\n", SloConfig(ttft_s=2.0, tpot_s=0.05)),
        ("slo: auto\n", "auto"),
    ],
)
def test_promises_are_bounds_or_left_to_the_calibration(text: str, slo: object) -> None:
    assert load(text).slo == slo


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("modell: tiny\n", ":1: modell: unknown key (did you mean 'model'?)"),
        ("model: 5\n", ":1: model: must be text (got 5)"),
        ("engines:\n  - nme: a\n", ":2: engines[0].nme: unknown key (did you mean 'name'?)"),
        ("engines: []\n", ":1: engines: must list an engine"),
        ("engines: {}\n", ":1: engines: must be a list"),
        ("engines:\n  - one\n", ":2: engines[0]: must be a mapping of keys to values"),
        ("engines:\n  - {name: a}\n  - {name: a}\n", ":1: two engines have the same 'name'"),
        (
            "engines:\n  - {name: a, attach: 'http://h:1'}\n  - {name: b, attach: 'http://h:1'}\n",
            ":1: two engines have the same 'attach', http://h:1: one engine, twice",
        ),
        (
            "engines:\n  - {name: a, agent: 'https://h:1'}\n  - {name: b, agent: 'https://h:1'}\n",
            ":1: two engines have the same 'agent', https://h:1: one engine, twice",
        ),
        ("engines:\n  - {name: a b}\n", ":2: engines[0].name: must be 1 to 64 letters"),
        ("engines:\n  - {port: 70000}\n", ":2: engines[0].port: input should be less than"),
        ("engines:\n  - {attach: nonsense}\n", ":2: engines[0].attach: must be a URL such as"),
        (
            "engines:\n  - {attach: 'http://127.0.0.1:1', port: 3}\n",
            ":2: engines[0]: 'port' belongs to an engine that batchrun starts",
        ),
        ("engines:\n  - {api_key: x}\n", ":2: engines[0]: 'api_key' belongs to an engine with"),
        ("engines:\n  - {vllm_args: --foo}\n", ":2: engines[0].vllm_args: must be a list"),
        ("engines:\n  - {command: []}\n", ":2: engines[0].command: must not be empty"),
        ("listen: 8000\n", ":1: listen: must be HOST:PORT, for example"),
        ("listen: 127.0.0.1:99999\n", ":1: listen: must be HOST:PORT, for example"),
        ("window: {requests: 0}\n", ":1: window.requests: input should be greater than"),
        ("slo: fast\n", ":1: slo: input should be 'auto' (got 'fast')"),
        ("slo:\n  ttft_s: -1\n", ":2: slo.ttft_s: input should be greater than 0"),
        ("slo: {ttft_s: 1e12}\n", ":1: slo.ttft_s: "),
        ("slo: {jct_s: 1}\n", ":1: slo: jct_s must be more than ttft_s, which is 1"),
        ("slo_classes: {a b: {}}\n", ":1: slo_classes.a b: must be 1 to 64 letters"),
        ("slo_classes:\n  default: {}\n", ":2: slo_classes.default: 'default' is the class of all"),
        ("slo_classes: {a: {tpot_s: 0}}\n", ":1: slo_classes.a.tpot_s: input should be greater"),
        (
            "slo_classes: {a: {ttft_s: .inf}}\n",
            ":1: slo_classes.a.ttft_s: input should be a finite",
        ),
        ("slo_classes: {a: {x_s: 1}}\n", ":1: slo_classes.a.x_s: unknown key"),
        (
            "slo_classes:\n  a: {jct_s: 0.5}\n",
            ":1: slo_classes.a: jct_s must be more than ttft_s, which is 1",
        ),
        ("online_cost: 1\n", ":1: online_cost: input should be greater than 1"),
        ("model: tiny\nonline_cost: fast\n", ":2: online_cost: must be a number (got 'fast')"),
        ("online_cost: .inf\n", ":1: online_cost: "),
        ("slo: {tpot: 1}\n", ":1: slo.tpot: unknown key (did you mean 'tpot_s'?)"),
        ("gateway_workers: true\n", ":1: gateway_workers: must be a number (got True)"),
        ("window: {requests: true}\n", ":1: window.requests: must be a number (got True)"),
        ("slo: {ttft_s: true}\n", ":1: slo.ttft_s: must be a number (got True)"),
        ("model: a\nreserve: false\n", ":2: reserve: must be a number (got False)"),
        ('listen: 127.0.0.1:1\nmodel: "a\\0b"\n', ":2: model: holds a null character; take it out"),
        ("gateway_workers: many\n", ":1: gateway_workers: must be a whole number (got 'many')"),
    ],
)
def test_a_mistake_is_one_line_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)

    assert str(caught.value).startswith(f"batchrun.yaml{problem}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "model: tiny\npolicy: ecko\n",
            f":2: policy: must be one of {', '.join(POLICIES)}, vllm, not 'ecko' "
            "(did you mean 'echo'?)",
        ),
        ("policy: 5\n", ":1: policy: must be text (got 5)"),
        ("eviction: mru\n", f":1: eviction: must be one of {', '.join(EVICTIONS)}, not 'mru'"),
        (
            "online_queue: lifo\n",
            f":1: online_queue: must be one of {', '.join(QUEUES)}, not 'lifo'",
        ),
        ("forecast_rule: mean\n", ":1: forecast_rule: must be one of mean-sigma, quantile,"),
        ("reserve: 1\n", ":1: reserve: input should be less than 1 (got 1)"),
        ("reserve: most\n", ":1: reserve: input should be 'forecast' (got 'most')"),
    ],
)
def test_a_name_that_the_scheduler_lacks_is_one_line_with_its_place(
    text: str, problem: str
) -> None:
    Path("batchrun.yaml").write_text(text)

    with pytest.raises(ConfigError) as caught:
        read_deployment(None)

    assert str(caught.value).startswith(f"batchrun.yaml{problem}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("policy", [*POLICIES, "vllm"])
def test_every_policy_may_stand_in_the_file(policy: str) -> None:
    Path("batchrun.yaml").write_text(f"policy: {policy}\n")

    assert read_deployment(None).policy == policy


def test_a_wrong_flag_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^listen: must be HOST:PORT"):
        load_deployment(None, listen="nonsense")


def test_a_file_that_was_asked_for_must_be_there() -> None:
    with pytest.raises(ConfigError, match=r"^absent\.yaml: no such file"):
        load_deployment(Path("absent.yaml"))


def test_the_home_is_the_flag_else_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHRUN_HOME", str(tmp_path / "variable"))

    assert load_home(None).path == tmp_path / "variable"
    assert load_home(Path("flag")).path == tmp_path / "flag"
    monkeypatch.setenv("BATCHRUN_HOME", "")
    assert load_home(None).path == DEFAULT_HOME.expanduser()
    with pytest.raises(ConfigError, match=r"^~nobody-here/a: no user of this name"):
        load_home(Path("~nobody-here/a"))
