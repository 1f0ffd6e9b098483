"""Cluster shorthand: ``64xH100``, ``8x8xH100-SXM``, ``4x8xH100-SXM+4x8xA100-80GB``."""

from __future__ import annotations

import math
import re

from .catalog import CatalogEntry, resolve_gpu
from .cluster import MAX_GPUS, ClusterSpec, Pool
from .cluster_build import Wiring, fabric_level, reference_pool, slower_fabric, speed
from .errors import Fault, SpecError

_COUNT = re.compile(r"\s*([-+]?[\d.,_]+)\s*[xX×*]\s*")
MAX_TEXT = 4096
FORMS = ("64xH100", "8x8xH100-SXM", "4x8xH100-SXM+4x8xA100-80GB")


def parse_shorthand(text: str) -> ClusterSpec:
    """The cluster that ``text`` abbreviates: pools joined by ``+``, each ``[NODES x] [GPUS x] TYPE``.

    ``AxBxTYPE`` is A nodes of B GPUs. ``NxTYPE`` is N GPUs in reference nodes of the type: whole nodes, or one partly
    used node when N is less than a node. ``TYPE`` is one GPU. Links come from the type's reference node, pools are
    joined by the slower pool's fabric; ``assumptions`` says all of it. :class:`SpecError` for anything else.
    """
    if len(text) > MAX_TEXT:
        raise SpecError(Fault("", f"is {len(text)} characters long; at most {MAX_TEXT} are read", FORMS))
    faults: list[Fault] = []
    parsed: list[tuple[CatalogEntry, int, int]] = []
    notes: list[str] = []
    for part in text.split("+"):
        try:
            entry, note, nodes, per_node = _parse_pool(part)
        except SpecError as error:
            faults += error.faults
            continue
        parsed.append((entry, nodes, per_node))
        notes += [note] if note else []
    if faults:
        raise SpecError(dict.fromkeys(faults))
    return _assemble(parsed, notes)


def _assemble(parsed: list[tuple[CatalogEntry, int, int]], notes: list[str]) -> ClusterSpec:
    pools: list[Pool] = []
    names: dict[str, int] = {}
    for entry, nodes, per_node in parsed:
        kind = entry.gpu.name
        names[kind] = names.get(kind, 0) + 1
        name = kind if names[kind] == 1 else f"{kind}-{names[kind]}"
        pool, more = reference_pool(entry, name, nodes, per_node, Wiring())
        pools.append(pool)
        notes += more
    total = sum(pool.num_gpus for pool in pools)
    inter_pool = None
    if len(pools) > 1:
        fabrics = [fabric_level(entry, per_node, total, Wiring()) for entry, _, per_node in parsed]
        inter_pool = slower_fabric(fabrics, total)
        notes.append(f"pools joined by the slower fabric: {inter_pool.name} at {speed(inter_pool)}")
    return ClusterSpec.parse(
        {
            "name": "+".join(f"{pool.nodes}x{pool.gpus_per_node}x{pool.gpu}" for pool in pools),
            "gpus": {entry.gpu.name: entry.gpu for entry, _, _ in parsed},
            "pools": pools,
            "inter_pool": inter_pool,
            "assumptions": tuple(dict.fromkeys(notes)),
        }
    )


def _parse_pool(part: str) -> tuple[CatalogEntry, str | None, int, int]:
    """GPU type, the assumption its name needs, nodes and GPUs a node."""
    if not part.strip():
        raise SpecError(Fault("", "names no GPU type; write nodes x GPUs a node x type", FORMS))
    counts: list[str] = []
    rest = part
    while match := _COUNT.match(rest):
        counts.append(match[1])
        rest = rest[match.end() :]
    if len(counts) > 2:
        raise SpecError(Fault("", f"{_short(part)} has {len(counts)} counts; write nodes x GPUs a node x type", FORMS))
    if not rest.strip():
        raise SpecError(Fault("", f"{_short(part)} names no GPU type; write nodes x GPUs a node x type", FORMS))
    faults: list[Fault] = []
    numbers: list[int] = []
    for count in counts:
        try:
            numbers.append(_number(count, part))
        except SpecError as error:
            faults += error.faults
    try:
        entry, note = resolve_gpu(rest)
    except SpecError as error:
        raise SpecError([*faults, *error.faults]) from None
    if faults:
        raise SpecError(faults)
    total = math.prod(numbers)
    if total > MAX_GPUS:
        raise SpecError(Fault("", f"{_short(part)} has {total} GPUs; at most {MAX_GPUS} are planned for"))
    return entry, note, *_nodes(numbers, entry, part)


def _nodes(numbers: list[int], entry: CatalogEntry, part: str) -> tuple[int, int]:
    if not numbers:
        return 1, 1
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    (total,), size = numbers, entry.node.gpus_per_node
    if total <= size:
        return 1, total
    if total % size:
        lower = total // size * size
        message = f"{_short(part)} is no whole number of {entry.gpu.name} nodes, which have {size} GPUs"
        fix = "; take a near count, or write nodes x GPUs a node x type"
        near = (f"{lower}x{entry.gpu.name}", f"{lower + size}x{entry.gpu.name}")
        raise SpecError(Fault("", message + fix, near))
    return total // size, size


def _number(text: str, part: str) -> int:
    if re.fullmatch(r"\d{1,12}", text) and int(text) > 0:
        return int(text)
    if re.fullmatch(r"\d{13,}", text):
        raise SpecError(Fault("", f"{_short(part)} has an absurd count; at most {MAX_GPUS} GPUs are planned for"))
    raise SpecError(Fault("", f"{_short(part)}: counts must be whole numbers of at least 1, got {text[:30]!r}", FORMS))


def _short(part: str) -> str:
    text = part.strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")
