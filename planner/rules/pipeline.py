"""Rules on the pipeline split, interleaving, context parallelism and sequence length (P, C of the table)."""

from __future__ import annotations

import numpy as np

from .facts import Facts
from .logic import both, divides, divisors, either, every, implies, multiples_around, nearest, no, options
from .rule import Rule

_CP_COMM = ("p2p", "a2a", "allgather", "a2a+p2p")


def _pp(f: Facts) -> tuple[str, ...]:
    return (*options("pp", nearest(divisors(f.split_layers), int(f.pp))), "--pipeline-model-parallel-layout")


def _vpp(f: Facts) -> tuple[str, ...]:
    return options("vpp", divisors(f.split_layers // int(f.pp)))


def _microbatches(f: Facts) -> tuple[str, ...]:
    group, per_step = int(f.group), int(f.micro_batch_size * f.dp)
    counts = [count for count in multiples_around(group, int(f.num_microbatches)) if count >= group]
    return options("global_batch_size", [count * per_step for count in counts])


def _first_layers_ok(f: Facts) -> bool:
    """Middle layers and stages both there or both not, and evenly divided (TC:2214-2250)."""
    if not f.uneven_ends:
        return True
    layers, stages = f.middle
    if layers < 0 or stages < 0 or bool(layers) != bool(stages):
        return False
    return not stages or layers % stages == 0


def _ends_divide_vpp(f: Facts) -> bool:
    if not f.uneven_ends or f.vpp == 1:
        return True
    layers, stages = f.middle
    counts = [count for count in (f.first_stage_layers, f.last_stage_layers) if count is not None]
    if stages > 0:
        counts.append(layers // stages)
    return all(count % f.vpp == 0 for count in counts)


PIPELINE: tuple[Rule, ...] = (
    Rule(
        "megatron.P1",
        lambda f: implies(f.even_split, divides(f.pp, f.split_layers)),
        "{f.split_layers} layers (embedding and loss counted where asked) are not divisible by PP {f.pp}",
        "A:997, TC:2263, core/transformer/transformer_block.py:138",
        "validate",
        _pp,
        after=("megatron.A1",),
    ),
    Rule(
        "megatron.P2",
        lambda f: len(f.vpp_flags) <= 1,
        "at most one of these flags may be given: {f.vpp_flags}",
        "A:928",
        "validate",
    ),
    Rule(
        "megatron.P4",
        lambda f: f.layers_per_virtual_stage is None or not f.uneven_ends,
        "layers a virtual stage cannot be given with counts for the first or last stage",
        "A:955",
        "validate",
        lambda f: ("--num-virtual-stages-per-pipeline-rank",),
    ),
    Rule(
        "megatron.P3n",
        lambda f: (
            f.layers_per_virtual_stage is None
            or (
                f.layers_per_virtual_stage > 0
                and not f.uneven_ends
                and (f.split_layers // int(f.pp)) % f.layers_per_virtual_stage == 0
            )
        ),
        "{f.layers_per_virtual_stage} layers a virtual stage do not divide the layers of a stage "
        "({f.split_layers} / PP {f.pp})",
        "A:968-988",
        "validate",
        lambda f: options("num_layers_per_virtual_pipeline_stage", divisors(f.split_layers // int(f.pp))),
        after=("megatron.P1", "megatron.P2", "megatron.P4"),
    ),
    Rule(
        "megatron.P3",
        lambda f: implies(f.even_split, divides(f.pp * f.vpp, f.split_layers)),
        "{f.split_layers} layers are not divisible by PP {f.pp} x virtual stages {f.vpp}",
        "A:971, TC:2286, core/transformer/transformer_block.py:165",
        "validate",
        _vpp,
        after=("megatron.P1", "megatron.P2", "megatron.P3n"),
    ),
    Rule(
        "megatron.P5z",
        lambda f: all(count is None or count > 0 for count in (f.first_stage_layers, f.last_stage_layers)),
        "layer counts of the first ({f.first_stage_layers}) and last stage ({f.last_stage_layers}) must be positive",
        "TC:2181, TC:2199",
        "config",
    ),
    Rule(
        "megatron.P5",
        _first_layers_ok,
        "{f.num_layers} layers with {f.first_stage_layers} in the first and {f.last_stage_layers} in the last stage "
        "leave {f.middle} middle (layers, stages), which do not divide",
        "TC:2214-2250",
        "config",
        after=("megatron.P5z", "megatron.P6"),
    ),
    Rule(
        "megatron.P5v",
        _ends_divide_vpp,
        "layers of the first ({f.first_stage_layers}), last ({f.last_stage_layers}) and each middle stage must be "
        "divisible by virtual stages {f.vpp}",
        "TC:2184, TC:2202, TC:2238",
        "config",
        after=("megatron.P5",),
    ),
    Rule(
        "megatron.P6",
        lambda f: sum((f.uneven_ends, f.account_for_embedding or f.account_for_loss, f.split == "layout")) <= 1,
        "use only one of: first/last stage layer counts, accounting for embedding or loss, a pipeline layout",
        "TC:2100, TC:2113",
        "config",
    ),
    Rule(
        "megatron.P8",
        lambda f: implies(f.vpp > 1, np.where(f.overlap_p2p, f.pp > 1, f.pp > 2)),
        "{f.vpp} virtual stages need PP > 1, and PP > 2 without p2p overlap; PP is {f.pp}",
        "A:1002-1010",
        "validate",
        lambda f: ("vpp=1",),
    ),
    Rule(
        "megatron.P9",
        lambda f: implies(f.vpp > 1, both(f.group >= f.pp, f.group <= f.num_microbatches)),
        "the interleaved schedule needs PP {f.pp} <= micro-batch group {f.group} <= micro-batches {f.num_microbatches}",
        "SC:1131",
        "step",
        _microbatches,
        after=("megatron.W1", "megatron.B1", "megatron.P8"),
    ),
    Rule(
        "megatron.P9r",
        lambda f: implies(
            f.vpp > 1,
            either(f.num_microbatches % f.group == 0, f.num_microbatches % f.group >= f.pp),
        ),
        "{f.num_microbatches} micro-batches leave a remainder over groups of {f.group} that is below PP {f.pp}",
        "SC:1144",
        "step",
        _microbatches,
        after=("megatron.W1", "megatron.B1", "megatron.P8", "megatron.P9"),
    ),
    Rule(
        "megatron.P10",
        lambda f: f.schedule in f.schedules,
        "there is no schedule {f.schedule}, only {f.schedules}",
        "SC:get_forward_backward_func",
        "step",
        lambda f: tuple(f"schedule={name}" for name in f.schedules),
    ),
    Rule(
        "megatron.P11",
        lambda f: not f.layout_fault,
        "{f.layout_fault}",
        "PL:283-321",
        "validate",
        after=("megatron.P10",),
    ),
    Rule(
        "megatron.P12",
        lambda f: f.layout is None or len(f.layout.chunks) % int(f.pp) == 0,
        "the layout's number of stage chunks is not a multiple of PP {f.pp}",
        "A:945, PL:41",
        "validate",
    ),
    Rule(
        "megatron.P13",
        lambda f: f.layout is None or not f.layout_faults,
        "{f.layout_faults}",
        "PL:86-135",
        "config",
        after=("megatron.P12", "megatron.P6", "megatron.P2"),
    ),
    Rule(
        "megatron.P18",
        lambda f: (
            f.hybrid_segments is None
            or (
                not f.vpp_flags
                and not f.account_for_embedding
                and not f.account_for_loss
                and not (f.hybrid_has_bars and f.uneven_ends)
                and (f.hybrid_segments == 1 or f.hybrid_segments % int(f.pp) == 0)
            )
        ),
        "--hybrid-layer-pattern with {f.hybrid_segments} segments: they must be a multiple of PP {f.pp}, and virtual "
        "stages, layout, accounting and (with |) first/last counts must not be given",
        "A:802-860",
        "validate",
    ),
    Rule(
        "megatron.P19",
        lambda f: implies(f.defer_embedding_wgrad, both(f.pp > 1, f.grad_accumulation_fusion)),
        "--defer-embedding-wgrad-compute needs PP > 1 and gradient-accumulation fusion",
        "MP:545-556",
        "config",
    ),
    Rule(
        "megatron.P20",
        lambda f: f.p2p_backend != "ucc" or f.max_connections != "1",
        "p2p backend ucc needs CUDA_DEVICE_MAX_CONNECTIONS unset or above 1",
        "PS:1201",
        "groups",
    ),
    Rule(
        "megatron.P21",
        lambda f: implies(f.hyper_connections, f.pp == 1),
        "hyper-connections need PP 1, it is {f.pp}",
        "TC:2092",
        "config",
    ),
    Rule(
        "megatron.P22",
        lambda f: implies(f.mtp_num_layers > 0, f.position_embedding in ("rope", "none")),
        "multi-token prediction does not work with position embeddings {f.position_embedding}",
        "A:868",
        "validate",
    ),
    Rule(
        "megatron.C1",
        lambda f: implies(f.cp > 1, divides(2 * f.cp, f.seq_length)),
        "sequence length {f.seq_length} is not divisible by 2 x CP {f.cp}",
        "A:1336",
        "validate",
        lambda f: options("seq_length", multiples_around(2 * int(f.cp), f.seq_length)),
        after=("megatron.A1",),
    ),
    Rule(
        "megatron.C2",
        lambda f: not f.max_position_embeddings or f.max_position_embeddings >= f.seq_length,
        "maximum position embeddings {f.max_position_embeddings} are below sequence length {f.seq_length}",
        "A:1354",
        "validate",
        lambda f: options("max_position_embeddings", [f.seq_length]),
        after=("megatron.A1",),
    ),
    Rule(
        "megatron.C3",
        lambda f: implies(f.cp > 1, f.transformer_impl != "local"),
        "CP {f.cp} needs TransformerEngine's attention; --transformer-impl is local",
        "core/transformer/dot_product_attention.py:57",
        "build",
        lambda f: ("--transformer-impl transformer_engine", "cp=1"),
    ),
    Rule(
        "megatron.C4",
        lambda f: (
            all(kind in _CP_COMM for kind in f.cp_comm_type)
            and (len(f.cp_comm_type) == 1 or bool(np.all(implies(f.cp > 1, len(f.cp_comm_type) == f.num_layers))))
        ),
        "--cp-comm-type {f.cp_comm_type} must be one known type, or one for each of the {f.num_layers} layers",
        "TC:2780",
        "config",
        lambda f: _CP_COMM,
    ),
    Rule(
        "megatron.C5",
        lambda f: (
            (not f.hierarchical_cp_sizes and "a2a+p2p" not in f.cp_comm_type)
            or (bool(f.hierarchical_cp_sizes) and bool(np.all(f.cp == int(np.prod(f.hierarchical_cp_sizes)))))
        ),
        "--hierarchical-context-parallel-sizes {f.hierarchical_cp_sizes} must be given with a2a+p2p and multiply to CP "
        "{f.cp}",
        "A:580-585, PS:1128",
        "validate",
    ),
    Rule(
        "megatron.C6",
        lambda f: implies(
            both(f.cp > 1, f.a2a_size > 1),
            both(
                every((heads // f.tp) % f.a2a_size == 0 for heads in f.heads),
                every(np.maximum(kv // f.tp, 1) % f.a2a_size == 0 for kv in f.kv_heads),
            ),
        ),
        "context parallelism over all-to-all of {f.a2a_size} ranks needs heads {f.heads} / TP {f.tp} and key/value "
        "heads {f.kv_heads} / TP divisible by it",
        "TransformerEngine AttnFuncWithCPAndQKVOA2A",
        "step",
    ),
    Rule(
        "megatron.C7",
        lambda f: implies(
            f.hybrid_cp,
            both(
                f.pp == 1,
                no(f.megatron_fsdp),
                f.cuda_graph == "none",
                f.dataloader_type == "single",
                f.per_token_loss,
                not f.mla,
                divides(2, f.dp * f.cp),
            ),
        ),
        "--hybrid-context-parallel needs PP 1, no Megatron-FSDP, no CUDA graph, the single dataloader, "
        "--calculate-per-token-loss, an even DP x CP, and no MLA",
        "A:1444, PS:1043, core/transformer/multi_latent_attention.py:685",
        "validate",
    ),
    Rule(
        "megatron.C8c",
        lambda f: either(not f.gated_delta_net, f.cp == 1),
        "Gated DeltaNet works without context parallelism only, CP is {f.cp}",
        "TC:1330 (0.17.1)",
        "config",
        lambda f: ("cp=1",),
        until=(0, 18),
    ),
    Rule(
        "megatron.C8",
        lambda f: both(
            divides(f.tp * f.cp, *f.linear_heads), *(value % key == 0 for key, value in f.linear_head_pairs)
        ),
        "linear-attention heads {f.linear_heads} must be divisible by TP {f.tp} x CP {f.cp}, and value heads by key "
        "heads",
        "TC:1368-1385",
        "config",
        lambda f: options("tp*cp", divisors(*f.linear_heads)) if f.linear_heads else (),
    ),
    Rule(
        "megatron.C8s",
        lambda f: implies(both(f.sparse_attention, f.cp > 1), f.cp_comm_type == ("allgather",)),
        "sparse attention with CP {f.cp} needs --cp-comm-type allgather",
        "TC:2850",
        "config",
        lambda f: ("--cp-comm-type allgather", "cp=1"),
        since=(0, 19),
    ),
    Rule(
        "megatron.C8n",
        lambda f: either(not f.sparse_attention, f.cp == 1),
        "sparse attention works without context parallelism only, CP is {f.cp}",
        "TC:2547 (0.18.2)",
        "config",
        lambda f: ("cp=1",),
        until=(0, 19),
    ),
    Rule(
        "megatron.C9",
        lambda f: both(
            either(f.cp == 1, divides(f.tp * f.cp, *f.mamba_heads)),
            *(
                either((groups // f.tp) % f.cp == 0, f.cp % np.maximum(groups // f.tp, 1) == 0)
                for groups in f.mamba_groups
            ),
        ),
        "Mamba heads {f.mamba_heads} must be divisible by TP {f.tp} x CP {f.cp}, and groups {f.mamba_groups} / TP must "
        "divide CP or be divisible by it",
        "core/ssm/mamba_context_parallel.py:106-129",
        "build",
        after=("megatron.T3s",),
    ),
)
