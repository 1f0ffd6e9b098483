"""Milliseconds a candidate to price 10,000 plan skeletons of DeepSeek-V3 on 256 H100 in bulk, and of single estimates.

    python -m benchmarks.bulk_pricing [CANDIDATES]

Prices the distinct cells once, sums even stages, and takes the lower bound of the step time of every candidate.
Then the full estimates of single plans, event simulation included (:mod:`.single_estimate`).
"""

from __future__ import annotations

import itertools
import sys
import time

import numpy as np

from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.step import step_bound_s
from meshwright.specs.batch import CandidateBatch
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.targets import load_target
from meshwright.specs.workload import Workload

from . import single_estimate
from .pricing_models import deepseek_v3

WORLD, BATCH = 256, 2048


def skeletons(count: int, modes: int) -> CandidateBatch:
    """The first ``count`` legal combinations of degrees, micro-batch, recompute and sharding."""
    rows = []
    powers = [2**i for i in range(9)]
    for tp, pp, cp, mbs in itertools.product(powers[:4], powers[:6], powers[:3], powers[:3]):
        if WORLD % (tp * pp * cp):
            continue
        dp, stage = WORLD // (tp * pp * cp), WORLD // pp
        if BATCH % (mbs * dp):
            continue
        m = BATCH // (mbs * dp)
        for ep, etp, vpp, recompute, sharding in itertools.product(powers, powers[:4], (1, 2), range(modes), (0, 1)):
            if stage % (ep * etp) or (vpp > 1 and (pp == 1 or m % pp)):
                continue
            rows.append((tp, pp, cp, ep, etp, dp, vpp, mbs, m, recompute, sharding))
    rows = rows[:: max(len(rows) // count, 1)][:count]
    return CandidateBatch(*np.array(rows, dtype=np.int64).T)


def price(costs: CostModel, batch: CandidateBatch) -> np.ndarray:
    """[N] lower bounds of the step time, blocks spread evenly over the stages."""
    cells, row = batch.cells()
    priced = costs.cells(cells)
    out = np.zeros(len(batch))
    kind = costs.blocks.kind_of
    for pp, vpp in np.unique(np.stack([batch.pp, batch.vpp]), axis=1).T:
        index = np.flatnonzero((batch.pp == pp) & (batch.vpp == vpp))
        cuts = np.linspace(0, len(kind), pp * vpp + 1).round().astype(int)[:-1]
        r = row[index]

        def stages(
            table: np.ndarray, r: np.ndarray = r, cuts: np.ndarray = cuts, p: int = pp, v: int = vpp
        ) -> np.ndarray:
            return np.add.reduceat(table[r][:, kind], cuts, axis=1).reshape(len(r), v, p).transpose(0, 2, 1)

        forward, backward = stages(priced.forward_s[:, 0]), stages(priced.backward_s[:, 0])
        dense, expert = stages(priced.dense_params).sum(-1), stages(priced.expert_params).sum(-1)
        pool = np.zeros_like(dense, dtype=np.int64)
        tail = costs.tail(priced, np.repeat(r[:, None], pp, axis=1), pool, dense, expert, backward.sum(-1))
        first = np.arange(pp) * (WORLD // pp)
        send = costs.boundary_s(priced, r[:, None], pool, pool, first[None, :])[:, : pp - 1]
        for m in np.unique(batch.num_microbatches[index]):
            same = batch.num_microbatches[index] == m
            part = type(tail)(tail.grad_reduce_s[same], tail.optimizer_s[same], tail.param_gather_s[same])
            name = "interleaved" if vpp > 1 else "1f1b"
            out[index[same]] = step_bound_s(name, forward[same], backward[same], send[same], int(m), part)
    return out


def main(count: int) -> None:
    target = load_target("megatron@0.19")
    workload = Workload(global_batch_size=BATCH, seq_length=4096)
    costs = CostModel(deepseek_v3(), load_cluster(f"{WORLD}xH100"), workload, target)
    batch = skeletons(count, len(target.recompute))
    cells, _ = batch.cells()
    start = time.perf_counter()
    bounds = price(costs, batch)
    seconds = time.perf_counter() - start
    print(f"{len(batch)} candidates, {len(cells)} cells: {seconds:.3f} s, {1e3 * seconds / len(batch):.4f} ms each")
    print(f"bounds from {bounds.min():.2f} to {bounds.max():.2f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
    single_estimate.main()
