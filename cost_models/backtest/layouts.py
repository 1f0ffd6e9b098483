"""Which blocks each chunk of a pipeline holds: from a stated layout, stated cut points, or spread evenly."""

from __future__ import annotations

import re
from itertools import pairwise

from meshwright.specs.model import ModelSpec

from .rows import Run, UnsupportedError

Chunks = list[list[tuple[str, int]]]
#: AMP's list of 30 pipeline entries for 24 layers: embedding and transpose come before the first layer.
LEADING_LAYERS = 2
#: Letters of a layout; nested repeats of a longer one would grow without end.
LONGEST_LAYOUT = 10_000


def chunks_of(run: Run, model: ModelSpec, pp: int, vpp: int, mtp: int, notes: list[str]) -> Chunks:
    """Blocks of the ``pp * vpp`` chunks in pipeline order."""
    number = pp * vpp
    stated = run.flags.get("pp_layout") or _spoken_layout(run.text)
    if stated and any(letter in stated for letter in "tE"):
        sizes, tail = _layout(stated)
        if len(sizes) == number and sum(sizes) == model.num_layers:
            return _blocks(sizes, mtp, tail)
        notes.append("the stated pipeline layout does not match the degrees; layers are spread evenly")
    cuts = run.flags.get("partition")
    if cuts:
        return _cut(cuts, model.num_layers, number, mtp)
    return _blocks(even(model.num_layers, number), mtp, [])


def even(layers: int, chunks: int) -> list[int]:
    """Layers of each chunk where no layout is stated, as Megatron's users write them when the number does not divide.

    Embedding and loss count as a layer each, or the loss alone, where that divides
    (``--account-for-embedding-in-pipeline-split``, ``--account-for-loss-in-pipeline-split``). Else every chunk gets the
    quotient rounded up and the last what is left, which makes room for MTP and head (Megatron-Bridge's layouts of
    DeepSeek-V3: 61 layers over 16 chunks as 15 x 4 + 1).
    """
    if layers % chunks == 0:
        return [layers // chunks] * chunks
    for ends in ((1, 1), (0, 1)):
        if (layers + sum(ends)) % chunks == 0:
            sizes = [(layers + sum(ends)) // chunks] * chunks
            return [sizes[0] - ends[0], *sizes[1:-1], sizes[-1] - ends[1]]
    if layers < chunks:
        return [1] * layers + [0] * (chunks - layers)
    each = -(-layers // chunks)
    rest = layers - each * (chunks - 1)
    if rest >= 0:
        return [each] * (chunks - 1) + [rest]
    floor, more = divmod(layers, chunks)
    return [floor + (1 if 0 < index <= more else 0) for index in range(chunks)]


def _blocks(sizes: list[int], mtp: int, tail: list[int]) -> Chunks:
    """Blocks from layer counts. ``tail`` is (chunk of MTP, chunk of head), the last chunk by default."""
    out: Chunks = []
    first = 0
    for size in sizes:
        out.append([("decoder", i) for i in range(first, first + size)])
        first += size
    out[0].insert(0, ("embed", 0))
    out[tail[0] if tail else -1] += [("mtp", i) for i in range(mtp)]
    out[tail[1] if tail else -1].append(("head", 0))
    return out


def _spoken_layout(text: str) -> str:
    match = re.search(r"pp layout (et[^;]*)", text)
    return match[1].replace(" ", "").replace("e", "E").replace("l", "L") if match else ""


def _layout(text: str) -> tuple[list[int], list[int]]:
    """Layer counts of ``Et*4|(t*4|)*14tmL``, and the chunks of MTP and head."""
    flat = re.sub(r"\s", "", text)
    for _ in range(8):  # innermost groups first
        if len(flat) > LONGEST_LAYOUT:
            raise UnsupportedError("the stated pipeline layout is too long")
        flat, found = re.subn(r"\(([^()]*)\)\*(\d{1,9})", lambda m: m[1] * min(int(m[2]), 500), flat)
        if not found:
            break
    flat = re.sub(r"([EtmL])\*(\d{1,9})", lambda m: m[1] * min(int(m[2]), 500), flat)
    stages = flat.split("|")
    places = [next((i for i, stage in enumerate(stages) if letter in stage), len(stages) - 1) for letter in "mL"]
    return [stage.count("t") for stage in stages], places


def _cut(text: str, layers: int, stages: int, mtp: int) -> Chunks:
    """Stages from cut points over Megatron-LM's pipeline layer list."""
    cuts = [int(x) for x in re.findall(r"\d+", text)]
    if len(cuts) != stages + 1:
        raise UnsupportedError(f"{len(cuts) - 1} stages are cut, but pp is {stages}")
    sizes = [max(min(end, LEADING_LAYERS + layers) - max(start, LEADING_LAYERS), 0) for start, end in pairwise(cuts)]
    if sum(sizes) != layers:
        raise UnsupportedError("the cut points do not cover the layers")
    return _blocks(sizes, mtp, [])
