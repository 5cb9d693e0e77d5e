"""What is read from an engine's log: stages, and the line that says why it ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchrun.engine.process import LogFollower, find_last_useful_line, find_stage, is_out_of_memory

CORE = "(EngineCore pid=5298) ERROR 11-21 01:41:42 [core.py:1510] "
WORKER = "(VllmWorker-0 pid=5310) ERROR 11-21 01:41:40 [multiproc_executor.py:953] "
MEMORY = (
    "ValueError: Available memory on node 0 (5.91/7.21 GiB) on startup is less than desired CPU "
    "memory utilization (0.92, 6.64 GiB)."
)
DEAD_WORKER = f"""
{WORKER}Traceback (most recent call last):
{WORKER}  File "cpu_worker.py", line 83, in __init__
{WORKER}    raise ValueError(
{WORKER}{MEMORY}
{CORE}Exception: WorkerProc initialization failed due to an exception in a background process. \
See stack trace for root cause.
Traceback (most recent call last):
  File "entry.py", line 236, in <module>
    main()
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}

"""


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        ("INFO [model.py:733] Resolved architecture: LlamaForCausalLM", "starting the engine core"),
        ("INFO [cpu_model_runner.py:68] Starting to load model /m...", "loading weights"),
        (
            "Loading safetensors checkpoint shards:  40% Completed | 2/5 [00:01<00:02]",
            "loading weights 40 %",
        ),
        (
            "INFO [cpu_worker.py:260] Explicitly set 1 GiB for KV cache",
            "allocating KV cache",
        ),
        ("INFO [gpu_worker.py] GPU KV cache size: 262,144 tokens", "allocating KV cache"),
        ("INFO [entry.py:140] Starting vLLM server on http://x:1", "starting the API server"),
        ("INFO:     Application startup complete.", "ready"),
        ("INFO [launcher.py:195] Route: /docs, Methods: GET", None),
        ("", None),
    ],
)
def test_the_stage_is_found_in_a_line(line: str, stage: str | None) -> None:
    assert find_stage(line) == stage


REFUSED = """\
(EngineCore pid=7) ERROR 11-21 17:00:00 [core.py:1518] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-21 17:00:00 [core.py:1518] batchrun.errors.ConfigError: \
batchrun's scheduler cannot be combined with pipeline parallelism
(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (DEAD_WORKER, MEMORY),
        ("", ""),
        ("\n\n   \n", ""),
        (REFUSED, "batchrun's scheduler cannot be combined with pipeline parallelism"),
        ("first\nsecond\n", "second"),
        ("\x1b[31mred words\x1b[0m\n", "red words"),
        (
            "usage: api_server [-h]\napi_server: error: unrecognized arguments: --x\n",
            "api_server: error: unrecognized arguments: --x",
        ),
        ("cause\nLoading:  50%|#####     | 1/2 [00:01<00:01, 1.0it/s]\n", "cause"),
        (
            'cannot go on\nTraceback (most recent call last):\n  File "x"\n    main()\n',
            "cannot go on",
        ),
        ("RuntimeError: See root cause above.\n", "RuntimeError: See root cause above."),
        (
            "pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, no such model\n",
            "pydantic_core.ValidationError: 1 validation error for ModelConfig: "
            "Value error, no such model",
        ),
    ],
)
def test_the_last_useful_line_names_the_cause(text: str, line: str) -> None:
    assert find_last_useful_line(text) == line


def test_a_very_long_line_is_cut() -> None:
    assert len(find_last_useful_line("x" * 10_000)) == 400


@pytest.mark.parametrize(
    "line",
    [
        MEMORY,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "OSError: [Errno 12] Cannot allocate memory",
        "ValueError: No available memory for the cache blocks.",
    ],
)
def test_running_out_of_memory_is_recognised(line: str) -> None:
    assert is_out_of_memory(line)


def test_other_ends_are_not_taken_for_memory() -> None:
    assert not is_out_of_memory("OSError: [Errno 98] address already in use")


def test_a_follower_sees_only_what_came_after_it(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("of an earlier start\n")
    follower = LogFollower(log)
    with log.open("a") as file:
        file.write("one\ntw")
    assert follower.read_new_lines() == ["one"]
    with log.open("a") as file:
        file.write("o\n")
    assert follower.read_new_lines() == ["two"]
    assert follower.read_tail() == "one\ntwo\n"


def test_a_follower_of_a_log_that_is_not_there_reads_nothing(tmp_path: Path) -> None:
    follower = LogFollower(tmp_path / "none.log")
    assert follower.read_new_lines() == []
    assert follower.read_tail() == ""
