"""What the schedule of a plan means for its stages."""

from __future__ import annotations

from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.plan import Plan, Stage

from . import schedules


def check_schedule(plan: Plan) -> None:
    """SpecError where the schedule does not run the plan: its degrees, the places of its chunks, recomputation."""
    schedule = schedules.get(plan.schedule)
    faults = []
    # Megatron also interleaves a remainder of micro-batches; whether it may is the target's rule.
    if schedule.name != "interleaved":
        reason = schedule.legal(plan.pp, plan.vpp, plan.num_microbatches)
        faults += [Fault("/num_microbatches", reason)] if reason else []
    place = schedule.placement(plan.pp, plan.vpp).orders()
    for p, stage in enumerate(plan.stages):
        faults += [
            Fault(f"/stages/{p}/chunks/{v}/order", f"{schedule.name} has place {place[p, v]} of the pipeline here")
            for v, chunk in enumerate(stage.chunks)
            if chunk.order != place[p, v]
        ]
        if schedule.splits_backward and stage.recompute.granularity != "none":
            message = f"{schedule.name} runs weight gradients apart, which does not go with recomputation; use none"
            faults.append(Fault(f"/stages/{p}/recompute", message))
    if faults:
        raise SpecError(faults)


def ends_meet(plan: Plan) -> bool:
    """Whether one rank holds both the first and the last place of the pipeline."""
    routes = schedules.get(plan.schedule).placement(plan.pp, plan.vpp).routes
    return routes[0][0][0] == routes[-1][-1][0]


def with_copies(plan: Plan) -> list[Stage]:
    """The stages with all chunks that their ranks hold: with two copies of the model also the mirrored stage's."""
    if schedules.get(plan.schedule).copies == 1:
        return list(plan.stages)
    return [
        stage.model_copy(update={"chunks": (*stage.chunks, *mirror.chunks)})
        for stage, mirror in zip(plan.stages, reversed(plan.stages), strict=True)
    ]
