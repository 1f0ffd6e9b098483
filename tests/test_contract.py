"""What scripts rely on: exit codes, clean output, the same answer every time and at every door."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from meshwright.api.cli import run
from meshwright.api.rest import create_app

COMMAND = str(Path(sys.executable).with_name("meshwright"))
INPUTS = ["llama-3.1-8b", "--cluster", "8xH100", "--global-batch-size", "64", "--seq-length", "4096"]
BODY: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "cluster": "8xH100",
    "workload": {"global_batch_size": 64, "seq_length": 4096},
}
LINE = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 128256 --tokenizer-type "
    "NullTokenizer --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 64 --bf16 --train-iters 10 "
    "--lr 1e-4 --min-lr 1e-5 --mock-data --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather"
)
ARGUMENTS = LINE.split()


def answer(argv: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    """The one JSON document on standard output."""
    got = run(argv)
    out, err = capsys.readouterr()
    assert got == code, out[-1000:] + err
    return json.loads(out)


def without_run(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != "run"}


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(create_app())


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    assert run(["plan", *INPUTS, "-o", str(file)]) == 0
    return file


def test_json_is_all_that_standard_output_holds(tmp_path: Path) -> None:
    argv = [COMMAND, "plan", *INPUTS, "--json", "--export", str(tmp_path / "run")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert done.stderr.splitlines() == [f"wrote {len(list((tmp_path / 'run').iterdir()))} files to {tmp_path / 'run'}"]


def test_the_same_request_has_the_same_answer(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = json.loads(plan_file.read_text())
    # a fresh process has other hash seeds, so that an order taken from a set would show
    argv = [COMMAND, "plan", *INPUTS, "--json"]
    second = json.loads(subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout)
    assert without_run(first) == without_run(second)
    assert first["run"]["candidates"] == second["run"]["candidates"]


def test_a_work_limit_cuts_the_same_way_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    cut = [answer(["plan", *INPUTS, "--work-limit", "1", "--json"], capsys) for _ in range(2)]
    assert without_run(cut[0]) == without_run(cut[1])
    assert not cut[0]["complete"]
    assert cut[0]["status"] == "feasible"


def test_both_doors_give_the_same_plan(client: TestClient, plan_file: Path) -> None:
    response = client.post("/v1/plans", json=BODY)
    assert response.status_code == 201
    document = response.json()
    assert without_run(document) == without_run(json.loads(plan_file.read_text()))

    where = response.headers["location"]
    assert client.get(where).json() == document
    again = client.post("/v1/plans", json={**BODY, "target": "megatron@0.19", "top": 5})
    assert again.status_code == 200
    assert again.headers["location"] == where
    assert again.json() == document
    assert client.post("/v1/plans", json={**BODY, "top": 2}).headers["location"] != where


def test_both_doors_give_the_same_estimate(
    client: TestClient, plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    degrees = {"tp": 2, "pp": 2, "micro_batch_size": 2, "recompute": "full"}
    options = ["--tp", "2", "--pp", "2", "--micro-batch-size", "2", "--recompute", "full"]
    mine = answer(["estimate", *INPUTS, *options, "--json"], capsys)
    response = client.post("/v1/estimates", json={**BODY, "degrees": degrees})
    assert response.status_code == 200, response.text
    assert without_run(response.json()) == without_run(mine)
    assert [mine["plan"][name] for name in ("tp", "pp", "cp", "dp", "micro_batch_size")] == [2, 2, 1, 2, 2]
    assert mine["plan"]["recompute"]["granularity"] == "full"
    assert sum(mine["estimate"]["breakdown_s"].values()) == pytest.approx(mine["estimate"]["step_time_s"], rel=1e-9)

    whole = client.post("/v1/estimates", json={**BODY, "plan": mine["plan"]})
    assert without_run(whole.json()) == without_run(mine)

    document = json.loads(plan_file.read_text())
    priced = answer(["estimate", str(plan_file), "--json"], capsys)
    assert priced["plan"] == document["plan"]
    response = client.post("/v1/estimates", json={"document": document})
    assert without_run(response.json()) == without_run(priced)


def test_arguments_of_the_framework_are_priced(client: TestClient, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "2"]
    document = answer(["estimate", "--cluster", "8xH100", "--json", "--", *ARGUMENTS, *options], capsys)
    assert [document["plan"][name] for name in ("tp", "pp", "dp", "sharding")] == [2, 2, 2, "zero1"]
    blocks = [stage["chunks"][0]["blocks"] for stage in document["plan"]["stages"]]
    assert blocks == [["embed", "decoder:0-15"], ["decoder:16-31", "head"]]  # Megatron's own split is even
    # the arguments spell Llama-3.1-8B, so the same plan of the preset costs the same
    preset = client.post("/v1/estimates", json={**BODY, "plan": document["plan"]}).json()
    assert document["inputs"]["model"]["name"] != preset["inputs"]["model"]["name"]
    assert document["estimate"] == preset["estimate"]
    named = answer(["estimate", "llama-3.1-8b", "--cluster", "8xH100", "--json", "--", *ARGUMENTS, *options], capsys)
    assert without_run(named) == without_run(preset)


def test_checks(client: TestClient, capsys: pytest.CaptureFixture[str]) -> None:
    legal = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    env = ["--env", "CUDA_DEVICE_MAX_CONNECTIONS=1"]
    good = answer(["check", "--world-size", "8", *env, "--json", "--", *ARGUMENTS, *legal], capsys)
    assert good == {
        "format": "megatron",
        "target": "megatron@0.19",
        "legal": True,
        "fits": None,
        "violations": [],
        "estimate": None,
        "best": None,
        "reason": None,
        "notes": [],
    }

    fitting = answer(["check", "--cluster", "8xH100", *env, "--json", "--", *ARGUMENTS, *legal], capsys)
    assert (fitting["legal"], fitting["fits"]) == (True, True)
    assert fitting["estimate"]["step_time_s"] > 0

    tight = answer(["check", "--cluster", "2xA10", *env, "--json", "--", *ARGUMENTS, *legal], capsys, code=3)
    assert (tight["legal"], tight["fits"]) == (True, False)

    wrong = ["--tensor-model-parallel-size", "3"]
    bad = answer(["check", "--world-size", "8", "--json", "--", *ARGUMENTS, *wrong], capsys, code=4)
    assert (bad["legal"], bad["fits"], bad["estimate"]) == (False, None, None)
    assert all(set(row) == {"rule", "message", "alternatives"} for row in bad["violations"])
    assert any("8" in row["message"] and "3" in row["message"] for row in bad["violations"])

    body = {"target": "megatron@0.19", "arguments": " ".join([*ARGUMENTS, *wrong]), "world_size": 8}
    response = client.post("/v1/checks", json=body)
    assert response.status_code == 200
    assert response.json() == bad


def test_arguments_that_the_parser_refuses_are_illegal(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, name in ((["--num-layerz", "2"], "num-layerz"), (["--num-layers", "two"], "num-layers")):
        verdict = answer(["check", "--world-size", "8", "--json", "--", *ARGUMENTS, *wrong], capsys, code=4)
        assert any(name in row["message"] for row in verdict["violations"]), verdict
        assert run(["check", "--world-size", "8", "--", *ARGUMENTS, *wrong]) == 4
        out, err = capsys.readouterr()
        assert out.startswith("ILLEGAL\n")
        assert name in out
        assert err == ""


def test_an_illegal_plan_is_exit_code_4_and_problem_422(client: TestClient, capsys: pytest.CaptureFixture[str]) -> None:
    # 32 query and 8 key/value heads cannot be cut into 3; 24 GPUs can
    argv = ["estimate", "llama-3.1-8b", "--cluster", "24xH100", "--global-batch-size", "64", "--seq-length", "4096"]
    document = answer([*argv, "--tp", "3", "--json"], capsys, code=4)
    assert document["violations"]
    assert len(document["errors"]) == len(document["violations"])
    response = client.post("/v1/estimates", json={**BODY, "cluster": "24xH100", "degrees": {"tp": 3}})
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["type"] == "urn:meshwright:problem:illegal-plan"
    assert response.json()["violations"] == document["violations"]


def test_what_does_not_fit_is_exit_code_3_and_a_document(
    client: TestClient, capsys: pytest.CaptureFixture[str]
) -> None:
    document = answer(["estimate", *INPUTS, "--tp", "1", "--micro-batch-size", "8", "--json"], capsys, code=3)
    assert document["status"] == "infeasible"
    assert not document["estimate"]["fits"]
    response = client.post("/v1/estimates", json={**BODY, "degrees": {"tp": 1, "micro_batch_size": 8}})
    assert response.status_code == 200
    assert without_run(response.json()) == without_run(document)
    planned = client.post("/v1/plans", json={**BODY, "model": "llama-2-70b", "cluster": "1xH100"})
    assert planned.status_code == 201
    assert planned.json()["status"] == "infeasible"
    where = planned.headers["location"]
    refused = client.get(f"{where}/export/megatron@0.19")
    assert refused.status_code == 409
    assert refused.headers["content-type"] == "application/problem+json"


def test_a_deadline_before_any_plan_is_exit_code_5(client: TestClient, capsys: pytest.CaptureFixture[str]) -> None:
    document = answer(["plan", *INPUTS, "--deadline", "0.000001s", "--json"], capsys, code=5)
    assert document["errors"][0]["pointer"] == "/deadline_s"
    response = client.post("/v1/plans", json={**BODY, "deadline_s": 1e-6})
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/problem+json"


def test_exports_are_the_same_at_both_doors(client: TestClient, plan_file: Path, tmp_path: Path) -> None:
    assert run(["export", str(plan_file), "--launcher", "slurm", "-o", str(tmp_path / "run")]) == 0
    written = {path.name: path.read_text() for path in (tmp_path / "run").iterdir()}
    where = client.post("/v1/plans", json=BODY).headers["location"]
    files = client.get(f"{where}/export/megatron@0.19", params={"launcher": "slurm"}).json()["files"]
    assert files.keys() == written.keys()
    same = {name for name in files if name != "plan.json"}  # it holds the run record
    assert {name: files[name] for name in same} == {name: written[name] for name in same}

    for options in ({"params": {"format": "zip", "launcher": "slurm"}}, {"headers": {"accept": "application/zip"}}):
        response = client.get(f"{where}/export/megatron", **options)
        assert response.headers["content-type"] == "application/zip"
        with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
            assert archive.testzip() is None
            if "params" in options:
                assert {name: archive.read(name).decode() for name in archive.namelist()} == files
    assert client.get(f"{where}/export/nonsense").status_code == 422
    assert client.get(f"{where}/export/megatron", params={"format": "tar"}).status_code == 422
    assert client.get(f"{where}/export/megatron", params={"launcher": "carrier-pigeon"}).status_code == 422


def test_the_catalog_is_the_same_at_both_doors(client: TestClient, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("gpus", "models", "targets", "links"):
        rows = answer(["catalog", kind, "--json"], capsys)
        assert client.get(f"/v1/catalog/{kind}").json() == {"items": rows}
        name = rows[0]["name"]
        assert client.get(f"/v1/catalog/{kind}/{name}").json() == answer(["catalog", kind, name, "--json"], capsys)
    names = answer(["catalog", "--json"], capsys)
    assert "H100-SXM" in names["gpus"]
    assert "llama-3.1-70b" in names["models"]
    assert "megatron@0.19" in names["targets"]
    # an alias with an organisation in it finds its preset
    assert client.get("/v1/catalog/models/meta-llama/Llama-3.1-70B").json()["name"] == "llama-3.1-70b"


def test_describe(capsys: pytest.CaptureFixture[str]) -> None:
    dense = answer(["describe", "llama-3.1-8b", "--seq-length", "4096", "--json"], capsys)
    assert dense["total_params"] == dense["active_params"] == 8_030_261_248
    # 6 FLOPs a matrix parameter and token (the embedding is a look-up), and 6*layers*heads*head_dim*length for causal
    # attention: 2 matrices x 2 FLOPs x 3 passes, half of the length seen
    matrices = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert dense["flops_per_token"] == pytest.approx(6 * matrices + 6 * 32 * 4096 * 4096, rel=1e-3)
    sparse = answer(["describe", "mixtral-8x7b", "--json"], capsys)
    assert sparse["total_params"] == 46_702_792_704
    assert sparse["layers_by_kind"] == {"gqa+moe": 32}
    assert (sparse["num_experts"], sparse["experts_per_token"]) == (8, 2)


def test_people_read_tables(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["plan", *INPUTS]) == 0
    out, err = capsys.readouterr()
    document = json.loads(plan_file.read_text())
    plan, figures = document["plan"], document["estimate"]
    assert err == ""
    assert f"TP{plan['tp']} PP{plan['pp']} CP{plan['cp']} DP{plan['dp']}" in out
    assert f"{figures['mfu']:.1%}" in out
    assert "80% interval" in out
    assert all(name in out for name, value in figures["breakdown_s"].items() if value > 0.001 * figures["step_time_s"])
    assert "Assumptions" in out
    assert "\x1b" not in out
    for argv in (["describe", "deepseek-v3"], ["catalog"], ["catalog", "gpus"], ["catalog", "gpus", "h100"]):
        assert run(argv) == 0
        assert capsys.readouterr().out.strip()


def test_the_service_describes_itself(client: TestClient) -> None:
    assert client.get("/healthz").json()["status"] == "ok"
    assert client.get("/docs").status_code == 200
    page = client.get("/openapi.json").json()
    paths = {"/v1/plans", "/v1/estimates", "/v1/checks", "/v1/plans/{plan_id}", "/v1/plans/{plan_id}/export/{target}"}
    assert paths < page["paths"].keys()
    text = json.dumps(page)
    refs = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert refs <= page["components"]["schemas"].keys()
    assert {"PlanBody", "EstimateBody", "CheckBody", "PlanDocument", "Problem"} <= refs


def test_a_full_store_forgets_the_oldest(plan_file: Path) -> None:
    from meshwright.api.plan_files import require_plan_file
    from meshwright.api.store import PlanStore

    document = require_plan_file(str(plan_file))
    store = PlanStore(capacity=2)
    store.put("a", document)
    store.put("b", document)
    assert store.get("a") is not None
    store.put("c", document)
    assert store.get("b") is None
    assert store.get("a") is not None
    assert store.get("c") is not None
