"""What the partition over GPU types gains: our plan against an even split and against one GPU type.

    python -m benchmarks.mixed_gain            # every case, as a table of docs/mixed.md
    python -m benchmarks.mixed_gain llama-3.1-70b

A case is planned in a process of its own (CPU seconds and peak memory include the start). *Even split*: the best over
the skeletons and layouts that the search simulated, with equal decoder layers in every chunk, by the same events, that
fits. *Single type*: the best plan on any one pool alone. Gains are the other's step time over ours, minus one.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

#: Model, cluster, global batch, sequence, precision.
CASES = (
    ("llama-3.1-70b", "16x8xH100-SXM+32x8xA100-80GB+16x8xL40S", 512, 8192, "bf16"),
    ("llama-3.1-70b", "16x8xH100-SXM+16x8xA100-80GB", 512, 8192, "bf16"),
    ("llama-2-13b", "4x8xA100-80GB+4x8xV100-32GB", 512, 4096, "fp16"),
    ("mixtral-8x7b", "8x8xH100-SXM+8x8xA100-80GB", 512, 4096, "bf16"),
    ("qwen3-235b-a22b", "16x8xH200+16x8xH100-SXM", 1024, 4096, "bf16"),
    ("deepseek-v3", "64x8xH200+64x8xA100-80GB", 4096, 4096, "bf16"),
    ("deepseek-v3", "1024x8xH100-SXM+1024x8xA100-80GB", 16384, 4096, "bf16"),
)


def main() -> int:
    """Print the table."""
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(*json.loads(sys.argv[2]))))
        return 0
    print("| model | cluster | step | gap | layers | even split | best single type | CPU | memory |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in CASES:
        if sys.argv[1:] and case[0] not in sys.argv[1:]:
            continue
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.mixed_gain", "--one", json.dumps(case)],
            capture_output=True,
            text=True,
            check=True,
        )
        print(row(case, json.loads(done.stdout)), flush=True)
    return 0


def row(case: tuple[str, str, int, int, str], found: dict[str, object]) -> str:
    """One line of the table."""

    def gain(value: object) -> str:
        return "does not fit" if value is None else f"{float(str(value)) / float(str(found['step_s'])) - 1:+.0%}"

    return (
        f"| {case[0]} | {case[1]} | {found['step_s']:.3f} s | {found['gap']:.1%} | {found['layers']} "
        f"| {gain(found['even_s'])} | {gain(found['single_s'])} | {found['cpu_s']:.1f} s | {found['mib']} MiB |"
    )


def measure(model: str, cluster: str, batch: int, seq: int, precision: str) -> dict[str, object]:
    """Step time and gap of our plan; step times of the best even split and the best single pool."""
    from meshwright.planner.engine.explore import Search
    from meshwright.planner.request import PlanRequest
    from meshwright.planner.search import plan
    from meshwright.specs.cluster_io import load_cluster
    from meshwright.specs.model_io import load_model
    from meshwright.specs.targets import load_target
    from meshwright.specs.workload import workload_from_options

    work = workload_from_options({"global_batch_size": batch, "seq_length": seq, "precision": precision})
    asked = PlanRequest(
        model=load_model(model), cluster=load_cluster(cluster), workload=work, target=load_target("megatron@0.19")
    )
    answer = plan(asked)
    cpu_s, mib = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    if answer.plan is None or answer.estimate is None or answer.bound is None:
        raise SystemExit(f"{model} on {cluster}: {answer.reason}")
    layers: list[str] = []
    for stage in answer.plan.stages:
        count = sum(_decoders(block) for chunk in stage.chunks for block in chunk.blocks)
        layers.append(f"{stage.groups[0].gpu}: {count}")
    result = Search(asked).run()
    evens = [step for finalist in result.finalists if (step := _even_s(finalist)) is not None]
    singles = []
    for pool in asked.cluster.pools:
        alone = asked.cluster.model_copy(update={"pools": (pool,), "links": ()})
        single = plan(asked.model_copy(update={"cluster": alone}))
        if single.estimate is not None:
            singles.append(single.estimate.step_time_s)
    return {
        "step_s": answer.estimate.step_time_s,
        "gap": answer.bound.gap,
        "layers": _runs(layers),
        "even_s": min(evens, default=None),
        "single_s": min(singles, default=None),
        "cpu_s": cpu_s,
        "mib": mib,
    }


def _decoders(block: str) -> int:
    name, _, span = block.partition(":")
    if name != "decoder":
        return 0
    first, _, last = span.partition("-")
    return int(last or first) - int(first) + 1


def _runs(layers: list[str]) -> str:
    out: list[tuple[str, int]] = []
    for text in layers:
        out = [*out[:-1], (text, out[-1][1] + 1)] if out and out[-1][0] == text else [*out, (text, 1)]
    return ", ".join(f"{count} x {text}" for text, count in out)


def _even_s(finalist: object) -> float | None:
    """Step time of the finalist's skeleton with equal layers in every chunk, with the fewest layers recomputed that
    fit; None where none fits."""
    import numpy as np

    from meshwright.planner.answer.explain import even_cuts
    from meshwright.planner.engine.finalists import Finalist

    if not isinstance(finalist, Finalist):
        raise TypeError("a finalist of a search")
    cuts = even_cuts(finalist)
    cuts = finalist.cuts if cuts is None else cuts
    index = np.array([finalist.candidate])
    longest = int(np.diff(cuts).max())
    for leading in range(longest + 1) if finalist.batch.is_block[finalist.candidate] else (finalist.leading,):
        if finalist.batch.fits(index, cuts[None], np.array([leading]))[0]:
            return float(finalist.batch.step_s(finalist.candidate, cuts[None], leading)[0])
    return None


if __name__ == "__main__":
    sys.exit(main())
