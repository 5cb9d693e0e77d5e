"""OpenAI's walk-through of its Batch API, as its users write it, with another `base_url`.

After https://github.com/openai/openai-cookbook/blob/main/examples/batch_processing.ipynb: an
answer in JSON for each of some films, joined to them by `custom_id`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from batch_rig import MODEL
from deployment_rig import DeploymentRig
from openai import OpenAI

FILMS = {
    "The Lighthouse": "Two keepers are alone with a storm and each other.",
    "Night Ferry": "A crossing takes longer than anyone on board remembers.",
    "Salt": "A family of harbour pilots falls out over a chart.",
}
SYSTEM_PROMPT = "Give the categories and a one-sentence summary of this film as JSON."


def film_tasks() -> list[dict[str, object]]:
    """The walk-through's requests: one for each film."""
    tasks: list[dict[str, object]] = []
    for index, (title, description) in enumerate(FILMS.items()):
        task: dict[str, object] = {
            "custom_id": f"task-{index}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": MODEL,
                "temperature": 0.1,
                "response_format": {"type": "json_object"},
                "messages": [
                    {"role": "system", "content": SYSTEM_PROMPT},
                    {"role": "user", "content": f"{title}: {description}"},
                ],
            },
        }
        tasks.append(task)
    return tasks


def test_the_walk_through_works(batch_rig: DeploymentRig, tmp_path: Path) -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{batch_rig.port}/v1", api_key="a key")

    file_name = tmp_path / "batch_tasks_movies.jsonl"
    with file_name.open("w") as file:
        for task in film_tasks():
            file.write(json.dumps(task) + "\n")

    with file_name.open("rb") as opened:
        batch_file = client.files.create(file=opened, purpose="batch")
    batch_job = client.batches.create(
        input_file_id=batch_file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
    )
    while batch_job.status not in {"completed", "failed", "expired", "cancelled"}:
        time.sleep(0.1)
        batch_job = client.batches.retrieve(batch_job.id)

    assert batch_job.output_file_id is not None, batch_job
    result = client.files.content(batch_job.output_file_id).content
    result_file_name = tmp_path / "batch_job_results_movies.jsonl"
    result_file_name.write_bytes(result)
    results = []
    with result_file_name.open() as lines:
        for line in lines:
            results.append(json.loads(line.strip()))
    answers = {}
    for res in results:
        index = int(res["custom_id"].split("-")[-1])
        title = list(FILMS)[index]
        answers[title] = res["response"]["body"]["choices"][0]["message"]["content"]
    client.close()

    assert set(answers) == set(FILMS)
    assert all(answers.values())
    assert len(set(answers.values())) == len(FILMS)
