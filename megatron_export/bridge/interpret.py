"""Facts and verdicts of Megatron-Bridge settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from meshwright.planner.rules import Facts, Violation, violations
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.model import ModelSpec
from meshwright.specs.model_io import list_presets, load_model

from ..megatron import facts_from_arguments
from ..megatron.flags import defaults
from .overrides import Overrides, read_overrides
from .precisions import fields_of
from .recipes import recipe_of
from .translate import CORE, arguments_of, key_of, settings_of

#: Version whose rules judge.
VERSION = (0, 6)
DEFAULT_TE_VERSION = "2.12.0"
_SIZES = {"num_layers": "model.num_layers", "hidden_size": "model.hidden_size"}
_SIZES |= {"num_attention_heads": "model.num_attention_heads"}
#: Rules that look at a setting which some recipes compute.
_COMPUTED = {
    "model.pipeline_model_parallel_layout": ("megatron.P1", "megatron.P3", "megatron.P13", "bridge.V1"),
    "model.seq_length": ("bridge.S1", "megatron.C1", "megatron.T6"),
}
_FINETUNE = ("model.peft", "peft")
_FLAG = re.compile(r"--([a-z][a-z0-9-]+)")


def check_overrides(
    source: str | Sequence[str] | Overrides,
    world_size: int | None = None,
    env: Mapping[str, str] | None = None,
    te_version: str | None = DEFAULT_TE_VERSION,
    sm: float | None = 9.0,
    model: ModelSpec | None = None,
) -> list[Violation]:
    """Every rule that the settings break on ``world_size`` ranks (default: what runner options or the recipe say).

    ``source`` is a command line, a file of overrides, Python assignments, or a list; ``model`` stands in where neither
    a recipe nor ``model.*`` sizes give the architecture. What cannot be read is rule ``bridge.A0``.
    """
    try:
        overrides = source if isinstance(source, Overrides) else read_overrides(source)
        facts = facts_from_overrides(overrides, world_size, env, te_version, sm, model)
    except SpecError as error:
        return [
            Violation("bridge.A0", f"{fault.pointer.lstrip('/')} {fault.message}".strip(), fault.alternatives)
            for fault in error.faults
        ]
    unjudged = _unjudged(overrides)
    found = [in_bridge_words(item) for item in violations(facts) if item.rule not in unjudged]
    if facts.missing:  # nothing is known of the layers, only of the grid
        return [item for item in found if item.rule.startswith(("bridge.", "megatron.W", "megatron.A"))]
    return found


def _unjudged(overrides: Overrides) -> set[str]:
    """Rules on settings that the recipe computes by code, where the overrides do not set them."""
    computed = recipe_of(overrides.recipe).get("unread", ()) if overrides.recipe else ()
    return {rule for key in computed if key not in overrides.given for rule in _COMPUTED.get(key, ())}


def facts_from_overrides(
    overrides: Overrides,
    world_size: int | None = None,
    env: Mapping[str, str] | None = None,
    te_version: str | None = DEFAULT_TE_VERSION,
    sm: float | None = 9.0,
    model: ModelSpec | None = None,
) -> Facts:
    """Facts of settings launched on ``world_size`` ranks; :class:`SpecError` for what cannot be read."""
    settings = settings_of(overrides)
    world = world_size_of(overrides, world_size)
    args = arguments_of(settings, known_model(overrides, model))
    named = settings.get("mixed_precision", "bf16_mixed")
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "", **args.environment, **(env or {})}
    try:
        facts = facts_from_arguments(args, world, environment, te_version, sm)
    except (TypeError, ValueError, AttributeError) as error:
        raise SpecError(Fault("", f"a setting has a value of the wrong kind: {error}")) from None
    return replace(
        facts,
        rule_set="bridge",
        version=VERSION,
        missing=tuple(key for dest, key in _SIZES.items() if not args[dest]),
        not_positive=tuple(key_of(flag[2:].replace("-", "_")) for flag in facts.not_positive if flag.startswith("--")),
        vpp=args["num_virtual_stages_per_pipeline_rank"] or facts.vpp,
        stated_vpp=args["num_virtual_stages_per_pipeline_rank"] or 0,
        dist_opt=bool(facts.dist_opt),
        eval_micro_batch_size=args["eval_micro_batch_size"] or facts.micro_batch_size,
        eval_global_batch_size=args["eval_global_batch_size"] or 0,
        data_seq_length=settings.get("dataset.seq_length") or 0 if settings.get("model.seq_length") else 0,
        mixed_precision=str(named),
        mixed_precision_known=named is None or fields_of(str(named)) is not None,
        finetuning=is_finetuning(overrides, settings),
        average_in_collective=bool(args["ddp_average_in_collective"]),
        packed_sequences=bool(settings.get("dataset.enable_offline_packing")),
        saves=bool(settings.get("checkpoint.save") or settings.get("checkpoint.load")),
        te_rng_tracker=bool(settings.get("model.use_te_rng_tracker") or settings.get("rng.te_rng_tracker")),
    )


def world_size_of(overrides: Overrides, world_size: int | None) -> int:
    """Ranks of a launch: as told, else what the runner's options say, else the recipe's own number."""
    found = world_size or overrides.num_gpus
    if not found and overrides.recipe:
        found = recipe_of(overrides.recipe)["num_gpus"]
    if not found:
        raise SpecError(Fault("/world_size", "is required: neither runner options nor a recipe say it"))
    return int(found)


def is_finetuning(overrides: Overrides, settings: Mapping[str, Any]) -> bool:
    """Whether the settings train on answers only: a fine-tuning recipe or adapters."""
    named = bool(overrides.recipe and re.search(r"_(sft|peft|lora|finetune)_", overrides.recipe))
    return named or any(key in _FINETUNE or key.startswith("peft.") for key in settings)


def known_model(overrides: Overrides, model: ModelSpec | None) -> ModelSpec | None:
    """The model given, else the preset that the recipe's Hugging Face id names."""
    if model is not None or overrides.recipe is None:
        return model
    name = preset_of(recipe_of(overrides.recipe).get("model"))
    return load_model(name) if name else None


@lru_cache
def _presets() -> dict[str, str]:
    return {_plain(name): name for name in list_presets()}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def preset_of(model_id: str | None) -> str | None:
    """Our preset of a Hugging Face id; None for a model that has none."""
    if not model_id:
        return None
    short = model_id.rpartition("/")[2]
    spellings = (
        short,
        short.replace("Meta-Llama-3-", "Llama-3.1-"),
        re.sub(r"-(Base|Instruct|hf)$", "", short),
        re.sub(r"^Meta-", "", short),
        re.sub(r"-v\d\.\d$", "", short),
        short.replace("Meta-Llama-3", "Llama-3"),
    )
    return next((_presets()[_plain(name)] for name in spellings if _plain(name) in _presets()), None)


def in_bridge_words(item: Violation) -> Violation:
    """A violation that names Bridge's keys where a rule of the core names Megatron's arguments."""
    return Violation(
        item.rule, _FLAG.sub(_key, item.message), tuple(_FLAG.sub(_key, text) for text in item.alternatives)
    )


def _key(match: re.Match[str]) -> str:
    dest = match[1].replace("-", "_")
    dest = {"fp8_format": "fp8", "hybrid_context_parallel": dest}.get(dest, dest)
    return key_of(dest) if dest in defaults(CORE) else match[0]
