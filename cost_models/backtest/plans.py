"""A run as what the cost model prices: workload, target and plan, with every assumption named."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.errors import SpecError
from meshwright.specs.feed_forward import MoEFFN
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import Chunk, Degrees, Group, Plan, Stage, collapse_blocks, format_range
from meshwright.specs.target import Target
from meshwright.specs.workload import Workload

from .architectures import model_of
from .hardware import cluster_of
from .layouts import chunks_of
from .rows import Run, UnsupportedError
from .settings import precision_of, recompute_of, sharding_of, workload_of
from .stacks import Stack, release_of, stack_of
from .switches import options_of, target_of


@dataclass(frozen=True)
class Case:
    """A run ready to be priced. ``scale`` turns the step of the priced batch into that of the stated one."""

    run: Run
    stack: Stack
    release: str
    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    target: Target
    plan: Plan
    scale: float
    assumptions: tuple[str, ...]


def case_of(run: Run, models: dict[str, dict[str, object]]) -> Case:
    """The case of a run; :class:`UnsupportedError` says why there is none."""
    notes: list[str] = []
    if run.model not in models:
        raise UnsupportedError(f"model {run.model!r} is not in the models file")
    overrides = dict(run.overrides)
    if overrides.get("num_layers") is not None and str(overrides["num_layers"]) == run.flags.get("mtp_num_layers"):
        notes.append("num_layers of the overrides is the number of MTP layers, misread")
        del overrides["num_layers"]
    model = model_of(run.model, {**models[run.model], **overrides}, notes)
    stack = stack_of(run.framework)
    cluster = cluster_of(run)
    try:
        return _case(run, stack, model, cluster, notes)
    except (SpecError, ValidationError) as error:
        raise UnsupportedError(f"plan cannot be expressed: {str(error)[:200]}") from error


def _case(run: Run, stack: Stack, model: ModelSpec, cluster: ClusterSpec, notes: list[str]) -> Case:
    precision = precision_of(run, stack, cluster, notes)
    tp, cp, pp = (_given(run, name, notes) for name in ("tp", "cp", "pp"))
    world = run.num_gpus
    if world % (tp * pp * cp):
        if world % (tp * pp) == 0 and run.dp == world // (tp * pp):
            cp = 1
        else:
            raise UnsupportedError(f"tp {tp} x cp {cp} x pp {pp} does not divide {world} GPUs")
    dp, ranks = world // (tp * pp * cp), world // pp
    ep, etp = expert_degrees(run, model, ranks, tp, notes)
    mbs, m, scale = micro_batches(run, dp, pp, notes)
    vpp = virtual_stages(run, model, pp, m, notes)
    recompute = recompute_of(run, stack, model, pp * vpp, notes)
    sharding = sharding_of(run, stack, dp * cp, pp, notes)
    mtp = bool(model.mtp) and run.flags.get("mtp") != "0"
    workload = workload_of(run, stack, model, precision, sharding, mbs * dp * m, mtp)
    options = options_of(run, stack, tp, notes)
    target = target_of(run, stack, options)
    degrees = Degrees(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp, edp=ranks // (etp * ep))
    blocks = chunks_of(run, model, pp, vpp, model.mtp.num_layers if mtp and model.mtp else 0, notes)
    pool = cluster.pools[0]
    stages = tuple(
        Stage(
            chunks=tuple(Chunk(order=v * pp + p, blocks=collapse_blocks(blocks[v * pp + p])) for v in range(vpp)),
            degrees=degrees,
            micro_batch_size=mbs,
            recompute=recompute,
            sharding=sharding,
            groups=(
                Group(
                    pool=pool.name,
                    gpu=pool.gpu,
                    ranks=(format_range(p * ranks, (p + 1) * ranks - 1),),
                    micro_batches=m,
                ),
            ),
        )
        for p in range(pp)
    )
    plan = Plan(
        tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, dp=dp, edp=degrees.edp, vpp=vpp, micro_batch_size=mbs,
        num_microbatches=m, schedule="interleaved" if vpp > 1 else "1f1b", sharding=sharding, recompute=recompute,
        stages=stages, options=options,
    )  # fmt: skip
    return Case(
        run, stack, release_of(run.framework, run.release), model, cluster, workload, target, plan, scale, tuple(notes)
    )


def _given(run: Run, name: str, notes: list[str]) -> int:
    value = getattr(run, name)
    if value is None:
        if name in ("tp", "pp"):
            notes.append(f"{name} = 1: not stated")
        return 1
    return int(value)


def expert_degrees(run: Run, model: ModelSpec, ranks: int, tp: int, notes: list[str]) -> tuple[int, int]:
    """(ep, etp). ETP follows TP unless stated or unless the expert grid then exceeds the stage (Megatron)."""
    if not model.is_moe:
        return 1, tp
    ep = run.ep or 1
    if run.ep is None:
        notes.append("ep = 1: not stated")
    experts = max(kind.feed_forward.num_experts for kind in model.kinds if isinstance(kind.feed_forward, MoEFFN))
    if ep > experts:
        notes.append(f"ep = {experts}: the stated {ep} shards each expert over {ep // experts} ranks")
        ep = experts
    etp = run.etp
    if etp is None:
        etp = tp if ep == 1 else 1
        if tp > 1:
            notes.append(f"etp = {etp}: not stated")
    if ranks % (etp * ep) and ranks % ep == 0:
        notes.append(f"etp = 1: the stated expert grid {ep} x {etp} does not divide the {ranks} ranks of a stage")
        etp = 1
    if ranks % (etp * ep):
        raise UnsupportedError(f"expert grid {ep} x {etp} does not divide the {ranks} ranks of a stage")
    return ep, etp


def micro_batches(run: Run, dp: int, pp: int, notes: list[str]) -> tuple[int, int, float]:
    """(micro-batch size, their number, stated over priced batch)."""
    batch = run.global_batch_size
    mbs = run.micro_batch_size
    if mbs is None:
        each = next((int(run.flags[n]) for n in ("grad_accum", "microbatches") if run.flags.get(n, "").isdigit()), None)
        if run.flags.get("local_batch", "").isdigit() and pp > 1:
            # torchtitan of 2024 cuts the local batch into as many micro-batches as there are stages.
            mbs = max(int(run.flags["local_batch"]) // pp, 1)
            notes.append(f"micro-batch size {mbs}: local batch over stages")
        elif each and batch % (each * dp) == 0:
            mbs = batch // (each * dp)
        else:
            mbs = max(batch // dp, 1) if pp == 1 and batch // dp <= 8 else 1
            notes.append(f"micro-batch size {mbs}: not stated")
    m = max(round(batch / (mbs * dp)), 1)
    scale = batch / (m * mbs * dp)
    if abs(scale - 1) > 1e-9:
        notes.append(f"{m} micro-batches of {mbs} on {dp} replicas make {m * mbs * dp} of {batch} samples")
    return mbs, m, scale


def virtual_stages(run: Run, model: ModelSpec, pp: int, m: int, notes: list[str]) -> int:
    """Chunks a stage; 1 where interleaving cannot run."""
    vpp = run.vpp or 1
    schedule = run.flags.get("schedule", "").lower()
    if run.vpp is None and "interleaved" in schedule and pp > 1:
        vpp = 2
        notes.append("2 virtual stages: interleaved, number not stated")
    if vpp > 1 and (pp == 1 or m < pp or m % pp):
        notes.append(f"priced without its {vpp} virtual stages: {m} micro-batches do not go in groups of {pp}")
        return 1
    if vpp * pp > model.num_layers + 2:
        raise UnsupportedError(f"{vpp * pp} chunks for {model.num_layers} layers")
    return vpp
