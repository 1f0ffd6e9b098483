"""What scripts rely on of the process: signals, pipes, ports and terminals."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from meshwright.api.cli import run

COMMAND = str(Path(sys.executable).with_name("meshwright"))
INPUTS = ["llama-3.1-8b", "--cluster", "8xH100", "--global-batch-size", "64", "--seq-length", "4096"]


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    assert run(["plan", *INPUTS, "-o", str(file)]) == 0
    return file


def test_an_interrupt_says_so_in_one_line() -> None:
    argv = [
        COMMAND,
        "plan",
        "deepseek-v3",
        "--cluster",
        "256xH100",
        "--global-batch-size",
        "2048",
        "--seq-length",
        "4096",
    ]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


def test_a_reader_that_leaves_is_no_error(plan_file: Path) -> None:
    script = (
        f"set -o pipefail; {shlex.quote(COMMAND)} estimate {shlex.quote(str(plan_file))} --json | head -c 10 >/dev/null"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_plan_can_come_through_a_pipe(plan_file: Path) -> None:
    argv = [COMMAND, "estimate", "-", "--json"]
    done = subprocess.run(argv, input=plan_file.read_bytes(), capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout)["plan"] == json.loads(plan_file.read_text())["plan"]


def test_the_service_runs_answers_while_it_plans_and_stops() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [COMMAND, "serve", "--port", str(port), "--log-level", "warning"], stderr=subprocess.PIPE, text=True
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http, ThreadPoolExecutor() as pool:
            for _ in range(200):
                try:
                    http.get("/healthz")
                    break
                except httpx.ConnectError:
                    time.sleep(0.1)
            body = {
                "model": "llama-3.1-70b",
                "cluster": "64xH100",
                "workload": {"global_batch_size": 64, "seq_length": 4096},
                "deadline_s": 4,
            }
            planning = pool.submit(httpx.post, f"http://127.0.0.1:{port}/v1/plans", json=body, timeout=60)
            waits = []
            while not planning.done():
                started = time.monotonic()
                assert http.get("/healthz").json()["status"] == "ok"
                waits.append(time.monotonic() - started)
                time.sleep(0.05)
            assert planning.result().status_code == 201
            assert sorted(waits)[len(waits) // 2] < 0.5
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode in (0, 130)
    assert "Traceback" not in err


def test_a_port_in_use_is_bad_input() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [COMMAND, "serve", "--port", port], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 2
    assert "in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_progress_is_for_terminals_only() -> None:
    watcher, terminal = os.openpty()
    argv = [COMMAND, "plan", *INPUTS, "--json"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=terminal)
    os.close(terminal)
    out, _ = process.communicate(timeout=60)
    seen = os.read(watcher, 1_000_000).decode()
    os.close(watcher)
    assert json.loads(out)["schema_version"] == 1
    assert " of " in seen
    assert "\n" not in seen, "progress rewrites one line"
    assert seen.endswith("\r\x1b[2K"), "and leaves it empty"
