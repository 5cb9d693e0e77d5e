"""Batches of OpenAI's API from upload to download: gateway, daemon, fake engine."""

from __future__ import annotations

from batch_client import chat_lines, deployment_client
from deployment_rig import DeploymentRig


def test_a_batch_goes_from_upload_to_download(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    with deployment_client(rig) as client:
        made = client.create(chat_lines(40), metadata={"team": "eval"})
        assert (made.status, made.output_file_id, made.errors) == ("validating", None, None)

        batch = client.wait_until_ended(made.id)

        assert (batch.status, batch.model, batch.error_file_id) == ("completed", "fake", None)
        assert batch.request_counts is not None and batch.request_counts.completed == 40
        lines = client.lines(batch.output_file_id)
    assert {line["custom_id"] for line in lines} == {f"row-{i}" for i in range(40)}
    assert all(line["response"]["body"]["choices"] for line in lines)
    (job,) = rig.ask("status")["jobs"]
    assert (job["id"], job["state"]) == (made.id, "completed")
