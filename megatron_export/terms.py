"""What a plan must be for a format that can say less than we can, and the refusal where it is not."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.specs.document import PlanDocument
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.plan import Plan, Stage, expand_blocks, parse_range


def plan_in(document: PlanDocument) -> Plan:
    """The plan of a document; :class:`SpecError` where it holds none."""
    if document.plan is None:
        raise SpecError(Fault("/plan", f"is null: there is nothing to export (status {document.status})"))
    return document.plan


class Refusals:
    """Collects what a format cannot say."""

    def __init__(self, target: str):
        self.target = target
        self._faults: list[Fault] = []

    def unless(self, said: bool, pointer: str, message: str) -> None:
        """Refuse ``pointer`` unless the format can say it; the same message once."""
        text = f"{message}, which {self.target} plans cannot say"
        if not said and all(fault.message != text for fault in self._faults):
            self._faults.append(Fault(f"/plan{pointer}", text))

    def raise_if_any(self) -> None:
        """One :class:`SpecError` with all of them."""
        if self._faults:
            raise SpecError(self._faults)

    def data_tensor_pipeline_only(self, plan: Plan) -> None:
        """Refuse context and expert parallelism."""
        for index, stage in enumerate(plan.stages):
            degrees = stage.degrees
            self.unless(degrees.cp == 1, f"/stages/{index}/degrees/cp", f"is {degrees.cp}")
            self.unless(degrees.ep == 1, f"/stages/{index}/degrees/ep", f"is {degrees.ep}")

    def plain_pipeline(self, plan: Plan, schedules: Iterable[str] = ("1f1b",)) -> None:
        """Refuse virtual stages and schedules but these."""
        self.unless(plan.vpp == 1, "/vpp", f"is {plan.vpp}")
        if plan.vpp == 1 and plan.pp > 1:
            self.unless(plan.schedule in schedules, "/schedule", f"is {plan.schedule}")

    def no_recompute(self, plan: Plan) -> None:
        """Refuse recomputation."""
        for index, stage in enumerate(plan.stages):
            none = stage.recompute.granularity == "none"
            self.unless(none, f"/stages/{index}/recompute", f"is {stage.recompute.label}")

    def no_sharding(self, plan: Plan) -> None:
        """Refuse sharded states: with one replica nothing is sharded."""
        for index, stage in enumerate(plan.stages):
            plain = stage.sharding == "none" or stage.degrees.dp == 1
            text = stage.sharding if isinstance(stage.sharding, str) else "hsdp"
            self.unless(plain, f"/stages/{index}/sharding", f"is {text} (--fix sharding=none plans without)")

    def decoder_only(self, plan: Plan) -> None:
        """Refuse blocks other than embedding, decoder layers and head."""
        for index, stage in enumerate(plan.stages):
            for kind, _ in blocks_of(stage):
                self.unless(kind in ("embed", "decoder", "head"), f"/stages/{index}/chunks", f"hold {kind}")


def blocks_of(stage: Stage) -> list[tuple[str, int]]:
    """(kind, index) of every block of a stage with one chunk."""
    return [block for chunk in stage.chunks for block in expand_blocks(chunk.blocks)]


def decoder_layers(stage: Stage) -> int:
    """How many decoder layers a stage holds."""
    return sum(kind == "decoder" for kind, _ in blocks_of(stage))


def layers_with_ends(stage: Stage, num_layers: int) -> list[int]:
    """The layers of a stage in a list that counts the embedding as 0 and the head as the last."""
    first = {"embed": 0, "decoder": 1, "head": num_layers + 1}
    return [first[kind] + index for kind, index in blocks_of(stage)]


def replica_pools(stage: Stage) -> list[tuple[str, str]]:
    """(pool, GPU type) of every data-parallel replica of a stage, in the order of its groups."""
    width = stage.degrees.tp * stage.degrees.cp
    out: list[tuple[str, str]] = []
    for group in stage.groups:
        ranks = sum(len(parse_range(text)) for text in group.ranks)
        out += [(group.pool, group.gpu)] * (ranks // width)
    return out
