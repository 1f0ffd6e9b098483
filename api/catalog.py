"""What can be named: GPU types, model presets, targets and links."""

from __future__ import annotations

from typing import Any

from meshwright.specs.catalog import CatalogEntry
from meshwright.specs.errors import Fault, SpecError

KINDS = ("gpus", "models", "targets", "links")


def entries(kind: str) -> list[dict[str, Any]]:
    """A short row for every entry of ``kind``, each with its ``name``."""
    from meshwright.specs import catalog, targets

    if kind == "gpus":
        return [_gpu_row(entry) for entry in catalog.gpus()]
    if kind == "models":
        from meshwright.specs import model_io

        return [{"name": name} for name in model_io.list_presets()]
    if kind == "targets":
        return [_target_row(name) for name in targets.list_targets()]
    if kind == "links":
        return [link.to_json() for link in catalog.links().values()]
    raise SpecError(Fault("/kind", f"is not a catalog, got {kind[:40]!r}", KINDS))


def entry(kind: str, name: str) -> dict[str, Any]:
    """One entry in full; :class:`SpecError` names near matches where there is none."""
    from meshwright.specs import catalog, targets

    if kind == "gpus":
        return catalog.gpu(name).to_json()
    if kind == "models":
        from meshwright.specs import model_io

        from .describe import describe_model

        spec = model_io.load_preset(name)
        return describe_model(spec) | {"spec": spec.to_json()}
    if kind == "targets":
        return targets.load_target(name).to_json()
    for row in entries(kind):
        if row["name"] == name:
            return row
    raise SpecError(Fault("/name", f"there is no {kind.removesuffix('s')} {name[:60]!r}"))


def _gpu_row(entry: CatalogEntry) -> dict[str, Any]:
    gpu, node = entry.gpu, entry.node
    return {
        "name": gpu.name,
        "vendor": gpu.vendor,
        "memory_bytes": gpu.memory_bytes,
        "memory_bandwidth_bytes_per_s": gpu.memory_bandwidth_bytes_per_s,
        "peak_flops": dict(gpu.peak_flops),
        "gpus_per_node": node.gpus_per_node,
        "scale_up": [{"link": level.link, "span": level.span} for level in node.levels],
        "aliases": [*entry.aliases, *entry.loose_aliases],
    }


def _target_row(name: str) -> dict[str, Any]:
    from meshwright.specs.targets import load_target

    target = load_target(name)
    return {"name": target.name, "framework": target.framework, "version": target.version, "verified": target.verified}
