"""Milliseconds of CPU that ``estimate`` of one plan takes, event simulation included.

    python -m benchmarks.single_estimate

The median over fresh plans, which differ in degrees and micro-batches, so that none has been priced before.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator

import numpy as np

from meshwright.cost_models.blocks import block_table
from meshwright.cost_models.estimate import estimate
from meshwright.planner.answer.assemble import Skeleton, build_plan
from meshwright.planner.engine.arrangements import Arrangement
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.model import ModelSpec
from meshwright.specs.target import RecomputeMode, Target
from meshwright.specs.targets import load_target
from meshwright.specs.workload import Workload

from .pricing_models import deepseek_v3, llama

#: Plans that the median is taken over.
PLANS = 20
FULL = RecomputeMode(granularity="full", method="uniform", num_layers=1)
#: (model, GPUs, pp, vpp, micro-batches, candidate tp, cp, ep, micro-batch sizes). Micro-batch counts go down from the
#: stated one in steps of pp.
CASES = (
    (deepseek_v3(), 256, 16, 1, 128, (1, 2, 4), (1, 2), (8, 16), (1, 2)),
    (llama("llama-3.1-405b", 126, 16384, 128, 53248), 1024, 16, 8, 128, (4, 8), (1, 2, 4), (1,), (1, 2, 4)),
    (llama("llama-3.1-8b", 32, 4096, 32, 14336), 64, 1, 1, 32, (1, 2, 4, 8), (1, 2), (1,), (1, 2, 4)),
)


def skeletons(
    world: int, pp: int, vpp: int, most: int, tps: tuple[int, ...], cps: tuple[int, ...], eps: tuple[int, ...],
    sizes: tuple[int, ...],
) -> Iterator[Skeleton]:  # fmt: skip
    """Different plans of one pipeline that divide the GPUs."""
    ranks, number = world // pp, 0
    for mode, size, tp, cp, ep in itertools.product((RecomputeMode(), FULL), sizes, tps, cps, eps):
        if ranks % (tp * cp) or ranks % ep:
            continue
        m = most - pp * (number % 4)
        yield Skeleton(tp, cp, ep, 1 if ep > 1 else tp, ranks // (tp * cp), vpp, size, m, mode, "zero1")
        number += 1


def cpu_ms(model: ModelSpec, target: Target, world: int, pp: int, vpp: int, chosen: list[Skeleton]) -> list[float]:
    """CPU milliseconds of ``estimate`` for each skeleton, blocks spread evenly over the chunks."""
    cluster, out = load_cluster(f"{world}xH100"), []
    for one in chosen:
        batch = one.num_microbatches * one.micro_batch_size * one.dp
        workload = Workload(global_batch_size=batch, seq_length=4096)
        blocks = block_table(model, workload, target)
        cuts = np.linspace(0, len(blocks.instances), pp * vpp + 1).round().astype(np.int64)
        plan = build_plan(model, cluster, target, blocks, Arrangement(world // pp, (0,), (pp,)), one, cuts)
        start = time.process_time()
        estimate(model, cluster, workload, target, plan)
        out.append(1e3 * (time.process_time() - start))
    return out


def main() -> None:
    target = load_target("megatron@0.19")
    for model, world, pp, vpp, most, *degrees in CASES:
        chosen = list(skeletons(world, pp, vpp, most, *degrees))
        took = cpu_ms(model, target, world, pp, vpp, chosen[:PLANS])
        print(
            f"{model.name} on {world} GPUs, pp {pp} x vpp {vpp}, {most} micro-batches: "
            f"median {statistics.median(took):.1f} ms, first {took[0]:.1f} ms, {len(took)} plans"
        )


if __name__ == "__main__":
    main()
