"""Pipeline layout strings of Megatron: which blocks sit in which stage chunk.

``E`` embedding, ``t`` decoder layer, ``m`` MTP layer, ``L`` loss (final norm and output projection); ``|`` separates
stage chunks; ``x*n`` and ``(...)*n`` repeat; commas are cosmetic. Chunk i belongs to stage i mod PP, virtual stage
i div PP. Grammar and checks after pipeline_parallel_layer_layout.py of megatron-core 0.19.2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby

_KINDS = {"E": "embed", "t": "decoder", "m": "mtp", "L": "head"}
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}
#: A layout longer than this is a mistake or an attack: 10,000 stages of 100 layers would fit.
_MAX_LENGTH = 1_000_000


class LayoutError(ValueError):
    """A layout string that does not follow the grammar."""


@dataclass(frozen=True)
class Layout:
    """Stage chunks along the pipeline; a chunk is a string over ``EtmL``."""

    chunks: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse a layout string; LayoutError for a wrong character or an absurd length."""
        expanded = text.replace(",", "")
        for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
            length = sum(len(m[1]) * int(m[2]) for m in re.finditer(pattern, expanded))
            if length > _MAX_LENGTH:
                raise LayoutError(f"layout {text[:40]!r} repeats up to {length} blocks")
            expanded = re.sub(pattern, lambda match: match[1] * int(match[2]), expanded)
        wrong = sorted(set(expanded) - set("EtmL|"))
        if wrong:
            raise LayoutError(f"layout {text!r} has the invalid character {wrong[0]!r}; use E, t, m, L, | and *n")
        return cls(tuple(expanded.split("|")))

    def format(self) -> str:
        """The shortest plain form: runs as ``x*n``, equal neighbouring chunks as ``(chunk|)*n``."""
        text = ""
        groups = [(_runs(chunk), len(list(same))) for chunk, same in groupby(self.chunks)]
        for index, (body, count) in enumerate(groups):
            is_last = index == len(groups) - 1
            closed = count - is_last
            text += f"({body}|)*{closed}" if closed > 1 else f"{body}|" * closed
            text += body if is_last else ""
        return text

    @property
    def flat(self) -> str:
        return "".join(self.chunks)

    def count(self, letter: str) -> int:
        return self.flat.count(letter)

    def at(self, stage: int, virtual: int, pp: int) -> str:
        """The chunk of a stage and virtual stage."""
        return self.chunks[virtual * pp + stage]

    def blocks(self) -> list[list[tuple[str, int]]]:
        """Blocks of every chunk as (kind, index) pairs, numbered along the pipeline."""
        seen: dict[str, int] = {}
        out: list[list[tuple[str, int]]] = []
        for chunk in self.chunks:
            row = []
            for letter in chunk:
                kind = _KINDS[letter]
                row.append((kind, seen.get(kind, 0)))
                seen[kind] = seen.get(kind, 0) + 1
            out.append(row)
        return out

    @classmethod
    def from_blocks(cls, chunks: list[list[tuple[str, int]]]) -> Layout:
        """Layout of chunks of (kind, index) pairs; KeyError for a kind that layouts have no letter for."""
        return cls(tuple("".join(_LETTERS[kind] for kind, _ in chunk) for chunk in chunks))

    def faults(self, num_layers: int, mtp_num_layers: int, pp: int) -> list[str]:
        """Why Megatron would refuse the layout (rules P12, P13), in its own order."""
        flat = self.flat
        if len(self.chunks) % pp:
            return [f"the layout has {len(self.chunks)} stage chunks, not a multiple of PP {pp}"]
        out = []
        if not flat.startswith("E") or flat.count("E") != 1:
            out.append("the layout must start with the embedding E, once")
        if not flat.endswith("L") or flat.count("L") != 1:
            out.append("the layout must end with the loss L, once")
        if flat.count("t") != num_layers:
            out.append(f"the layout has {flat.count('t')} decoder layers t, the model has {num_layers}")
        if flat.count("m") != mtp_num_layers:
            out.append(f"the layout has {flat.count('m')} MTP layers m, the model has {mtp_num_layers}")
        if "m" in flat and "t" in flat[flat.index("m") :]:
            out.append("MTP layers m must come after every decoder layer t")
        with_mtp = [index for index, chunk in enumerate(self.chunks) if "m" in chunk]
        if len(with_mtp) > 1:
            out.append("all MTP layers m must sit in one stage chunk")
        if any(index < len(self.chunks) - pp for index in with_mtp):
            out.append("MTP layers m must sit in the last virtual stage of their rank")
        return out


def _runs(chunk: str) -> str:
    return "".join(
        f"{letter}*{count}" if count > 2 else letter * count
        for letter, count in ((letter, len(list(same))) for letter, same in groupby(chunk))
    )
