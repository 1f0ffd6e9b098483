"""Other planners' files for whichever door asks."""

from __future__ import annotations

from meshwright.profiler.importers import ImportOptions, read
from meshwright.specs.cluster import MAX_GPUS
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.imported import Imported

from .units import integer


def import_from(format: str, path: str, *, gpus: str | None = None, gpu: str | None = None) -> Imported:
    """What ``path`` holds; :class:`SpecError` where an argument or the files are wrong."""
    count = None if gpus is None else integer(gpus)
    if count is not None and (not isinstance(count, int) or not 1 <= count <= MAX_GPUS):
        raise SpecError(Fault("/gpus", f"must be a whole number from 1 to {MAX_GPUS}, got {count!r:.60}"))
    return read(format, path, ImportOptions(gpus=count, gpu=gpu))


def summary_of(found: Imported) -> list[str]:
    """What was found, in words, and the notes."""
    out = []
    if found.profile is not None:
        counts = ", ".join(f"{count} {kind}" for kind, count in found.profile.counts.items() if count)
        out.append(f"profile of {found.profile.provenance.tool}: {counts}")
    if found.cluster is not None:
        pools = ", ".join(f"{pool.name} ({pool.nodes}x{pool.gpus_per_node}x{pool.gpu})" for pool in found.cluster.pools)
        out.append(f"cluster of {found.cluster.num_gpus} GPUs: {pools}")
    return [*out, *(f"note: {note}" for note in found.notes)]
