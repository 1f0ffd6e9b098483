"""CPU seconds, peak memory, candidates and proven gap of ``meshwright plan``, each case in a process of its own.

    python -m benchmarks.search_speed [WORD...]

Start-up is included. Cases whose line holds one of the words are run, all without any.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile

CASES = (
    "llama-3.1-8b --cluster 8xH100 --global-batch-size 128 --seq-length 8192",
    "llama-3.1-70b --cluster 64xH100 --global-batch-size 512 --seq-length 8192",
    "llama-3.1-70b --cluster 1024xH100 --global-batch-size 2048 --seq-length 8192",
    "llama-3.1-405b --cluster 1024xH100 --global-batch-size 2048 --seq-length 8192",
    "deepseek-v3 --cluster 256xH100 --global-batch-size 2048 --seq-length 4096",
    "deepseek-v3 --cluster 2048xH100 --global-batch-size 8192 --seq-length 4096",
    "mixtral-8x7b --cluster 32xA100-40GB --global-batch-size 256 --seq-length 4096",
    "qwen3-30b-a3b --cluster 16xH100 --global-batch-size 512 --seq-length 4096",
    "kimi-k2 --cluster 512xH200 --global-batch-size 2048 --seq-length 4096",
    "gpt-oss-120b --cluster 64xH100 --global-batch-size 512 --seq-length 4096",
)
#: The same model on more and more GPUs, 8 sequences a GPU.
SCALING = tuple(
    f"llama-3.1-70b --cluster {gpus}xH100 --global-batch-size {8 * gpus} --seq-length 8192"
    for gpus in (64, 256, 1024, 4096, 16384)
)


def row(command: str, case: str) -> str:
    """One line of the table."""
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen([command, "plan", *case.split(), "--json"], stdout=out, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        found = json.load(out)
    cpu_s, peak_mib = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
    if found["plan"] is None:
        return f"{cpu_s:6.2f} {peak_mib:6.0f} {found['run']['candidates']:8d}  {found['status']:>16}  {case}"
    step_s, gap = found["estimate"]["step_time_s"], found["bound"]["gap"]
    return f"{cpu_s:6.2f} {peak_mib:6.0f} {found['run']['candidates']:8d} {step_s:9.3f} {gap:7.2%}  {case}"


def main() -> int:
    """Print the table."""
    command = shutil.which("meshwright")
    if command is None:
        sys.exit("meshwright is not on the path")
    words = sys.argv[1:]
    print(f"{'CPU s':>6} {'MiB':>6} {'tried':>8} {'step s':>9} {'gap':>7}")
    for case in (*CASES, *SCALING):
        if not words or any(word in case for word in words):
            print(row(command, case), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
