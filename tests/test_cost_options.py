"""Random plans over real models, every schedule and every option: times close, are finite, and obey their signs."""

from __future__ import annotations

import math
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost_models import schedules
from meshwright.cost_models.blocks import block_kinds, table_of
from meshwright.cost_models.estimate import estimate
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.cluster_shorthand import parse_shorthand
from meshwright.specs.estimate import Estimate
from meshwright.specs.model import ModelSpec
from meshwright.specs.model_io import load_model
from meshwright.specs.plan import Chunk, Degrees, Group, HsdpSharding, Options, Plan, Stage, collapse_blocks
from meshwright.specs.plan import Hsdp as HsdpLevel
from meshwright.specs.schedules import CHUNKS
from meshwright.specs.target import RecomputeMode
from meshwright.specs.targets import load_target
from meshwright.specs.workload import Workload

from .hf_cases import CONFIGS

#: Dense, windowed, MLA with experts, experts without shared ones, state-space hybrid, linear attention, vision.
MODELS = ("qwen3-8b", "gemma-3-1b", "deepseek-v2-lite", "qwen3-30b-a3b", "nemotron-3-nano-30b-a3b",
          "qwen3-next-80b-a3b", "llava-1.5-7b")  # fmt: skip
MODES = (
    RecomputeMode(),
    RecomputeMode(granularity="full", method="uniform", num_layers=1),
    RecomputeMode(granularity="full", method="block", num_layers=2),
    RecomputeMode(granularity="selective", modules=("core_attn", "layernorm", "moe_act")),
)
Case = tuple[ModelSpec, ClusterSpec, Workload, Plan]


@cache
def model_of(name: str) -> ModelSpec:
    return load_model(str(CONFIGS / f"{name}.json"))


@cache
def cluster_of(text: str) -> ClusterSpec:
    return parse_shorthand(text)


@st.composite
def options(draw: st.DrawFn) -> Options:
    flag = st.booleans()
    return Options(
        sequence_parallel=draw(flag), overlap_grad_reduce=draw(flag), overlap_param_gather=draw(flag),
        tp_comm_overlap=draw(flag), overlap_p2p=draw(flag), ep_comm_overlap=draw(flag), delay_wgrad=draw(flag),
        moe_shared_expert_overlap=draw(flag), fp8_dispatch=draw(flag), cuda_graph=draw(flag),
        dispatcher=draw(st.sampled_from([None, "allgather", "alltoall", "flex"])),
        grad_bucket_params=draw(st.sampled_from([None, 10**7])),
        cp_comm_type=draw(st.sampled_from([None, "p2p", "a2a", "allgather", "a2a+p2p"])), cp_a2a_size=2,
        cuda_graph_scope=draw(st.sampled_from([(), ("attn",), ("moe_router", "moe_preprocess"), ("mamba", "mlp")])),
        activation_offload_layers=draw(st.sampled_from([0, 0, 2, 99])),
        activation_offload_modules=draw(st.sampled_from([(), ("core_attn", "expert_fc1")])),
        optimizer_offload_fraction=draw(st.sampled_from([0.0, 0.5, 1.0])),
        optimizer_offload_overlap=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A plan over 16 GPUs that its schedule runs; blocks spread over its places in order."""
    model = model_of(draw(st.sampled_from(MODELS)))
    cluster = cluster_of(draw(st.sampled_from(["16xH100", "16xA100-SXM-80GB", "8xH100+8xA100-SXM-80GB"])))
    name = draw(st.sampled_from(sorted(CHUNKS)))
    schedule, (least, most) = schedules.get(name), CHUNKS[name]
    pp, vpp = draw(st.sampled_from([2, 4])), draw(st.integers(least, most or 3))
    m = draw(st.sampled_from([m for m in (pp, 2 * pp, 4 * pp) if schedule.legal(pp, vpp, m) is None]))
    ranks = 16 // pp
    tp = draw(st.sampled_from([1, 2, 4]))
    cp = draw(st.sampled_from([c for c in (1, 2) if ranks % (tp * c) == 0]))
    ep = draw(st.sampled_from([1, 2, ranks])) if model.is_moe else 1
    dp, mode = ranks // (tp * cp), MODES[0] if schedule.splits_backward else draw(st.sampled_from(MODES))
    levels = ["none", "zero1", "zero2", "zero3", "fsdp", HsdpLevel(hsdp=HsdpSharding(replicate=dp, shard=1))]
    sharding = draw(st.sampled_from(levels))
    workload = Workload(
        global_batch_size=m * dp, seq_length=2048, precision="bf16", mtp=draw(st.booleans()),
        task=draw(st.sampled_from(["pretrain", "lora"])),
    )  # fmt: skip
    blocks, places = table_of(block_kinds(model, workload)).instances, pp * vpp
    cuts = [round(i * len(blocks) / places) for i in range(places + 1)]
    order = schedule.placement(pp, vpp).orders()
    degrees = Degrees(tp=tp, cp=cp, dp=dp, ep=ep, etp=1, edp=ranks // ep)
    stages = []
    for p in range(pp):
        chunks = tuple(
            Chunk(order=q, blocks=collapse_blocks(list(blocks[cuts[q] : cuts[q + 1]])))
            for q in (order[p, v] for v in range(vpp))
        )
        pool = cluster.pools[p * len(cluster.pools) // pp]
        ends = f"{p * ranks}-{(p + 1) * ranks - 1}"
        group = Group(pool=pool.name, gpu=pool.gpu, ranks=(ends,), micro_batches=m)
        stages.append(
            Stage(
                chunks=chunks, degrees=degrees, micro_batch_size=1, recompute=mode, sharding=sharding, groups=(group,)
            )
        )
    laid = Plan(
        tp=tp, pp=pp, cp=cp, ep=ep, etp=1, dp=dp, edp=ranks // ep, vpp=vpp, micro_batch_size=1, num_microbatches=m,
        schedule=name, sharding=sharding, recompute=mode, stages=tuple(stages), options=draw(options()),
    )  # fmt: skip
    return model, cluster, workload, laid


def price(case: Case, **changes: object) -> Estimate:
    model, cluster, workload, laid = case
    laid = laid.model_copy(update={"options": laid.options.model_copy(update=changes)})
    return estimate(model, cluster, workload, load_target("megatron@0.20"), laid)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_term_of_every_option_is_in_the_breakdown(case: Case) -> None:
    found = price(case)
    step = found.step_time_s
    assert math.isfinite(step)
    assert step > 0
    assert abs(sum(found.breakdown_s.values()) - step) <= 1e-9 * step
    assert min(found.breakdown_s.values()) >= -1e-9 * step
    assert 0 < found.mfu < 1
    assert set(found.rungs) == set(found.breakdown_s)
    for stage in found.stages:
        assert sum(stage.breakdown_bytes.values()) == stage.allocated_bytes
        assert stage.busy_s <= step * (1 + 1e-9)


#: Switches that hide work, and the sums of a stage that they may not lengthen. Whole steps may: what an order of
#: operations waits for can grow when one of them shrinks (Graham's anomalies), and offload loses its cover.
SWITCHES = ("tp_comm_overlap", "ep_comm_overlap", "moe_shared_expert_overlap", "fp8_dispatch", "cuda_graph")


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from(SWITCHES))
def test_no_switch_that_hides_work_lengthens_a_stage(case: Case, switch: str) -> None:
    off, on = price(case, **{switch: False}), price(case, **{switch: True})
    for before, after in zip(off.stages, on.stages, strict=True):
        assert after.forward_s <= before.forward_s * (1 + 1e-9)
        assert after.backward_s <= before.backward_s * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_faster_links_shorten_every_stage(case: Case) -> None:
    model, cluster, workload, laid = case
    pools = tuple(
        pool.model_copy(
            update={
                "levels": tuple(
                    level.model_copy(
                        update={
                            "bandwidth_bytes_per_s": 2 * level.bandwidth_bytes_per_s,
                            "port_bytes_per_s": level.port_bytes_per_s and 2 * level.port_bytes_per_s,
                        }
                    )
                    for level in pool.levels
                )
            }
        )
        for pool in cluster.pools
    )
    fast = price((model, cluster.model_copy(update={"pools": pools}), workload, laid))
    for before, after in zip(price(case).stages, fast.stages, strict=True):
        assert after.forward_s <= before.forward_s * (1 + 1e-9)
        assert after.backward_s <= before.backward_s * (1 + 1e-9)
