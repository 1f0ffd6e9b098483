"""Bad input over REST: a problem document that names each wrong field, never a server error."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from meshwright.api.rest import create_app

GOOD: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "cluster": "8xH100",
    "workload": {"global_batch_size": 64, "seq_length": 4096},
}
MISSING = object()


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(create_app(), raise_server_exceptions=False)


def changed(pointer: str, value: Any) -> dict[str, Any]:
    """A good body with one field set to ``value``, or taken out."""
    body = copy.deepcopy(GOOD)
    *path, last = pointer.strip("/").split("/")
    place = body
    for step in path:
        place = place.setdefault(step, {})
    if value is MISSING:
        del place[last]
    else:
        place[last] = value
    return body


def problem_of(response: Any, status: int) -> dict[str, Any]:
    """The problem document of a response, after checking that it is one of RFC 9457."""
    assert response.status_code == status, response.text[:500]
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem["status"] == status
    assert problem["type"].startswith("urn:meshwright:problem:")
    assert problem["title"]
    assert problem["detail"]
    assert "Traceback" not in response.text
    return problem


# (name, pointer that is changed, its value, pointer the problem names; None = the same)
FIELDS = [
    ("model is unknown", "/model", "llama-99", None),
    ("model is a path", "/model", "/etc/passwd", None),
    ("model is a relative path", "/model", "../../etc/passwd", None),
    ("model is a number", "/model", 8, None),
    ("model is null", "/model", None, None),
    ("model is a list", "/model", ["llama-3.1-8b"], None),
    ("model is missing", "/model", MISSING, None),
    ("config lacks a field", "/model", {"model_type": "llama", "num_hidden_layers": 2}, "/model"),
    ("config of an unknown family", "/model", {"model_type": "perceptron", "hidden_size": 8}, "/model"),
    ("GPU is unknown", "/cluster", "8xH900", None),
    ("GPU is a path", "/cluster", "/etc/hostname", None),
    ("zero GPUs", "/cluster", "0xH100", None),
    ("negative GPUs", "/cluster", "-8xH100", None),
    ("absurdly many GPUs", "/cluster", "99999999999999xH100", None),
    ("cluster is a number", "/cluster", 8, None),
    ("cluster is empty", "/cluster", "", None),
    ("cluster is missing", "/cluster", MISSING, None),
    ("cluster object without pools", "/cluster", {"name": "x"}, "/cluster"),
    ("pool of zero nodes", "/cluster", {"pools": [{"gpu": "H100-SXM", "nodes": 0}]}, "/cluster/pools/0/nodes"),
    ("pool of a text of nodes", "/cluster", {"pools": [{"gpu": "H100-SXM", "nodes": "two"}]}, "/cluster/pools/0/nodes"),
    ("pool of an unknown GPU", "/cluster", {"pools": [{"gpu": "H900", "nodes": 1}]}, "/cluster/pools/0/gpu"),
    ("workload is missing", "/workload", MISSING, None),
    ("workload is a list", "/workload", [1, 2], None),
    ("batch is missing", "/workload/global_batch_size", MISSING, None),
    ("batch is zero", "/workload/global_batch_size", 0, None),
    ("batch is negative", "/workload/global_batch_size", -64, None),
    ("batch is a word", "/workload/global_batch_size", "many", None),
    ("batch is a number in quotes", "/workload/global_batch_size", "64", None),
    ("batch is a truth value", "/workload/global_batch_size", True, None),
    ("batch is broken", "/workload/global_batch_size", 1.5, None),
    ("batch is null", "/workload/global_batch_size", None, None),
    ("batch is beyond 64 bits", "/workload/global_batch_size", 10**30, None),
    ("batch is absurd", "/workload/global_batch_size", 10**15, None),
    ("sequence is negative", "/workload/seq_length", -1, None),
    ("sequence is absurd", "/workload/seq_length", 10**12, None),
    ("precision is unknown", "/workload/precision", "int3", None),
    ("workload field is unknown", "/workload/batch", 5, None),
    ("target is unknown", "/target", "megatron@99", None),
    ("target is a path", "/target", "../../etc/passwd", None),
    ("target is a number", "/target", 19, None),
    ("field is unknown", "/modle", "x", None),
]
SEARCH = [
    ("objective is unknown", "/objective", "beauty", None),
    ("top is zero", "/top", 0, None),
    ("top is in quotes", "/top", "5", None),
    ("fixed degree is unknown", "/fix", {"tpp": 8}, ""),
    ("fixed degree is zero", "/fix", {"tp": 0}, ""),
    ("fixed degree is a list", "/fix/tp", [1], None),
    ("capped degree is negative", "/max/pp", -1, None),
    ("forbidden feature is unknown", "/forbid", ["wings"], ""),
    ("forbid is a text", "/forbid", "vpp", None),
    ("headroom is negative", "/memory_headroom", -0.1, None),
    ("headroom is everything", "/memory_headroom", 1, None),
    ("deadline is zero", "/deadline_s", 0, None),
    ("work limit is negative", "/work_limit", -1, None),
]
DEGREES = [
    ("degree is zero", "/degrees/tp", 0, None),
    ("degree is a word", "/degrees/tp", "eight", None),
    ("degree is beyond 64 bits", "/degrees/pp", 10**30, None),
    ("degree is unknown", "/degrees/qp", 2, None),
    ("degrees do not divide the GPUs", "/degrees/tp", 3, None),
    ("recompute mode is unknown", "/degrees/recompute", "twice", None),
    ("sharding level is unknown", "/degrees/sharding", "zero9", None),
    ("batch is not divisible", "/workload/global_batch_size", 63, None),
]


def _ids(cases: list[tuple[str, str, Any, str | None]]) -> list[str]:
    return [case[0] for case in cases]


@pytest.mark.parametrize(("name", "pointer", "value", "named"), FIELDS + SEARCH, ids=_ids(FIELDS + SEARCH))
def test_plans_name_the_wrong_field(client: TestClient, name: str, pointer: str, value: Any, named: str | None) -> None:
    problem = problem_of(client.post("/v1/plans", json=changed(pointer, value)), 422)
    wanted = pointer if named is None else named
    pointers = [error["pointer"] for error in problem["errors"]]
    assert any(found.startswith(wanted) for found in pointers), pointers
    assert "root:" not in json.dumps(problem)


@pytest.mark.parametrize(("name", "pointer", "value", "named"), FIELDS + DEGREES, ids=_ids(FIELDS + DEGREES))
def test_estimates_name_the_wrong_field(
    client: TestClient, name: str, pointer: str, value: Any, named: str | None
) -> None:
    problem = problem_of(client.post("/v1/estimates", json=changed(pointer, value)), 422)
    wanted = pointer if named is None else named
    pointers = [error["pointer"] for error in problem["errors"]]
    assert any(found.startswith(wanted) for found in pointers), pointers


def test_every_fault_is_named_at_once(client: TestClient) -> None:
    body = {
        "model": "llama-99",
        "cluster": "8xH900",
        "workload": {"global_batch_size": 0, "seq_length": -1},
        "target": "megatron@99",
        "top": 0,
        "colour": "red",
    }
    problem = problem_of(client.post("/v1/plans", json=body), 422)
    pointers = {error["pointer"] for error in problem["errors"]}
    assert pointers == {
        "/model",
        "/cluster",
        "/workload/global_batch_size",
        "/workload/seq_length",
        "/target",
        "/top",
        "/colour",
    }


TEXT = json.dumps(GOOD)
RAW = [
    ("truncated", TEXT[:-20].encode(), 400, ""),
    ("empty", b"", 400, ""),
    ("not UTF-8", b'{"model": "\xff\xfe"}', 400, ""),
    ("nested deep", b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, ""),
    ("nested 100 deep", b'{"model": ' + b"[" * 100 + b"]" * 100 + b"}", 422, ""),
    ("two documents", (TEXT + TEXT).encode(), 400, ""),
    ("a list", b"[1, 2]", 422, ""),
    ("a text", b'"llama-3.1-8b"', 422, ""),
    ("null", b"null", 422, ""),
    ("NaN", TEXT.replace("4096", "NaN").encode(), 422, "/workload/seq_length"),
    ("Infinity", TEXT.replace("4096", "-Infinity").encode(), 422, "/workload/seq_length"),
    ("1e999", TEXT.replace("4096", "1e999").encode(), 422, "/workload/seq_length"),
    ("5000 digits", TEXT.replace("4096", "9" * 5000).encode(), 422, "/workload/seq_length"),
    ("lone surrogate", TEXT.replace("8xH100", "\\ud800").encode(), 422, "/cluster"),
    ("a field twice", TEXT.replace("{", '{"model": "x", ', 1).encode(), 422, ""),
]


@pytest.mark.parametrize("path", ["/v1/plans", "/v1/estimates", "/v1/checks"])
@pytest.mark.parametrize(("name", "raw", "status", "pointer"), RAW, ids=[case[0] for case in RAW])
def test_malformed_bodies_are_refused(
    client: TestClient, path: str, name: str, raw: bytes, status: int, pointer: str
) -> None:
    response = client.post(path, content=raw, headers={"content-type": "application/json"})
    problem = problem_of(response, status)
    assert pointer in [error["pointer"] for error in problem["errors"]] or path == "/v1/checks"


def test_a_large_body_is_refused_whatever_its_length_says(client: TestClient) -> None:
    headers = {"content-type": "application/json"}
    large = b'{"model": "' + b"x" * 10_000_000 + b'"}'
    problem_of(client.post("/v1/plans", content=large, headers=headers), 413)
    chunks = (large[start : start + 65536] for start in range(0, len(large), 65536))
    problem_of(client.post("/v1/plans", content=chunks, headers=headers), 413)


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_another_media_type_is_refused(client: TestClient, media: str) -> None:
    problem_of(client.post("/v1/plans", content=TEXT, headers={"content-type": media}), 415)


def test_an_encoded_body_is_refused(client: TestClient) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    problem_of(client.post("/v1/plans", content=TEXT, headers=headers), 415)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/plans/plan-0", 404),
        ("GET", "/v1/plans/plan-0/export/megatron@0.19", 404),
        ("GET", "/v1/catalog/wheels", 404),
        ("GET", "/v1/catalog/gpus/H900", 404),
        ("GET", "/v1/catalog/models/..%2F..%2Fetc%2Fpasswd", 404),
        ("GET", "/v1/catalog/models//etc/passwd", 404),
        ("GET", "/v1/catalog/targets/megatron@99", 404),
        ("DELETE", "/v1/plans", 405),
        ("GET", "/v1/estimates", 405),
        ("PUT", "/healthz", 405),
    ],
)
def test_wrong_addresses_and_methods(client: TestClient, method: str, path: str, status: int) -> None:
    problem_of(client.request(method, path), status)


def test_a_plan_document_is_checked_before_it_is_priced(client: TestClient) -> None:
    problem = problem_of(client.post("/v1/estimates", json={"document": {"schema_version": 7}}), 422)
    assert problem["errors"][0]["pointer"] == "/document/schema_version"
    problem = problem_of(client.post("/v1/estimates", json={"document": {"schema_version": 1}}), 422)
    assert {"/document/status", "/document/inputs"} <= {error["pointer"] for error in problem["errors"]}


def test_checks_name_the_wrong_field(client: TestClient) -> None:
    for body, pointer in [
        ({}, "/arguments"),
        ({"arguments": 5}, "/arguments"),
        ({"arguments": [1]}, "/arguments"),
        ({"arguments": "--num-layers 2", "world_size": 0}, "/world_size"),
        ({"arguments": "--num-layers 2"}, "/world_size"),
        ({"arguments": "--num-layers 2", "world_size": 8, "env": {"A": 1}}, "/env/A"),
        ({"arguments": "--num-layers 2", "world_size": 8, "target": "megatron@99"}, "/target"),
        ({"arguments": "--num-layers 2", "world_size": 8, "cluster": "8xH900"}, "/cluster"),
        ({"arguments": "--num-layers 2", "world_size": 8, "sm": "new"}, "/sm"),
    ]:
        problem = problem_of(client.post("/v1/checks", json=body), 422)
        pointers = [error["pointer"] for error in problem["errors"]]
        assert any(found.startswith(pointer) for found in pointers), (body, pointers)


@pytest.mark.parametrize("arguments", [["--x"] * 200_000, "--x " * 200_000])
def test_very_many_arguments_are_refused_at_once(client: TestClient, arguments: Any) -> None:
    problem = problem_of(client.post("/v1/checks", json={"arguments": arguments, "world_size": 8}), 422)
    assert [error["pointer"] for error in problem["errors"]] == ["/arguments"]
    assert problem["errors"][0]["detail"].startswith("must be at most 10000 arguments, got 200000")


@pytest.mark.parametrize("arguments", [["--x"] * 1001, "--x " * 1001])
def test_more_flags_than_there_are_is_refused(client: TestClient, arguments: Any) -> None:
    problem = problem_of(client.post("/v1/checks", json={"arguments": arguments, "world_size": 8}), 422)
    assert problem["errors"] == [{"pointer": "/arguments", "detail": "names 1001 flags; at most 1000 are read"}]


@pytest.mark.parametrize("arguments", ["", "{}", "no flags", "a: [1"])
def test_a_text_that_holds_no_arguments_is_no_illegal_plan(client: TestClient, arguments: str) -> None:
    problem = problem_of(client.post("/v1/checks", json={"arguments": arguments, "world_size": 8}), 422)
    assert [error["pointer"] for error in problem["errors"]] == ["/arguments"]


def test_one_choice_under_two_names_is_named(client: TestClient) -> None:
    problem = problem_of(
        client.post("/v1/plans", json=GOOD | {"fix": {"mbs": 1, "micro_batch_size": 1, "a/b": 2}}), 422
    )
    assert [error["pointer"] for error in problem["errors"]] == ["/fix/micro_batch_size", "/fix/a~1b"]
    assert "mbs" in problem["errors"][0]["detail"]


def test_a_client_that_goes_away_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Any] = []
    received = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(received)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": "/v1/plans"}
    scope |= {"raw_path": b"/v1/plans", "query_string": b"", "headers": headers, "server": ("x", 80)}
    asyncio.run(create_app()(scope, receive, send))
    assert not caplog.records
    assert sent[0]["status"] == 400
