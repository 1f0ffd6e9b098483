"""Exit codes of the command: what scripts may rely on."""

from __future__ import annotations

DONE = 0
BAD_INPUT = 2
DOES_NOT_FIT = 3
ILLEGAL = 4
DEADLINE = 5
INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130  # 128 + SIGINT, as shells do
