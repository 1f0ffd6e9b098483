"""FlashFlex: ``machine_amounts.json``, a cluster without measured times.

``{"machine_specs": {GPU: [TFLOP/s, memory GB, GB/s inside a machine]}, "machine_amounts": {GPU: {"4": 2}}}``: two
machines of four. The network between machines is an option of its command line and stands in no file.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.specs.catalog import links
from meshwright.specs.cluster import NetworkLevel
from meshwright.specs.imported import Imported

from .clusters import PoolForm, catalog_gpu, cluster_of, level
from .options import ImportOptions
from .reading import load

#: Its README's own example network: 25 Gbit/s a machine; the format says none.
NETWORK = "ethernet-25"


def read(path: Path, options: ImportOptions) -> Imported:
    """The file (or ``machine_amounts.json`` in a folder) as a cluster."""
    path = path / "machine_amounts.json" if path.is_dir() else path
    top = load(path)
    specs, amounts = top["machine_specs"], top["machine_amounts"]
    rate = links()[NETWORK].bandwidth_bytes_per_s
    notes = [
        f"the format names no network between machines: {rate / 1e9:g} GB/s a machine assumed ({NETWORK})",
        "peak rates and memory are the catalog's, not the file's",
    ]
    forms = []
    for gpu, by_size in amounts.fields():
        spec = specs[gpu]
        figures = spec.numbers(3)
        if min(figures[:3]) <= 0:
            raise spec.fault("must be [TFLOP/s, GB, GB/s], all above 0")
        entry, note = catalog_gpu(gpu, spec.place)
        notes += [note] if note else []
        for _, count in by_size.fields():
            size = count.key_count()
            forms.append(
                PoolForm(
                    name=f"{gpu}-{size}",
                    gpu=entry,
                    nodes=count.count(),
                    gpus_per_node=size,
                    intra_bytes_per_s=figures[2] * 1e9,
                    inter_bytes_per_s=rate / size,
                    source=path.name,
                )
            )
    if not forms:
        raise amounts.fault("names no machine")
    between: NetworkLevel | None = None
    if len(forms) > 1:
        span = sum(form.nodes * form.gpus_per_node for form in forms)
        slowest = min(form.inter_bytes_per_s for form in forms)
        between = level("between pools", "ethernet", span, slowest, NETWORK)
    return Imported(format="flashflex", cluster=cluster_of("flashflex", forms, between, notes), notes=tuple(notes))
