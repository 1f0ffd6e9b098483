"""The REST page: its request, sent to the service that the installed command starts."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs/rest.md"
START_LIMIT_S = 30.0


@pytest.fixture(scope="module")
def service() -> Iterator[httpx.Client]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [Path(sysconfig.get_path("scripts"), "meshwright"), "serve", "--port", str(port), "--log-level", "error"]
    process = subprocess.Popen(command)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            deadline = time.monotonic() + START_LIMIT_S
            while True:
                try:
                    client.get("/healthz").raise_for_status()
                    break
                except httpx.TransportError:
                    assert process.poll() is None, "the service ended"
                    assert time.monotonic() < deadline, "the service does not answer"
                    time.sleep(0.1)
            yield client
    finally:
        process.terminate()
        process.wait(timeout=10)


def test_the_request_on_the_page_is_answered_and_kept(service: httpx.Client) -> None:
    body = re.search(r'```json title="request.json"\n(.*?)```', PAGE.read_text(), flags=re.DOTALL)
    assert body is not None
    answer = service.post("/v1/plans", content=body[1], headers={"Content-Type": "application/json"})
    assert answer.is_success, answer.text
    document = answer.json()
    assert document["status"] in ("optimal", "feasible")
    assert document["inputs"]["workload"]["seq_length"] == json.loads(body[1])["workload"]["seq_length"]
    location = answer.headers["Location"]
    assert document["run"]["id"] in location
    assert service.get(location).json() == document
    files = service.get(f"{location}/export/megatron@0.19")
    assert files.is_success, files.text
    assert len(files.content) > 1000


@pytest.mark.parametrize(
    "path", ["/v1/catalog/gpus", "/v1/catalog/models", "/v1/catalog/targets", "/openapi.json", "/docs"]
)
def test_the_pages_that_it_names_are_there(service: httpx.Client, path: str) -> None:
    assert path in PAGE.read_text() or f"`/{path.rsplit('/', 1)[-1]}`" in PAGE.read_text()
    assert service.get(path).status_code == 200


def test_a_faulty_request_is_a_problem_document(service: httpx.Client) -> None:
    answer = service.post("/v1/plans", json={"model": "llama-3.1-8b", "cluster": "0xH100", "workload": {}})
    assert 400 <= answer.status_code < 500
    assert answer.headers["Content-Type"].startswith("application/problem+json")
    pointers = {error["pointer"] for error in answer.json()["errors"]}
    assert {"/cluster", "/workload/global_batch_size", "/workload/seq_length"} <= pointers
