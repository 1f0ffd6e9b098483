"""Runs on mixed GPU types as cases: rows that say for every stage which devices hold it and which layers.

A stage may lie on several pools; its replicas share the micro-batches evenly, so the slowest sets its pace. Stages may
differ in tensor and data parallelism: the samples of a micro-batch are then spread over each stage's own replicas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

from pydantic import ValidationError

from meshwright.specs.cluster import ClusterSpec, LinkKind, NetworkLevel
from meshwright.specs.cluster_io import cluster_from_data
from meshwright.specs.errors import SpecError
from meshwright.specs.plan import Chunk, Degrees, Group, Plan, Stage, collapse_blocks, format_range

from ..collectives import collective_s
from .architectures import model_of
from .hardware import LATENCY_US
from .plans import Case
from .rows import Run, UnsupportedError, number, run_of
from .settings import precision_of, recompute_of, sharding_of, workload_of
from .stacks import stack_of
from .switches import options_of, target_of

#: Layer lists of the sources start with the embedding (Sailor), or with embedding and transpose (AMP's 30 entries).
LEADING = {2: 1, 6: 2}
#: The rates and the memory of Sailor's RTX-2080 are those of the Ti: 60 TFLOP/s fp16, 640 GB/s, 9.4 GB in use.
RENAMED = {"RTX-2080": "RTX-2080-Ti"}


@dataclass(frozen=True)
class Members:
    """Equal replicas of a stage: ``replicas`` of ``tp`` GPUs of one type each."""

    gpu: str
    tp: int
    replicas: int


def is_mixed(row: Mapping[str, str]) -> bool:
    """Whether a row is of the table that lists the devices of every stage."""
    return "stage_devices" in row


def is_mixed_types(row: Mapping[str, str]) -> bool:
    """Whether a run mixes GPU types."""
    return "|" in row.get("gpu_types", "")


def mixed_run(row: Mapping[str, str]) -> Run:
    """The run of a row; :class:`UnsupportedError` where plan or measurement is not stated."""
    if not (row.get("stage_devices") or "").strip():
        raise UnsupportedError("no plan is stated")
    if "TransGAN" in row["model"]:
        raise UnsupportedError("TransGAN is no language model")
    if "profile" in row.get("kind", ""):
        raise UnsupportedError("sum of a profile with a hook on every layer, precision not stated: no training step")
    columns = {
        "seq_len": "seq_len", "num_gpus": "num_gpus", "gpus_per_node": "gpus_per_node", "tp": "tp", "pp": "pp",
        "dp": "dp", "micro_batch": "micro_batch", "global_batch": "global_batch", "framework": "framework",
        "model": "model", "recompute": "recompute", "precision": "precision", "id": "id",
        "step_time_s": "measured_iter_time_s", "gpu_type": "gpu_types", "interconnect": "cluster",
    }  # fmt: skip
    flags = "fp32_allreduce=1" if "fp32_allreduce" in row.get("framework", "") else ""
    return run_of({**row, **{to: row.get(name, "") for to, name in columns.items()}, "other_flags": flags})


def mixed_case(run: Run, models: Mapping[str, Mapping[str, Any]]) -> Case:
    """The case of a run; :class:`UnsupportedError` says why there is none."""
    try:
        return _case(run, models)
    except (SpecError, ValidationError) as error:
        raise UnsupportedError(f"plan cannot be expressed: {str(error)[:200]}") from error
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise UnsupportedError(f"stage_devices or a model column cannot be read: {error}") from error


def _case(run: Run, models: Mapping[str, Mapping[str, Any]]) -> Case:
    notes: list[str] = []
    stack = stack_of(run.framework)
    devices = members_of(run.row["stage_devices"])
    model = model_of(run.model, _architecture(run, models, notes), notes)
    cluster = mixed_cluster(run, devices, notes)
    precision = precision_of(run, stack, cluster, notes)
    if precision == "tf32" and any("tf32" not in gpu.peak_flops for gpu in cluster.gpus.values()):
        precision = "fp32"  # which is tf32 on the types that have it
    m = _micro_batches(run, _replicas(devices[0]))
    recompute = recompute_of(run, stack, model, len(devices), notes)
    sharding = sharding_of(run, stack, max(_replicas(stage) for stage in devices), len(devices), notes)
    options = options_of(run, stack, max(stage[0].tp for stage in devices), notes)
    blocks = _blocks(run, model.num_layers)
    stages: list[Stage] = []
    rank = 0
    for p, groups in enumerate(devices):
        if any(group.tp != groups[0].tp for group in groups):
            raise UnsupportedError(f"replicas of stage {p} differ in their tensor parallelism")
        tp, dp = groups[0].tp, _replicas(groups)
        if run.global_batch_size % (m * dp):
            raise UnsupportedError(f"micro-batches do not go evenly over the {dp} replicas of stage {p}")
        placed = []
        for group in groups:
            size, name = group.tp * group.replicas, group.gpu
            ranks = (format_range(rank, rank + size - 1),)
            placed.append(Group(pool=name, gpu=cluster.pool(name).gpu, ranks=ranks, micro_batches=m))
            rank += size
        stages.append(
            Stage(
                chunks=(Chunk(order=p, blocks=collapse_blocks(blocks[p])),),
                degrees=Degrees(tp=tp, dp=dp, etp=tp, edp=dp),
                micro_batch_size=run.global_batch_size // (m * dp),
                recompute=recompute,
                sharding=sharding,
                groups=tuple(placed),
            )
        )
    tp_of, dp_of = ([getattr(stage.degrees, name) for stage in stages] for name in ("tp", "dp"))
    same_tp, same_dp = _same(tp_of), _same(dp_of)
    plan = Plan(
        tp=same_tp, pp=len(stages), cp=1, ep=1, etp=same_tp, dp=same_dp, edp=same_dp,
        micro_batch_size=_same([stage.micro_batch_size for stage in stages]), num_microbatches=m, schedule="1f1b",
        sharding=sharding, recompute=recompute, stages=tuple(stages), options=options,
    )  # fmt: skip
    workload = workload_of(run, stack, model, precision, sharding, run.global_batch_size, mtp=False)
    target = target_of(run, stack, options)
    return Case(run, stack, "", model, cluster, workload, target, plan, 1.0, tuple(notes))


def _same(values: list[int]) -> int | None:
    return values[0] if len(set(values)) == 1 else None


def _replicas(stage: list[Members]) -> int:
    return sum(group.replicas for group in stage)


def members_of(text: str) -> list[list[Members]]:
    """``stage_devices``: for each stage the groups of equal replicas that hold it."""
    stages = [[Members(g["gpu"], int(g["tp"]), int(g["replicas"])) for g in stage] for stage in json.loads(text)]
    if not stages or not all(stages):
        raise UnsupportedError("a stage has no devices")
    return stages


def _micro_batches(run: Run, dp: int) -> int:
    m = run.global_batch_size / ((run.micro_batch_size or 1) * dp)
    stated = number(run.row.get("num_microbatches"))
    if m != int(m) or (stated and round(stated) != m):
        raise UnsupportedError(f"{run.global_batch_size} samples do not go evenly over {dp} replicas")
    return int(m)


def _architecture(run: Run, models: Mapping[str, Mapping[str, Any]], notes: list[str]) -> dict[str, Any]:
    """The model file's entry, else a GPT from the row's own columns: feed-forward of 4 hidden sizes, plain GELU."""
    row = run.row
    found = dict(models.get(run.model, {}))
    if not found:
        hidden = int(row["hidden"] or 0)
        if not hidden or not row["heads"]:
            raise UnsupportedError(f"the shape of {run.model!r} is not stated")
        found = {
            "num_layers": int(row["num_layers"]), "hidden_size": hidden, "ffn_hidden_size": 4 * hidden,
            "num_attention_heads": int(row["heads"]), "vocab_size": int(row["vocab"]), "gated_linear_unit": False,
        }  # fmt: skip
        notes.append("GPT of the stated width: feed-forward of four hidden sizes")
    if "tied_embeddings" not in found:
        notes.append("embedding and head share their weight (GPT-2)")
    return {"tied_embeddings": True, "position_embedding_type": "learned_absolute", **found}


def _blocks(run: Run, layers: int) -> list[list[tuple[str, int]]]:
    """Blocks of each stage from cut points over the source's layer list, else from the layers of each stage."""
    cuts = json.loads(run.row.get("partition_cut_points") or "[]")
    if not cuts:
        sizes = json.loads(run.row.get("layers_per_stage") or "[]")
    else:
        extra = cuts[-1] - layers
        if extra not in LEADING:
            raise UnsupportedError(f"{cuts[-1]} entries are cut, but the model has {layers} layers")
        first = LEADING[extra]
        sizes = [max(min(end, first + layers) - max(start, first), 0) for start, end in pairwise(cuts)]
    if sum(sizes) != layers:
        raise UnsupportedError(f"the stages hold {sum(sizes)} of {layers} layers")
    out: list[list[tuple[str, int]]] = []
    begin = 0
    for size in sizes:
        out.append([("decoder", i) for i in range(begin, begin + size)])
        begin += size
    out[0].insert(0, ("embed", 0))
    out[-1].append(("head", 0))
    return out


# -- cluster ---------------------------------------------------------------------------------------------------------


@cache
def _nodes() -> list[dict[str, Any]]:
    text = files("meshwright.cost_models.data").joinpath("measured_nodes.json").read_text()
    nodes: list[dict[str, Any]] = json.loads(text)["nodes"]
    return nodes


def mixed_cluster(run: Run, devices: list[list[Members]], notes: list[str]) -> ClusterSpec:
    """One pool for each GPU type, with the links that were measured on such nodes; pools meet at the slower network."""
    counts: dict[str, int] = {}
    for group in (group for stage in devices for group in stage):
        counts[group.gpu] = counts.get(group.gpu, 0) + group.tp * group.replicas
    pools, networks, ports = [], [], {}
    for gpu, count in counts.items():
        per_node = min(run.gpus_per_node or count, count)
        if count % per_node:
            raise UnsupportedError(f"{count} {gpu} do not fill nodes of {per_node}")
        form: dict[str, Any] = {
            "name": gpu, "gpu": RENAMED.get(gpu, gpu), "nodes": count // per_node,
            "gpus_per_node": per_node,
        }  # fmt: skip
        if gpu in RENAMED:
            notes.append(f"{gpu} is priced as {RENAMED[gpu]}: its measured rates and memory are those of the Ti")
        node = _node_of(run, gpu)
        if node is not None:
            levels, network = _levels(node, per_node, count)
            form["levels"] = levels
            networks.append(network)
            ports[form["name"]] = node["nic_bytes_per_s"] / node.get("ports", 1)
        pools.append(form)
    data: dict[str, Any] = {"pools": pools}
    if len(pools) > 1 and len(networks) == len(pools):
        data["inter_pool"] = min(networks, key=lambda network: network[0])[1]
    return _with_ports(cluster_from_data(data), ports)


def _with_ports(cluster: ClusterSpec, ports: Mapping[str, float]) -> ClusterSpec:
    """The cluster with what one GPU alone reaches on the network of its pool, and between pools."""

    def ported(level: NetworkLevel, port: float | None) -> NetworkLevel:
        return level if level.kind in ("nvlink", "pcie") else level.model_copy(update={"port_bytes_per_s": port})

    pools = tuple(
        pool.model_copy(update={"levels": tuple(ported(level, ports.get(pool.name)) for level in pool.levels)})
        for pool in cluster.pools
    )
    between = cluster.inter_pool
    joined = ported(between, min(ports.values(), default=None)) if between else None
    return cluster.model_copy(update={"pools": pools, "inter_pool": joined})


def _node_of(run: Run, gpu: str) -> dict[str, Any] | None:
    words = run.interconnect.lower()
    return next((n for n in _nodes() if n["cluster"] in words and gpu.startswith(n["gpu"])), None)


def _nominal(kind: LinkKind, bus_bytes_per_s: float, gpus: int, buffer_bytes: float) -> float:
    """Bandwidth of a link over which an all-reduce of ``gpus`` reaches ``bus_bytes_per_s``; the rate of a curve depends
    on the buffer over the bandwidth, so look again at the bandwidth found."""
    nominal = bus_bytes_per_s
    for _ in range(3):
        level = NetworkLevel(name=kind, kind=kind, span=gpus, bandwidth_bytes_per_s=nominal, latency_s=0.0)
        seconds = float(collective_s("all_reduce", [level], buffer_bytes, gpus, 1))
        nominal *= bus_bytes_per_s * seconds / (2 * (gpus - 1) / gpus * buffer_bytes)
    return nominal


def _levels(
    node: dict[str, Any], per_node: int, count: int
) -> tuple[list[dict[str, Any]], tuple[float, dict[str, Any]]]:
    """Levels of a pool of measured nodes, and (bytes/s, form) of a GPU's share of its network."""
    rates = {int(n): float(rate) for n, rate in node["all_reduce_bytes_per_s"].items()}
    near = min(rates, key=lambda n: abs(n - per_node))
    inside = _nominal(node["link"], rates[near], near, node["all_reduce_buffer_bytes"])
    levels: list[dict[str, Any]] = []
    if per_node > 1:
        levels.append(
            {"name": node["link"], "kind": node["link"], "bandwidth": f"{inside} B/s", "latency": "2 us",
             "span": per_node}
        )  # fmt: skip
    share = node["nic_bytes_per_s"] / per_node
    latency = f"{LATENCY_US[node['nic']]} us"
    network = {"name": node["nic"], "kind": node["nic"], "bandwidth": f"{share} B/s", "latency": latency}
    if count > per_node or not levels:
        levels.append({**network, "span": "all"})
    return levels, (share, network)
