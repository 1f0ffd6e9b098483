"""Fit cost_models/data/collectives.json on measured collectives and print the errors.

    python -m benchmarks.fit_collectives [--write]

Data in benchmarks/data/collectives (gzipped CSV, NOTICE names sources and licences). Needs numpy only. Errors are
|predicted / measured - 1|, median and 95th percentile. Held out: every second size (the curve is built from the
others), one GPU type of a family (the curve is built from its siblings), one node count (the fit sees the others),
or a data set that no fit has seen.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.cost_models.collectives import collective_s, expert_exchange_s, p2p_s
from meshwright.cost_models.feed_forward_time import touched
from meshwright.cost_models.links import Curve, curve_from
from meshwright.specs.cluster import NetworkLevel

DATA = Path(__file__).parent / "data" / "collectives"
OUT = Path(__file__).parents[1] / "cost_models" / "data" / "collectives.json"
OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
GROUPS = (2, 4, 8)
SIZES = [2**power for power in range(9, 30)]  # 512 bytes to 512 MiB
#: Families of links: the GPUs whose curves are averaged, and the bandwidth of their link (datasheets, a direction).
FAMILIES: dict[str, tuple[tuple[str, ...], float]] = {
    "nvlink3": (("a100_sxm",), 300e9),
    "nvlink4": (("h100_sxm", "h200_sxm"), 450e9),
    "nvlink5": (("b200_sxm", "b300_sxm", "gb200", "gb300"), 900e9),
    "pcie5": (("rtx_pro_6000_server",), 63e9),
    "pcie-host": (("l40s",), 31.5e9),
}
#: Link of a GPU in SimAI's ratio tables, which name none: 400 Gbit/s, at which its start-up per node and pass (38 us)
#: is that of NCCL's tuning.cc (7 NVLink hops of 3.4 us and one network hop of 14 us).
SIMAI_BYTES_PER_S = 50e9
#: What Sailor's timing adds to a send or collective: framework and synchronisation, the same on all its GPUs.
HARNESS_S = 65e-6
Row = dict[str, Any]


def rows(name: str) -> list[Row]:
    """A data file with numbers as numbers."""
    with gzip.open(DATA / f"{name}.csv.gz", "rt") as file:
        out: list[Row] = list(csv.DictReader(file))
    for row in out:
        for key, value in row.items():
            try:
                row[key] = float(value)
            except ValueError:
                continue
    return out


def report(label: str, predicted: Iterable[float], measured: Iterable[float]) -> dict[str, float]:
    """Print and return median and 95th percentile error."""
    error = np.abs(np.array(list(predicted)) / np.array(list(measured)) - 1)
    out = {"median": float(np.median(error)), "p95": float(np.quantile(error, 0.95))}
    bias = np.median(np.array(list(predicted)) / np.array(list(measured))) - 1
    print(f"{label:66} {len(error):5} {out['median']:7.1%} {out['p95']:7.1%} {bias:+7.1%}")
    return out


# -- curves inside a node ----------------------------------------------------------------------------------------------


def monotone(us: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Between the running maximum from below and the running minimum from above: more bytes never take less time."""
    return np.sqrt(np.maximum.accumulate(us) * np.minimum.accumulate(us[::-1])[::-1])


def curve_entry(table: list[Row], gpus: tuple[str, ...], bandwidth: float, sizes: list[int]) -> dict[str, Any]:
    """JSON form of a curve: geometric mean over ``gpus``; sizes left out are interpolated in the logarithms."""
    seen: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for row in table:
        if row["gpu"] in gpus:
            seen[row["op"], int(row["gpus"]), int(row["bytes"])].append(row["us"])
    us = {}
    for op in OPS:
        us[op] = []
        for n in GROUPS:
            known = [size for size in sizes if (op, n, size) in seen]
            if not known:  # rack-scale boards were measured on 4 GPUs only
                us[op].append(us[op][-1])
                continue
            mean = [float(np.mean(np.log2(seen[op, n, size]))) for size in known]
            line = 2 ** np.interp(np.log2(SIZES), np.log2(known), mean)
            us[op].append([float(f"{value:.4g}") for value in monotone(line)])
    return {"gpus": list(gpus), "bandwidth_bytes_per_s": bandwidth, "first_log2": 9, "us": us, "pair_share": 1.0}


def is_quad(row: Row) -> bool:
    """Large all-reduces of four GH200 joined without a switch."""
    return bool(row["gpu"] == "GH200-96GB" and row["op"] == "all_reduce" and row["bytes"] >= 2**24)


def with_all_reduce(entry: dict[str, Any], found: list[Row], bandwidth: float) -> dict[str, Any]:
    """A curve for boards without switches, of which large all-reduces were measured.

    Below the first measured size the base curve holds. The other operations keep their ratio to all-reduce. A group
    that was not measured takes the times of the next smaller one.
    """
    base = curve_from(entry)
    mine: list[tuple[float, float]] = []
    us: dict[str, list[list[float]]] = {op: [] for op in OPS}
    for n in GROUPS:
        sizes = np.array(SIZES, dtype=float)
        scaled, group = sizes * base.bandwidth_bytes_per_s / bandwidth, np.full(len(SIZES), float(n))
        mine = sorted((r["bytes"], r["us"]) for r in found if r["gpus"] == n) or mine
        x, y = (np.log2(np.array(column)) for column in zip(*mine, strict=True))
        plain = 1e6 * base.seconds("all_reduce", scaled, group)
        factor = np.where(np.log2(sizes) >= x[0], 2 ** np.interp(np.log2(sizes), x, y) / plain, 1.0)
        for op in OPS:
            values = monotone(1e6 * base.seconds(op, scaled, group) * factor)  # type: ignore[arg-type]
            us[op].append([float(f"{value:.4g}") for value in values])
    return entry | {"gpus": sorted({r["gpu"] for r in found}), "bandwidth_bytes_per_s": bandwidth, "us": us}


def predict(curve: Curve, found: list[Row], bandwidth: float, start_s: float = 0.0) -> list[float]:
    """Microseconds of rows by a curve on a link of ``bandwidth``."""
    out = []
    for row in found:
        scaled = np.array([row["bytes"] * curve.bandwidth_bytes_per_s / bandwidth])
        out.append(1e6 * (float(curve.seconds(row["op"], scaled, np.array([row["gpus"]]))[0]) + start_s))
    return out


def inside_errors() -> None:
    """Held-out sizes and held-out GPU types of the NCCL tables, then other people's boards."""
    table = rows("nccl")
    for name, (gpus, bandwidth) in FAMILIES.items():
        for which, kept, left in (("odd", SIZES[0::2], SIZES[1::2]), ("even", SIZES[1::2], SIZES[2:-1:2])):
            for op in OPS:
                predicted, measured = [], []
                for gpu in gpus:
                    curve = curve_from(curve_entry(table, (gpu,), bandwidth, kept))
                    found = [r for r in table if r["gpu"] == gpu and r["op"] == op and r["bytes"] in left]
                    predicted += predict(curve, found, bandwidth)
                    measured += [r["us"] for r in found]
                report(f"{name} {op}, {which} sizes held out", predicted, measured)
        for gpu in gpus if len(gpus) > 1 else ():
            others = tuple(other for other in gpus if other != gpu)
            curve = curve_from(curve_entry(table, others, bandwidth, SIZES))
            for n in GROUPS:
                found = [r for r in table if r["gpu"] == gpu and r["gpus"] == n]
                if found:
                    report(
                        f"{name} {gpu} x{n}, GPU held out", predict(curve, found, bandwidth), [r["us"] for r in found]
                    )
    entry = {name: curve_from(curve_entry(table, *FAMILIES[name], SIZES)) for name in FAMILIES}
    for target, source in (("nvlink4", "nvlink3"), ("nvlink3", "nvlink4"), ("nvlink5", "nvlink4")):
        found = [r for r in table if r["gpu"] in FAMILIES[target][0]]
        predicted = predict(entry[source], found, FAMILIES[target][1])
        report(f"{target} from {source} scaled by bandwidth (generation held out)", predicted, [r["us"] for r in found])
    v100 = [r for r in rows("vtrain") if r["gpu"] == "V100"]
    entry["nvlink2"] = curve_from(with_all_reduce(curve_entry(table, *FAMILIES["nvlink3"], SIZES), v100, 150e9))
    found = [r for r in v100 if r["gpus"] not in GROUPS]
    report("vtrain V100 all_reduce by nvlink2, groups of 3, 5, 6, 7 held out", predict(entry["nvlink2"], found, 150e9),
           [r["us"] for r in found])  # fmt: skip
    checks = (
        ("vtrain", "A100", "nvlink3", 300e9), ("sailor", "A100-40GB", "nvlink3", 300e9),
        ("sailor", "V100-16GB", "nvlink2", 150e9),
        ("sailor", "RTX-3090", "pcie-host", 31.5e9), ("sailor", "Titan-RTX", "pcie-host", 15.75e9),
        ("nnscaler", "MI200", "nvlink3", 100e9),
    )  # fmt: skip
    for name, gpu, link, bandwidth in checks:
        found = [r for r in rows(name) if r["gpu"] == gpu and r["op"] == "all_reduce" and r["bytes"] >= 2**24]
        predicted = predict(entry[link], found, bandwidth)
        report(f"{name} {gpu} all_reduce >= 16 MiB by {link} (unseen)", predicted, [r["us"] for r in found])


# -- across nodes ------------------------------------------------------------------------------------------------------


def node_levels(rate: float = SIMAI_BYTES_PER_S) -> list[NetworkLevel]:
    return [
        NetworkLevel(name="nvlink4", kind="nvlink", span=8, bandwidth_bytes_per_s=450e9, latency_s=1.11e-6),
        NetworkLevel(name="ib", kind="infiniband", span=1024, bandwidth_bytes_per_s=rate, latency_s=5e-6),
    ]


def ring_s(x: npt.NDArray[np.float64], nodes: Any, size: Any) -> npt.NDArray[np.float64]:
    """One pass of a ring over nodes of 8 GPUs: ``x`` = (seconds a node, share of the port, seconds
    a root byte of a port)."""
    gpus = 8 * nodes
    out: npt.NDArray[np.float64] = x[0] * nodes + size * (gpus - 1) / gpus / (8 * SIMAI_BYTES_PER_S * x[1])
    return out + x[2] * np.sqrt(size / 8)


def fit_ring(found: list[Row]) -> npt.NDArray[np.float64]:
    """Least squares of the logarithms by Gauss-Newton on the three constants, kept positive."""
    nodes, size = (np.array([r[k] for r in found]) for k in ("nodes", "bytes"))
    target = np.log(size / (8 * SIMAI_BYTES_PER_S * np.array([r["ratio"] for r in found])))
    theta = np.log(np.array([38e-6, 0.95, 1e-8]))
    for _ in range(60):
        base = np.log(ring_s(np.exp(theta), nodes, size))
        jacobian = np.stack(
            [(np.log(ring_s(np.exp(theta + 1e-5 * unit), nodes, size)) - base) / 1e-5 for unit in np.eye(3)], axis=1
        )
        damped = np.vstack([jacobian, 0.03 * np.eye(3)])
        step = np.linalg.lstsq(damped, np.append(target - base, np.zeros(3)), rcond=None)[0]
        theta = theta + np.clip(step, -0.5, 0.5)
        theta[1] = min(theta[1], 0.0)
    return np.exp(theta)


def across_errors() -> None:
    """SimAI's ratios: bus bandwidth of a ring all-reduce over the ports' bandwidth, 2 to 128 nodes."""
    found = [r for r in rows("simai") if r["op"] == "all_reduce" and r["nodes"] >= 2]
    x = fit_ring(found)
    print(f"ring over nodes of 8: {x[0] * 1e6:.1f} us a node and pass, {x[1]:.3f} of the port, root {x[2]:.2e}")
    predicted, measured = [], []
    for n in sorted({r["nodes"] for r in found}):
        x = fit_ring([r for r in found if r["nodes"] != n])
        held = [r for r in found if r["nodes"] == n]
        predicted += [float(ring_s(x, r["nodes"], r["bytes"])) for r in held]
        measured += [r["bytes"] / (8 * SIMAI_BYTES_PER_S * r["ratio"]) for r in held]
    report("ring across nodes, node count held out", predicted, measured)
    seconds = [float(collective_s("all_gather", node_levels(), r["bytes"], int(8 * r["nodes"]), 1)) for r in found]
    bus = [r["bytes"] * (1 - 1 / (8 * r["nodes"])) / (8 * SIMAI_BYTES_PER_S * r["ratio"]) for r in found]
    report("  as shipped (all-gather: one pass)", seconds, bus)
    seconds = [float(collective_s("all_reduce", node_levels(), r["bytes"], int(8 * r["nodes"]), 1)) for r in found]
    report("  as shipped (all-reduce by the best algorithm)", seconds, [2 * b for b in bus])


# -- sends and expert exchange -----------------------------------------------------------------------------------------


def send_errors() -> None:
    """Sailor's send curves, with its harness."""
    boards = (
        ("A100-40GB", "nvlink3", "nvlink", 300e9), ("V100-16GB", "nvlink2", "nvlink", 150e9),
        ("GH200-96GB", "nvlink4-quad", "nvlink", 450e9), ("RTX-2080", "pcie3", "pcie", 15.75e9),
        ("Titan-RTX", "pcie3", "pcie", 15.75e9),
    )  # fmt: skip
    table = rows("sailor_p2p")
    for gpu, name, kind, bandwidth in boards:
        level = NetworkLevel.model_validate(
            {"name": name, "kind": kind, "span": 8, "bandwidth_bytes_per_s": bandwidth, "latency_s": 1e-6,
             "peer_to_peer": kind != "pcie"}
        )  # fmt: skip
        found = [r for r in table if r["gpu"] == gpu and r["link"] == "intra-node"]
        measured = [r["bytes"] / r["busbw_gbps"] / 1e9 for r in found]
        report(f"send {gpu}", [HARNESS_S + float(p2p_s([level], r["bytes"], 1)) for r in found], measured)
        rate = found[-1]["busbw_gbps"] * 1e9 / bandwidth
        print(f"  share of the link at {found[-1]['bytes'] / 2**20:.0f} MiB: {rate:.2f}")


def exchange_levels(gpu: str, gpus: int, nodes: int) -> list[NetworkLevel]:
    bandwidth = 450e9 if gpu.startswith("h") else 900e9
    inside = NetworkLevel(
        name="nvlink", kind="nvlink", span=gpus // nodes, bandwidth_bytes_per_s=bandwidth, latency_s=1e-6
    )
    if nodes == 1:
        return [inside]
    return [inside, *node_levels()[1:]]


def exchange_errors() -> None:
    """Expert exchange with one copy a rank and, between nodes, one copy a node (at most 4 nodes a token).

    DeepEP with 20 SMs on Hopper and 24 on Blackwell, TensorRT-LLM's two-sided exchange on a GB200 rack.
    """
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for r in rows("moe_exchange"):
        rack, sms = r["impl"] == "trtllm_nvlink_two_sided", 20 if r["gpu"].startswith("h") else 24
        usual = r["op"] in ("dispatch", "combine") and r["dtype"] in ("bfloat16", "fp8") and r["tokens"] >= 1024
        if not usual or not (rack or (r["impl"] == "deepep_normal" and r["sms"] == sms)):
            continue
        n, nodes, top_k = int(r["gpus"]), int(r["nodes"]), int(r["topk"])
        fp8 = r["op"] == "dispatch" and r["dtype"] == "fp8"
        volume = r["tokens"] * top_k * r["hidden"] * (1 + 4 / 128 if fp8 else 2)
        inner = n if rack else n // nodes
        per_rank = float(touched(np.array(float(n)), top_k, None)) / top_k
        per_node = float(touched(np.array(float(nodes)), top_k, 4)) / top_k
        levels = exchange_levels(r["gpu"], n, n // inner)
        seconds = float(expert_exchange_s(levels, volume, n, 1, per_node, per_rank))
        few = "top 4 and more" if top_k >= 4 else "top 1, 2"
        key = ("rack", r["gpu"], r["op"], f"{n} GPUs", few) if rack else (
            "DeepEP", r["gpu"], r["op"], f"{nodes} nodes of {inner}", few
        )  # fmt: skip
        groups[key].append((seconds, r["us"] * 1e-6))
    for key, pairs in sorted(groups.items()):
        report(" ".join(key), *zip(*pairs, strict=True))


def one_line(match: re.Match[str]) -> str:
    """A list of numbers without the line breaks that JSON's indentation puts between them."""
    return "[" + " ".join(match[1].split()) + "]"


def main(write: bool) -> None:
    if write:
        table, now = rows("nccl"), json.loads(OUT.read_text())
        for name, (gpus, bandwidth) in FAMILIES.items():
            old = now.setdefault("curves", {}).get(name, {})
            kept = {key: old[key] for key in ("pair_share", "in_switch") if key in old}
            now["curves"][name] = curve_entry(table, gpus, bandwidth, SIZES) | kept
        v100 = [r for r in rows("vtrain") if r["gpu"] == "V100"]
        base = curve_entry(table, *FAMILIES["nvlink3"], SIZES)
        kept = {"pair_share": now["curves"]["nvlink2"]["pair_share"]}
        now["curves"]["nvlink2"] = with_all_reduce(base, v100, 150e9) | kept
        quad = [r | {"us": r["us"] - 1e6 * HARNESS_S} for r in rows("sailor") if is_quad(r)]
        base = curve_entry(table, *FAMILIES["nvlink4"], SIZES)
        kept = {"pair_share": now["curves"]["nvlink4-quad"]["pair_share"]}
        now["curves"]["nvlink4-quad"] = with_all_reduce(base, quad, 450e9) | kept
        text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", one_line, json.dumps(now, indent=1))
        OUT.write_text(text + "\n")
    print(f"{'':66} {'rows':>5} {'median':>7} {'p95':>7} {'bias':>7}")
    inside_errors()
    across_errors()
    send_errors()
    exchange_errors()


if __name__ == "__main__":
    main("--write" in sys.argv)
