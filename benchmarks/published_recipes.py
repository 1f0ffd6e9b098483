"""Our plan against the published recipe, priced by the same cost model, for every published run that is legal.

    python -m benchmarks.published_recipes [--out docs/published_recipes.md] [--found FOUND.jsonl] [--only WORD]

Runs that ask the same question (model, cluster, workload) share their searches, one with our options and one with each
set of options that a recipe has beyond them; their fastest recipe that fits, as predicted, counts. ``--found`` keeps a
JSON line a question and skips those that it already holds. Exit code 1 if a recipe is faster.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from meshwright.cost_models.backtest.plans import Case, case_of
from meshwright.cost_models.backtest.rows import UnsupportedError, run_of
from meshwright.planner import rules
from meshwright.planner.answer.assemble import Skeleton, options_of
from meshwright.planner.answer.current import with_current
from meshwright.planner.answer.explain import describe
from meshwright.planner.corrections import estimate_of
from meshwright.planner.pins import switched
from meshwright.planner.request import PlanRequest
from meshwright.planner.variants import best_variant
from meshwright.specs.document import PlanDocument
from meshwright.specs.plan import Devices, Plan, format_range
from meshwright.specs.target import Switch, Target
from meshwright.specs.targets import load_target

DATA = Path(__file__).parent / "data"
TARGET = "megatron@0.19"
#: Step times nearer than this share are equal: event times of two sums differ by rounding.
EQUAL = 1e-6
#: Differences above this share are explained.
NOTABLE = 0.05
#: Options that let a plan fit.
SAVE_MEMORY = tuple(
    f"options.{name}"
    for name in ("activation_offload_layers", "activation_offload_modules", "optimizer_offload_fraction", "loss_chunks")
)


@dataclass
class Answer:
    """A question with its fastest recipe and our plan. Seconds a step; ``plain_s`` is the recipe with our options."""

    key: str
    runs: list[str]
    model: str
    gpu: str
    num_gpus: int
    batch: int
    seq_length: int
    precision: str
    legal: int
    fitting: int
    allowed: list[str] = field(default_factory=list)
    recipe: str = ""
    recipe_s: float | None = None
    plain_s: float | None = None
    plain_fits: bool = True
    ours: str = ""
    ours_s: float | None = None
    gap: float | None = None
    differs: dict[str, list[Any]] = field(default_factory=dict)
    why: str = ""
    options_worth_s: dict[str, float] = field(default_factory=dict)
    cpu_s: float = 0.0

    @property
    def speedup(self) -> float | None:
        """The recipe's step time over ours."""
        return self.recipe_s / self.ours_s if self.recipe_s and self.ours_s else None

    @property
    def fails(self) -> bool:
        """Whether a recipe that fits is faster than our plan."""
        return self.recipe_s is not None and (self.ours_s is None or self.recipe_s < self.ours_s * (1 - EQUAL))


def main() -> int:
    """Answer all questions and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--found", type=Path)
    parser.add_argument("--only", default="", help="questions whose key holds this word")
    options = parser.parse_args()
    target = load_target(TARGET)
    known = _known(options.found)
    answers = []
    for key, cases in sorted(questions(target).items()):
        if options.only not in key:
            continue
        answer = known.get(key) or answered(key, cases, target)
        answers.append(answer)
        if key not in known and options.found is not None:
            with options.found.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(answer)) + "\n")
        word = "FAILS" if answer.fails else "ok"
        print(f"{word:5} {answer.speedup or 0:6.2f}x {answer.cpu_s:5.1f} s  {key}", flush=True)
    if options.out is not None:
        options.out.write_text(page(answers), encoding="utf-8")
    return int(any(answer.fails for answer in answers))


def _known(path: Path | None) -> dict[str, Answer]:
    if path is None or not path.exists():
        return {}
    found = [Answer(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return {answer.key: answer for answer in found}


def published() -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Rows of the published runs, and their models."""
    with gzip.open(DATA / "published_runs.csv.gz") as file:
        rows = list(csv.DictReader(io.TextIOWrapper(file, encoding="utf-8")))
    return rows, json.loads(gzip.decompress((DATA / "published_models.json.gz").read_bytes()))


def questions(target: Target) -> dict[str, list[Case]]:
    """Cases whose plan is legal for the target, by question."""
    rows, models = published()
    out: dict[str, list[Case]] = defaultdict(list)
    for row in rows:
        try:
            case = case_of(run_of(row), models)
        except UnsupportedError:
            continue
        gpus = [case.cluster.gpu_of(pool) for pool in case.cluster.pools]
        if rules.violations(rules.facts_of_plan(case.plan, case.model, case.workload, target, gpus)):
            continue
        out[key_of(case)].append(case)
    return out


def key_of(case: Case) -> str:
    """The question of a case: readable, and different where any input differs."""
    digests = "".join(part.digest()[7:11] for part in (case.model, case.cluster, case.workload))
    work = case.workload
    shape = f"{work.global_batch_size}x{work.seq_length} {work.precision} {work.task}"
    return f"{case.run.model} {case.cluster.num_gpus}x{case.cluster.pools[0].gpu} {shape} {digests}"


def request_of(case: Case, target: Target, allow: tuple[Switch, ...] = ()) -> PlanRequest:
    """The request that a case's question is."""
    return PlanRequest(
        model=case.model,
        cluster=case.cluster,
        workload=case.workload,
        target=target,
        memory_headroom=0.0,
        top=3,
        allow=allow,
    )


def switches_of(plan: Plan) -> list[Switch]:
    """The options of a plan that a search sets only where it is allowed to."""
    options = plan.options
    return [
        switch
        for switch in get_args(Switch)
        if (options.dispatcher == "flex" if switch == "flex_dispatcher" else getattr(options, switch))
    ]


def answered(key: str, cases: list[Case], target: Target) -> Answer:
    """The fastest recipe that fits, and our plan."""
    started = time.process_time()
    sets = sorted({tuple(switches_of(case.plan)) for case in cases} | {()}, reverse=True)
    allow = tuple(sorted({switch for each in sets for switch in each}))
    request = request_of(cases[0], target, allow)
    priced = [(case, estimate_of(request, case.plan)) for case in cases]
    fitting = [(figures.step_time_s, k, case) for k, (case, figures) in enumerate(priced) if figures.fits]
    answer = Answer(
        key=key,
        runs=[case.run.id for case in cases],
        model=cases[0].run.model,
        gpu=cases[0].cluster.pools[0].gpu,
        num_gpus=cases[0].cluster.num_gpus,
        batch=request.workload.global_batch_size,
        seq_length=request.workload.seq_length,
        precision=request.workload.precision,
        legal=len(cases),
        fitting=len(fitting),
        allowed=list(allow),
    )
    every = [
        request.model_copy(update={"target": switched(target, tuple(dict.fromkeys((*target.switches, *each))))})
        for each in sets
    ]
    chosen, document = best_variant(request, every=every)
    if fitting:
        answer.recipe_s, _, case = min(fitting, key=lambda each: each[:2])
        answer.recipe = describe(case.plan)
        plain = estimate_of(request, with_our_options(request, case.plan))
        answer.plain_s, answer.plain_fits = plain.step_time_s, plain.fits
    plan, figures = document.plan, document.estimate
    if plan is not None and figures is not None and figures.fits:
        answer.ours, answer.ours_s = describe(plan), figures.step_time_s
        answer.gap = document.bound.gap if document.bound is not None else None
        if fitting:
            asked = chosen.model_copy(update={"current": placed(case)})
            _compare(request, answer, case.plan, with_current(asked, document))
    answer.cpu_s = time.process_time() - started
    return answer


def _compare(request: PlanRequest, answer: Answer, recipe: Plan, document: PlanDocument) -> None:
    """What the product says of the recipe as the plan in use, and what its options are worth in our plan."""
    plan, ours, current = document.plan, document.estimate, document.current
    assert plan is not None and ours is not None and current is not None  # noqa: PT018  the caller asked
    answer.why = current.why or ""
    answer.differs = {each.name: [each.ours, each.theirs] for each in current.differences}
    found = current.differences
    for each in found:
        if not each.name.startswith("options."):
            continue
        option = each.name.removeprefix("options.")
        options = plan.options.model_copy(update={option: getattr(recipe.options, option)})
        changed = plan.model_copy(update={"options": options})
        gpus = [request.cluster.gpu_of(pool) for pool in request.cluster.pools]
        facts = rules.facts_of_plan(changed, request.model, request.workload, request.target, gpus)
        if rules.violations(facts):
            continue
        saved = ours.step_time_s - estimate_of(request, changed).step_time_s
        if saved > EQUAL * ours.step_time_s:
            answer.options_worth_s[option] = saved


def placed(case: Case) -> Plan:
    """The plan of a case on the nodes of its one pool, in order."""
    pool = case.cluster.pools[0]
    ranks, nodes = format_range(0, pool.num_gpus - 1), format_range(0, pool.nodes - 1)
    return case.plan.model_copy(update={"devices": (Devices(ranks=ranks, pool=pool.name, nodes=nodes),)})


def with_our_options(request: PlanRequest, plan: Plan) -> Plan:
    """The plan with the options that a search writes for its degrees."""
    degrees = (plan.tp, plan.cp, plan.ep, plan.etp, plan.dp, plan.micro_batch_size)
    tp, cp, ep, etp, dp, micro_batch_size = (value or 1 for value in degrees)  # published plans are uniform
    skeleton = Skeleton(
        tp=tp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        vpp=plan.vpp,
        micro_batch_size=micro_batch_size,
        num_microbatches=plan.num_microbatches,
        recompute=plan.recompute,
        sharding=plan.sharding if isinstance(plan.sharding, str) else "fsdp",
    )
    return plan.model_copy(update={"options": options_of(request.model, request.target, skeleton, plan.pp)})


def missing(answer: Answer) -> str:
    """Why a recipe is faster than our plan: options that no search sets, or a plan that the space should hold."""
    if not answer.fails:
        return ""
    by_options = (
        answer.plain_s is not None and answer.ours_s is not None and answer.plain_s >= answer.ours_s * (1 - EQUAL)
    )
    if by_options and answer.options_worth_s:
        worth = sorted(answer.options_worth_s.items(), key=lambda item: -item[1])
        options = ", ".join(f"{name} ({seconds / (answer.ours_s or 1.0):.1%})" for name, seconds in worth)
        return f"options: {options}"
    if not answer.plain_fits:
        saving = [f"{name} {answer.differs[name][0]}" for name in SAVE_MEMORY if name in answer.differs]
        return f"memory: {', '.join(saving)}"
    degrees = [f"{name} {a} (ours {b})" for name, (a, b) in answer.differs.items() if not name.startswith("options.")]
    return "space: " + ", ".join(degrees)


def because(answer: Answer) -> str:
    """Why our plan is faster, for differences above :data:`NOTABLE`: as a plan made ``--from`` the recipe says it."""
    return answer.why if answer.speedup is not None and answer.speedup >= 1 + NOTABLE else ""


def page(answers: list[Answer]) -> str:
    """The page of the documentation."""
    return "\n".join(_lines(answers)) + "\n"


def _lines(answers: list[Answer]) -> Iterator[str]:
    judged = [answer for answer in answers if answer.recipe_s is not None]
    speedups = sorted(answer.speedup for answer in judged if answer.speedup is not None)
    failed = [answer for answer in judged if answer.fails]
    over = [answer for answer in judged if (answer.speedup or 0.0) > 1 + NOTABLE]
    yield "# Published recipes"
    yield ""
    yield (
        f"Our plan for every published run whose recipe is legal for {TARGET}, beside the fastest such recipe, both "
        "priced by the same cost model. Made by `python -m benchmarks.published_recipes --out "
        "docs/published_recipes.md` from the published runs that ship in `benchmarks/data`. Step times here are "
        "predictions; [accuracy](accuracy.md) tells how far those are from measured ones. Recipes of other frameworks "
        "count as Megatron plans with the same degrees. A search is allowed (`--allow`) the options that a recipe of "
        "its question has."
    )
    yield ""
    yield "| questions | with a fitting recipe | ours as fast or faster | slower | over 5 % faster | median speed-up |"
    yield "|---:|---:|---:|---:|---:|---:|"
    median = speedups[len(speedups) // 2] if speedups else float("nan")
    yield (
        f"| {len(answers)} | {len(judged)} | {len(judged) - len(failed)} | {len(failed)} | {len(over)} | {median:.2f} |"
    )
    yield ""
    if failed:
        yield "## Recipes that are faster than our plan"
        yield ""
        yield "| question | runs | recipe, s | with our options, s | ours, s | what the search lacks |"
        yield "|---|---|---:|---:|---:|---|"
        for a in sorted(failed, key=lambda a: a.speedup or 0.0):
            ours = "none fits" if a.ours_s is None else f"{a.ours_s:.4g}"
            yield (f"| {_question(a)} | {_runs(a)} | {a.recipe_s:.4g} | {a.plain_s:.4g} | {ours} | {missing(a)} |")
        yield ""
    yield "## All questions"
    yield ""
    yield (
        "`recipe / ours` is the predicted speed-up. The last column says where a difference above 5 % comes from, in "
        "the words of `meshwright plan --from RECIPE`: what our plan changes, then the terms that shrink, as shares of "
        "the recipe's step."
    )
    yield ""
    yield "| question | recipe, s | ours, s | recipe / ours | our plan | why |"
    yield "|---|---:|---:|---:|---|---|"
    for a in answers:
        if a.recipe_s is None:
            why = "no recipe fits by the memory model"
            ours = "none" if a.ours_s is None else f"{a.ours_s:.4g}"
            yield f"| {_question(a)} | | {ours} | | {a.ours} | {why} |"
        elif a.ours_s is not None:
            yield (
                f"| {_question(a)} | {a.recipe_s:.4g} | {a.ours_s:.4g} | {a.speedup:.2f} | {a.ours} | "
                f"{missing(a) or because(a)} |"
            )


def _question(answer: Answer) -> str:
    return f"{answer.model}, {answer.num_gpus} x {answer.gpu}, {answer.batch} x {answer.seq_length} {answer.precision}"


def _runs(answer: Answer) -> str:
    return answer.runs[0] + (f" and {len(answer.runs) - 1} more" if len(answer.runs) > 1 else "")


if __name__ == "__main__":
    sys.exit(main())
