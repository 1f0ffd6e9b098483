"""Facts, verdicts and plans of torchtitan's own configurations."""

from __future__ import annotations

from typing import Any

from meshwright.planner.rules import Facts, Layout, Violation, violations
from meshwright.planner.rules.torchtitan_models import PYTHON_CONFIG, pipelines
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import (
    Chunk,
    Degrees,
    Hsdp,
    HsdpSharding,
    Options,
    Plan,
    Sharding,
    Stage,
    collapse_blocks,
)
from meshwright.specs.target import RecomputeMode
from meshwright.specs.workload import Workload

from ..megatron.read_plan import devices_of, groups_of
from .read import Configuration, read_python, read_toml, split_of
from .shapes import Shape, model_of, shape_of

_DEGREES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
}


def check_toml(text: str, world_size: int, model: ModelSpec | None = None) -> list[Violation]:
    """Every rule that a TOML configuration breaks on ``world_size`` ranks. ``model`` gives the sizes of a flavor that
    is no preset; without them the rules on sizes are not judged."""
    return _checked(lambda: read_toml(text), world_size, model)


def check_python(text: str, world_size: int, model: ModelSpec | None = None) -> list[Violation]:
    """The same for a Python configuration of torchtitan 0.3, read by its literals."""
    return _checked(lambda: read_python(text), world_size, model)


def _checked(read: Any, world_size: int, model: ModelSpec | None) -> list[Violation]:
    try:
        config = read()
    except SpecError as error:
        return [Violation("torchtitan.A1", fault.message) for fault in error.faults]
    return violations(facts_of_configuration(config, world_size, model))


def model_of_configuration(config: Configuration) -> ModelSpec:
    """The preset that a configuration names. Raises :class:`SpecError` for a flavor of the user's own."""
    shape = config.shape
    name, flavor = config.get("model", "name"), config.get("model", "flavor")
    if shape is None:
        raise SpecError(
            Fault("/model", f"{name} {flavor} is no preset of torchtitan that is known here; give the model")
        )
    return model_of(shape, f"{name}-{flavor}")


def facts_of_configuration(config: Configuration, world_size: int, model: ModelSpec | None = None) -> Facts:
    """Facts of a configuration on ``world_size`` ranks."""
    parallel, training = config.sections["parallelism"], config.sections["training"]
    degrees = {name: parallel[key] for name, key in _DEGREES.items()}
    if degrees["dp_shard"] == -1:  # the rest, as ParallelDims takes it
        others = degrees["dp_replicate"] * degrees["cp"] * degrees["tp"] * degrees["pp"]
        degrees["dp_shard"] = world_size // others if others else 0
    safe = {name: max(value, 1) for name, value in degrees.items()}
    shape = config.shape if model is None else shape_of(model, config.version)
    given_etp = max(parallel["expert_tensor_parallel_degree"], 1)
    etp = (given_etp if config.version < PYTHON_CONFIG else 1) if safe["ep"] > 1 else safe["tp"]
    ranks = safe["dp_shard"] * safe["cp"] * safe["tp"]
    dp = safe["dp_replicate"] * safe["dp_shard"]
    size, once, count, batch = _batch(config, dp, safe["pp"])
    layers = shape.n_layers if shape else 0
    modules, per_rank, fault = split_of(config, layers, safe["pp"]) if shape else ([], 1, "")
    local = max(training["local_batch_size"], 1)
    if safe["pp"] > 1 and local % parallel["pipeline_parallel_microbatch_size"]:
        piece = parallel["pipeline_parallel_microbatch_size"]
        fault = f"local_batch_size {local} is not divisible by pipeline_parallel_microbatch_size {piece}"
    interleaved = per_rank > 1 and parallel["pipeline_parallel_schedule"].lower() == "interleaved1f1b"
    schedule = parallel["pipeline_parallel_schedule"].lower()
    return Facts(
        rule_set="torchtitan",
        version=config.version,
        kv_head_replication=False,
        world_size=world_size,
        **safe,
        not_positive=tuple(_DEGREES[name] for name, value in degrees.items() if value < 1),
        etp=etp,
        dp=dp,
        edp=max(ranks * safe["dp_replicate"] // (safe["ep"] * etp), 1),
        expert_tensor_degree=given_etp if config.version < PYTHON_CONFIG else 1,
        vpp=per_rank,
        schedule="interleaved" if interleaved else "1f1b" if schedule == "1f1b" else "other",
        layout=_layout(modules),
        stage_fault=fault or _misplaced(modules, layers),
        micro_batch_size=size,
        num_microbatches=count,
        global_batch_size=batch,
        microbatches_of_pass=once,
        microbatch_group_size=once // max(once // safe["pp"], 1),
        seq_length=training["seq_len"],
        precision="fp32" if training["mixed_precision_param"] == "float32" else "bf16",
        model_family=config.get("model", "name"),
        pipelines=pipelines(config.get("model", "name"), config.version),
        compiled=config.get("compile", "enable") and "model" in config.get("compile", "components"),
        tp_comm_overlap=safe["tp"] > 1
        and bool(
            parallel["enable_async_tensor_parallel"]
            if config.version < PYTHON_CONFIG
            else config.get("compile", "enable_async_tensor_parallel")
        ),
        attention_backend=config.attention,
        dispatcher="flex" if parallel["expert_parallel_comm_backend"] == "deepep" else "alltoall",
        cp_comm_type=("allgather",),
        config_faults=config.faults,
        **(_sizes(shape) if shape else {}),
    )


def _batch(config: Configuration, dp: int, pp: int) -> tuple[int, int, int, int]:
    """(micro-batch size, micro-batches of a pass, of a step, global batch), judged by rule B1."""
    training, parallel = config.sections["training"], config.sections["parallelism"]
    local, batch = max(training["local_batch_size"], 1), training["global_batch_size"]
    if batch < 0:
        batch = local * dp
    size = parallel["pipeline_parallel_microbatch_size"] if pp > 1 else local
    if local % size:
        return size, 1, 1, size * dp  # a fault of the stages says so
    steps = batch // (local * dp)
    once = local // size
    return size, once, once * steps, batch


def _layout(modules: list[list[str]]) -> Layout | None:
    letters = {"tok_embeddings": "E", "norm": "", "output": "L", "lm_head": "L"}
    return Layout(tuple("".join(letters.get(name, "t") for name in part) for part in modules)) if modules else None


def _misplaced(modules: list[list[str]], layers: int) -> str:
    """What is wrong with the names of modules: torchtitan drops what no stage names, without a word."""
    order = [name for part in modules for name in part if name.startswith("layers.")]
    if modules and order != [f"layers.{index}" for index in range(layers)]:
        return "the stages do not name layers.0 to the last once each, in order"
    return ""


def _sizes(shape: Shape) -> dict[str, Any]:
    return {
        "num_layers": shape.n_layers,
        "hidden_size": shape.dim,
        "heads": (shape.n_heads,),
        "kv_heads": (shape.n_kv_heads,) if shape.n_kv_heads else (),
        "experts": (shape.num_experts,) if shape.num_experts else (),
        "topk": shape.top_k,
        "mla": bool(shape.kv_lora_rank),
        "tied_embeddings": shape.tied,
    }


def plan_from_toml(text: str, cluster: ClusterSpec, model: ModelSpec | None = None) -> tuple[Plan, ModelSpec, Workload]:
    """The plan, model and workload that a TOML configuration spells on all GPUs of the cluster, pools in its order.

    Raises :class:`SpecError` where it describes none (check the rules first for the reasons).
    """
    return _plan(read_toml(text), cluster, model)


def plan_from_python(
    text: str, cluster: ClusterSpec, model: ModelSpec | None = None
) -> tuple[Plan, ModelSpec, Workload]:
    """The same of a Python configuration of torchtitan 0.3. Raises :class:`SpecError` also where a value that the plan
    needs is no literal."""
    config = read_python(text)
    if config.unread:
        raise SpecError(Fault("", f"cannot read {', '.join(config.unread)}: give literal values"))
    return _plan(config, cluster, model)


def _plan(config: Configuration, cluster: ClusterSpec, model: ModelSpec | None) -> tuple[Plan, ModelSpec, Workload]:
    spec = model_of_configuration(config) if model is None else model
    world = cluster.num_gpus
    facts = facts_of_configuration(config, world, spec)
    broken = violations(facts)
    if broken:
        raise SpecError(Fault("", f"{item.rule}: {item.message}", item.alternatives) for item in broken)
    if facts.schedule == "other" and facts.pp > 1:
        schedule = config.get("parallelism", "pipeline_parallel_schedule")
        raise SpecError(Fault("/parallelism/pipeline_parallel_schedule", f"{schedule} is not priced; 1F1B is"))
    if facts.pp > 1 and facts.microbatches_of_pass != facts.num_microbatches:
        message = (
            "gradients added up over several runs of the schedule are not priced; local_batch_size can hold them all"
        )
        raise SpecError(Fault("/training/global_batch_size", message))
    layout = facts.layout
    if layout is None:
        raise SpecError(Fault("/model", "the sizes of the model are not known"))
    sharding = _sharding(config, facts)
    recompute = _recompute(config, spec)
    degrees = Degrees(tp=facts.tp, cp=facts.cp, dp=facts.dp, ep=facts.ep, etp=facts.etp, edp=facts.edp)
    blocks, per_stage = layout.blocks(), world // facts.pp
    stages = tuple(
        Stage(
            chunks=tuple(
                Chunk(order=at, blocks=collapse_blocks(blocks[at]))
                for at in range(stage, facts.pp * facts.vpp, facts.pp)
            ),
            degrees=degrees,
            micro_batch_size=facts.micro_batch_size,
            recompute=recompute,
            sharding=sharding,
            groups=groups_of(cluster, range(stage * per_stage, (stage + 1) * per_stage), facts.num_microbatches),
        )
        for stage in range(facts.pp)
    )
    reshard = config.get("parallelism", "fsdp_reshard_after_forward")
    plan = Plan(
        **degrees.model_dump(),
        pp=facts.pp,
        vpp=facts.vpp,
        micro_batch_size=facts.micro_batch_size,
        num_microbatches=facts.num_microbatches,
        schedule="interleaved" if facts.vpp > 1 else "1f1b",
        sharding=sharding,
        recompute=recompute,
        stages=stages,
        devices=devices_of(cluster, world),
        options=Options(
            sequence_parallel=facts.tp > 1,
            overlap_grad_reduce=True,
            overlap_param_gather=sharding != "none",
            tp_comm_overlap=facts.tp_comm_overlap,
            overlap_p2p=facts.vpp > 1,
            dispatcher=facts.dispatcher if facts.experts else None,  # type: ignore[arg-type]
            cp_comm_type="allgather" if facts.cp > 1 else None,
            grouped_gemm=bool(facts.experts),
            dist_opt_instances=facts.dp_replicate if sharding == "zero1" else 1,
            reshard_after_forward=False if reshard == "never" and facts.pp == 1 else None,
            vp_group_size=int(facts.group) if facts.vpp > 1 else None,
        ),
    )
    workload = Workload.parse(
        {
            "global_batch_size": facts.global_batch_size,
            "seq_length": facts.seq_length,
            "precision": facts.precision,
        }
    )
    return plan, spec, workload


def _sharding(config: Configuration, facts: Facts) -> Sharding:
    """``zero1`` where stages keep parameters gathered through the step, else what the degrees say."""
    if facts.dp_shard == 1 and facts.cp == 1 and facts.dp_replicate > 1:
        return "none"
    if facts.pp > 1 and config.get("parallelism", "fsdp_reshard_after_forward") != "always":
        return "zero1"
    if facts.dp_replicate > 1:
        return Hsdp(hsdp=HsdpSharding(replicate=facts.dp_replicate, shard=facts.dp_shard * facts.cp))
    return "fsdp"


def _recompute(config: Configuration, model: ModelSpec) -> RecomputeMode:
    mode = config.get("activation_checkpoint", "mode")
    every = config.get("activation_checkpoint", "selective_ac_option")
    if mode == "full" or (mode == "selective" and every == "1"):
        return RecomputeMode(granularity="full", method="uniform", num_layers=1)
    if mode == "selective" and every == "op":
        return RecomputeMode(granularity="selective", modules=("layernorm", "alternate_ops"))
    if mode == "selective" and every.isdigit() and int(every):  # every so manieth layer of a model part
        chunks = config.get("parallelism", "pipeline_parallel_degree")
        layers = max(round(model.num_layers / int(every) / max(chunks, 1)), 1)
        return RecomputeMode(granularity="full", method="block", num_layers=layers)
    if mode == "memory_budget":
        raise SpecError(
            Fault("/activation_checkpoint/mode", "memory_budget is not priced; none, selective and full are")
        )
    return RecomputeMode()
