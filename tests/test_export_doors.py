"""Hosts and sites at the doors: the command and the service write the same files."""

from __future__ import annotations

import json

import pytest
from fastapi.testclient import TestClient

from meshwright.api.cli import run
from meshwright.api.rest import create_app

BODY = {
    "model": "llama-3.2-1b",
    "cluster": "16xH100",
    "workload": {"global_batch_size": 64, "seq_length": 2048},
    "fix": {"tp": 1, "pp": 1, "cp": 1, "micro_batch_size": 1},
}
HOSTS = {"b": "H100-SXM", "a": "H100-SXM"}
SITE = {"account": "llm", "environment": {"A": "x y"}, "arguments": ["--lr", "2e-4"]}


@pytest.fixture(scope="module")
def service():
    client = TestClient(create_app())
    return client, client.post("/v1/plans", json=BODY).json()


def test_the_command_writes_what_the_service_answers(service, tmp_path, capsys):
    client, plan = service
    at = f"/v1/plans/{plan['run']['id']}/export/megatron"
    answer = client.post(at, json={"launcher": "slurm", "hosts": HOSTS, "site": SITE}).json()["files"]
    for name, data in {"plan.json": plan, "site.json": SITE, "hosts.json": HOSTS}.items():
        (tmp_path / name).write_text(json.dumps(data))
    place = ["--site", str(tmp_path / "site.json"), "--hosts", str(tmp_path / "hosts.json")]
    assert run(["export", str(tmp_path / "plan.json"), "--launcher", "slurm", *place, "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert {**files, "plan.json": ""} == {**answer, "plan.json": ""}
    assert "#SBATCH --nodelist=b,a" in files["job.sbatch"]
    assert "#SBATCH --account=llm" in files["job.sbatch"]
    assert "export A='x y'" in files["site.sh"]
    assert client.get(at).json()["files"] == client.post(at, json={}).json()["files"]


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"hosts": ["only"]}, "/hosts"),
        ({"hosts": {"a": "H100-SXM", "b": "TPU"}}, "/hosts/b"),
        ({"hosts": 3}, "/hosts"),
        ({"site": {"account": "a b"}}, "/site/account"),
        ({"site": {"arguments": ["--tensor-model-parallel-size", "2"]}}, "/site/arguments"),
        ({"launcher": "mpirun"}, "/launcher"),
        ({"place": 1}, "/place"),
    ],
)
def test_faults_name_the_field(service, body, pointer):
    client, plan = service
    answer = client.post(f"/v1/plans/{plan['run']['id']}/export/megatron", json=body)
    assert answer.status_code == 422
    assert [item["pointer"] for item in answer.json()["errors"]] == [pointer]
