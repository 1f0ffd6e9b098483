"""Plan documents for Megatron-Bridge: the round-trip cases of Megatron on another target."""

from __future__ import annotations

from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.model_io import load_model
from meshwright.specs.targets import load_target

from .megatron_plans import document
from .test_megatron_plan import ROUNDTRIPS


def bridge_document(name, cluster, **choices):
    """A document for ``bridge@0.6``."""
    doc = document(load_model(name), load_cluster(cluster), **choices)
    target = load_target("bridge@0.6")
    return doc.model_copy(update={"inputs": doc.inputs.model_copy(update={"target": target})})


def documents():
    """All round-trip cases."""
    return [bridge_document(name, cluster, **choices) for name, cluster, choices in ROUNDTRIPS]
