"""What a job writes is what the same vLLM answers to the same prompts, one at a time."""

from __future__ import annotations

import json
from random import Random

import openai
import pytest
from deployment_rig import DeploymentRig

from batchrun.engine.command import ManagedSettings
from batchrun.samples.prose import sentence, sentence_pool

NUM_ROWS = 32
NUM_TOKENS = 24

JOB_FILE = f"""\
name: greedy
input:
  path: rows.parquet
  id: id
  messages:
    - {{role: user, content: "{{{{ text }}}}"}}
request: {{max_tokens: {NUM_TOKENS}, temperature: 0, ignore_eos: true, return_token_ids: true}}
output: {{path: out.parquet, body: true}}
"""


@pytest.mark.engine
def test_greedy_outputs_of_a_job_equal_those_of_single_calls(
    rig: DeploymentRig, vllm_engine: ManagedSettings
) -> None:
    texts = prompts()
    rig.configure({"attach": vllm_engine.base_url, "priority": True})
    rig.write_rows(texts)
    rig.write_job(JOB_FILE)

    done = rig.call("run", "job.yaml", "--strict")

    assert done.returncode == 0, done.stderr
    bodies = [json.loads(row["body"]) for row in rig.output()]
    got = [body["choices"][0]["token_ids"] for body in bodies]
    assert [len(tokens) for tokens in got] == [NUM_TOKENS] * NUM_ROWS
    assert got == one_at_a_time(vllm_engine, texts)


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.slow
def test_our_scheduler_changes_no_token(rig: DeploymentRig, vllm_engine: ManagedSettings) -> None:
    texts = prompts()
    scarce_kv = ["--kv-cache-memory-bytes=16777216", "--max-model-len=8192"]
    rig.configure({"port": rig.engine_port, "vllm_args": scarce_kv}, model="tiny", policy="echo")
    rig.write_rows(texts)
    rig.write_job(JOB_FILE)

    done = rig.call("run", "job.yaml", "--strict")

    assert done.returncode == 0, done.stderr
    bodies = [json.loads(row["body"]) for row in rig.output()]
    got = [body["choices"][0]["token_ids"] for body in bodies]
    assert got == one_at_a_time(vllm_engine, texts)


def prompts() -> list[str]:
    """Rows of very different lengths, many of which share a document."""
    rng = Random(7)
    documents = [" ".join(sentence_pool(rng, 40 + 40 * i)) for i in range(4)]
    texts = [f"{documents[i % 4]}\n\nQuestion: {sentence(rng)}" for i in range(NUM_ROWS // 2)]
    texts += [" ".join(sentence_pool(rng, 1 + i % 12)) for i in range(NUM_ROWS - len(texts))]
    rng.shuffle(texts)
    return texts


def one_at_a_time(engine: ManagedSettings, texts: list[str]) -> list[list[int]]:
    """Token ids of single calls that hit nothing in the prefix cache."""
    client = openai.OpenAI(base_url=f"{engine.base_url}/v1", api_key="none")
    answers: list[list[int]] = []
    for number, text in enumerate(texts):
        completion = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": text}],
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body={
                "ignore_eos": True,
                "return_token_ids": True,
                "cache_salt": f"alone-{number}",
            },
        )
        choice = completion.choices[0].model_dump()
        answers.append(choice["token_ids"])
    return answers
