"""Rules on what the target and the GPUs can hold of a model."""

from __future__ import annotations

from .rule import Rule

#: What any framework needs of the hardware.
PRECISION: tuple[Rule, ...] = (
    Rule(
        "hardware.precision",
        lambda f: not f.gpus_without_precision,
        "{f.gpus_without_precision} cannot compute in {f.precision}",
        "GPU catalog, dense peaks by precision",
        "step",
        lambda f: f.precision_alternatives,
    ),
)

MODELS: tuple[Rule, ...] = (
    Rule(
        "megatron.M1",
        lambda f: not f.inexpressible,
        "Megatron's GPT model, as exported here, cannot hold: {f.inexpressible}",
        "core/models/gpt/gpt_model.py, core/transformer/transformer_config.py",
        "build",
    ),
    Rule(
        "megatron.M2",
        lambda f: not (f.mla and f.rope_fusion and f.rope_type not in (None, "yarn")),
        "RoPE fusion with multi-latent attention works only with --rope-type yarn",
        "TC:2959",
        "config",
        lambda f: ("--no-rope-fusion", "--rope-type yarn"),
    ),
    Rule(
        "megatron.M2r",
        lambda f: f.mla or f.rope_type in (None, "rope"),
        "--rope-type {f.rope_type} works only with multi-latent attention",
        "training/argument_utils.py:339",
        "config",
        lambda f: ("--position-embedding-type yarn",),
    ),
    Rule(
        "megatron.M2f",
        lambda f: not (f.rope_fusion and f.position_embedding == "rope") or f.mla or f.te_at_least(1, 4),
        "RoPE fusion needs TransformerEngine 1.4",
        "TC:2232",
        "config",
        lambda f: ("--no-rope-fusion",),
    ),
    Rule(
        "megatron.M3",
        lambda f: not (f.swiglu and (f.squared_relu or f.quick_geglu)),
        "--swiglu excludes --squared-relu and --quick-geglu",
        "training/argument_utils.py:320-326",
        "config",
    ),
    *PRECISION,
)
