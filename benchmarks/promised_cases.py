"""Seconds of the command for each case that the first release promises; each should stay below 10 s on 2 cores.

    python -m benchmarks.promised_cases

Every case runs in a process of its own, start-up included.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

CASES = (
    "llama-3.1-8b --cluster 8xH100 --global-batch-size 128 --seq-length 8192",
    "llama-3.1-70b --cluster 64xH100 --global-batch-size 512 --seq-length 8192",
    "llama-3.1-405b --cluster 1024xH100 --global-batch-size 2048 --seq-length 8192",
    "deepseek-v3 --cluster 256xH100 --global-batch-size 2048 --seq-length 4096",
    "deepseek-v3 --cluster 256xGB200-NVL72 --global-batch-size 2048 --seq-length 4096",
    "mixtral-8x7b --cluster 32xA100-40GB --global-batch-size 256 --seq-length 4096",
    "mixtral-8x7b --cluster 16xA100-40GB --global-batch-size 256 --seq-length 4096",
    "qwen3-30b-a3b --cluster 16xH100 --global-batch-size 512 --seq-length 4096",
    "kimi-k2 --cluster 512xH200 --global-batch-size 2048 --seq-length 4096",
    "gpt-oss-120b --cluster 64xH100 --global-batch-size 512 --seq-length 4096",
    "llama-2-70b --cluster 2xH100 --global-batch-size 64 --seq-length 4096",
    "llama-2-13b --cluster 4x8xA100-80GB+4x8xV100-32GB --global-batch-size 512 --seq-length 4096 --precision fp16",
)


def main() -> int:
    """Print one line a case; 1 if any takes 10 s or more."""
    command = shutil.which("meshwright")
    if command is None:
        sys.exit("meshwright is not on the path")
    slow = 0
    for case in CASES:
        started = time.monotonic()
        done = subprocess.run([command, "plan", *case.split()], capture_output=True, check=False)
        took_s = time.monotonic() - started
        slow += took_s >= 10
        print(f"{took_s:5.1f} s  exit {done.returncode}  {case}", flush=True)
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
