"""Rules of Megatron-Bridge: those of the Megatron core that it runs on, and those of its own configuration.

Bridge builds the configuration classes of megatron-core itself, so that all checks of Megatron-LM's argument parser
fall away and those of the core stay. CC = bridge/training/config.py, CO = bridge/training/comm_overlap.py,
GP = bridge/models/gpt_provider.py, CG = bridge/utils/cuda_graph.py of megatron-bridge 0.6.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .facts import Facts
from .logic import both, either, implies, no
from .rule import Rule

#: Release of megatron-core that Bridge 0.6 runs on: the first to have all that its modules import.
CORE = (0, 19)

#: Megatron rules that only its argument parser checks, on things that Bridge does not have or sets by itself.
PARSER_ONLY = frozenset(
    {
        "megatron.A1",  # bridge.A1
        "megatron.A2",  # removed flags
        "megatron.P2",  # one way to give virtual stages: there is one
        "megatron.P4",
        "megatron.P3n",
        "megatron.P18",  # hybrid patterns have providers of their own
        "megatron.T8",  # recipes choose CUDA_DEVICE_MAX_CONNECTIONS freely
        "megatron.T12",  # the core rounds the head size down
        "megatron.C2",  # positions are as many as the sequence is long
        "megatron.B3",
        "megatron.D1",  # CC:1945 switches both on
        "megatron.D1g",  # published recipes gather parameters beside compute and reduce gradients after it
        "megatron.D10g",  # adapters gather FP8 parameters without the distributed optimizer
        "megatron.D4",  # checkpoint formats count only where checkpoints are written: bridge.D1
        "megatron.D4k",
        "megatron.D4d",
        "megatron.D6",
        "megatron.D9",
        "megatron.D12",  # recipes run Transformer Engine's cross-entropy
        "megatron.D13",
        "megatron.D14",
        "megatron.D15",
        "megatron.R7i",  # bridge.G3
    }
)


def carried(megatron: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules of the core under Bridge; releases of Bridge are not those of the core."""
    return tuple(
        replace(rule, since=None, until=None) for rule in megatron if rule.applies(CORE) and rule.id not in PARSER_ONLY
    )


def _chunks(f: Facts) -> tuple[str, ...]:
    chunks = len(f.layout.chunks) if f.layout else 0
    return f"model.virtual_pipeline_model_parallel_size={chunks // int(f.pp)}", "a new layout"


BRIDGE: tuple[Rule, ...] = (
    Rule(
        "bridge.A1",
        lambda f: not f.missing,
        "the model is not known: {f.missing}",
        "GPTModelProvider's required fields",
        "config",
        lambda f: ("name a recipe", "give the model", "give its model.* sizes"),
    ),
    Rule(
        "bridge.A3",
        lambda f: f.mixed_precision_known,
        "{f.mixed_precision} is not a mixed-precision recipe of Bridge",
        "bridge/training/mixed_precision.py:463",
        "config",
        lambda f: ("bf16_mixed", "bf16_with_fp8_current_scaling_mixed", "bf16_with_mxfp8_mixed"),
    ),
    Rule(
        "bridge.V1",
        lambda f: (
            f.layout is None or f.stated_vpp is None or len(f.layout.chunks) == int(f.pp) * max(int(f.stated_vpp), 1)
        ),
        "the layout's stage chunks are not PP {f.pp} x virtual stages {f.stated_vpp} (0 = not set): it was "
        " written for another split, and the core would quietly take its virtual stages",
        "TC:1968-1981, CO:467 (p2p overlap is chosen before the layout is read)",
        "config",
        _chunks,
        after=("megatron.P12",),
    ),
    Rule(
        "bridge.S1",
        lambda f: not f.data_seq_length or f.data_seq_length == f.seq_length,
        "model.seq_length {f.seq_length} and dataset.seq_length {f.data_seq_length} differ",
        "CC:1505",
        "validate",
        lambda f: (f"dataset.seq_length={f.seq_length}",),
    ),
    Rule(
        "bridge.F1",
        lambda f: implies(both(f.finetuning, f.cp > 1), both(f.per_token_loss, not f.average_in_collective)),
        "fine-tuning with CP {f.cp} needs model.calculate_per_token_loss=true and ddp.average_in_collective=false",
        "CC:1452-1457",
        "validate",
        lambda f: ("model.calculate_per_token_loss=true ddp.average_in_collective=false", "cp=1"),
    ),
    Rule(
        "bridge.F2",
        lambda f: implies(f.packed_sequences, f.micro_batch_size == 1),
        "packed sequences need micro-batch 1, it is {f.micro_batch_size}",
        "CC:1473",
        "validate",
        lambda f: ("train.micro_batch_size=1",),
    ),
    Rule(
        "bridge.D1",
        lambda f: either(f.environment_follows, no(f.megatron_fsdp), not f.saves, f.ckpt_format == "fsdp_dtensor"),
        "Megatron-FSDP saves and loads only checkpoint.ckpt_format=fsdp_dtensor",
        "CC:1099",
        "validate",
        lambda f: ("checkpoint.ckpt_format=fsdp_dtensor", "checkpoint.save=null checkpoint.load=null"),
    ),
    Rule(
        "bridge.D1k",
        lambda f: either(not f.saves, f.ckpt_format != "fsdp_dtensor", f.megatron_fsdp),
        "checkpoint.ckpt_format=fsdp_dtensor works only with Megatron-FSDP",
        "CC:1392",
        "validate",
        lambda f: ("checkpoint.ckpt_format=torch_dist",),
    ),
    Rule(
        "bridge.D2",
        lambda f: implies(f.megatron_fsdp, f.rank_order.endswith("pp")),
        "Megatron-FSDP excludes dist.use_tp_pp_dp_mapping",
        "CC:1116",
        "validate",
        lambda f: ("dist.use_tp_pp_dp_mapping=false",),
    ),
    Rule(
        "bridge.Q1",
        lambda f: either(
            f.environment_follows,
            not (f.fp8_param_gather and f.fp8_recipe == "mxfp8"),
            f.reuse_grad_buffer,
            f.megatron_fsdp,
        ),
        "MXFP8 with gathered FP8 parameters needs mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=true",
        "CC:1356",
        "validate",
        lambda f: ("mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=true",),
    ),
    Rule(
        "bridge.G1",
        lambda f: f.environment_follows or f.cuda_graph != "local",
        "Bridge runs CUDA graphs of single modules ({f.cuda_graph_modules}) only by Transformer Engine",
        "CG:137",
        "validate",
        lambda f: ("model.cuda_graph_impl=transformer_engine", "model.cuda_graph_impl=none"),
    ),
    Rule(
        "bridge.G2",
        lambda f: f.environment_follows or f.cuda_graph == "none" or f.te_rng_tracker,
        "CUDA graphs need model.use_te_rng_tracker=true",
        "GP:185",
        "build",
        lambda f: ("model.use_te_rng_tracker=true",),
    ),
    Rule(
        "bridge.G3",
        lambda f: f.environment_follows or f.cuda_graph != "full_iteration" or not f.nan_check,
        "full-iteration CUDA graphs need rerun_state_machine.check_for_nan_in_loss=false",
        "CC:1371",
        "validate",
        lambda f: ("rerun_state_machine.check_for_nan_in_loss=false",),
    ),
)
