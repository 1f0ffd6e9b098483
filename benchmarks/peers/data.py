"""Where the other planners' inputs lie (NOTICE names their sources)."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "data" / "peers"
SAILOR, GALVATRON, NEST = DATA / "sailor", DATA / "galvatron", DATA / "nest"
