"""Names of the pipeline schedules and how many model chunks a stage has under each."""

from __future__ import annotations

from typing import Literal

ScheduleName = Literal[
    "1f1b",
    "interleaved",
    "gpipe",
    "looped-bfs",
    "zb-h1",
    "zb-auto",
    "zb-v",
    "v-half",
    "v-min",
    "dualpipe",
    "dualpipe-v",
]

#: Chunks a stage: (least, most), most None where there is no upper end. A DualPipe stage is one chunk; its rank holds
#: a second one, the copy of the stage at the other end.
CHUNKS: dict[str, tuple[int, int | None]] = {
    "1f1b": (1, 1),
    "interleaved": (2, None),
    "gpipe": (1, 1),
    "looped-bfs": (2, None),
    "zb-h1": (1, 1),
    "zb-auto": (1, 1),
    "zb-v": (2, 2),
    "v-half": (2, 2),
    "v-min": (2, 2),
    "dualpipe": (1, 1),
    "dualpipe-v": (2, 2),
}


def runs_chunks(schedule: ScheduleName, vpp: int) -> bool:
    """Whether ``schedule`` runs ``vpp`` chunks a stage."""
    least, most = CHUNKS[schedule]
    return least <= vpp and (most is None or vpp <= most)
