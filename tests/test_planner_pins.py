"""Options that a request pins with ``fix``: kept by the answer, the best that has them, and refused by name."""

from __future__ import annotations

from itertools import product

import pytest
from pydantic import ValidationError

from meshwright.api.cli import run
from meshwright.cost_models.estimate import estimate
from meshwright.planner import rules
from meshwright.planner.search import plan
from meshwright.planner.variants import best_search, variants
from meshwright.specs.model_io import load_model
from meshwright.specs.plan import Hsdp, HsdpSharding

from .planner_cases import request, small_model, workload


def asked_with(network="4x2xH100", **options):
    fix = {"cp": 2, "tp": 1, "pp": 1, "vpp": 1, "mbs": 1} | options.pop("fix", {})
    return request(small_model(layers=4, heads=16), network, workload(4, 16384), fix=fix, **options)


def priced(asked, found):
    return estimate(asked.model, asked.cluster, asked.workload, asked.target, found, asked.memory_headroom)


def with_options(found, **options):
    return found.model_copy(update={"options": found.options.model_copy(update=options)})


@pytest.mark.parametrize("kind", ["p2p", "a2a", "allgather"])
def test_every_sharding_is_tried_under_a_pinned_exchange(kind):
    asked = asked_with(fix={"cp_comm_type": kind}, forbid=("offload", "recompute"))
    answer = plan(asked)
    assert answer.plan.options.cp_comm_type == kind
    steps = []
    levels = ("zero1", "zero2", "fsdp", Hsdp(hsdp=HsdpSharding(replicate=4, shard=2)))
    for level, copies in product(levels, (1, 4)):
        stages = tuple(stage.model_copy(update={"sharding": level}) for stage in answer.plan.stages)
        other = answer.plan.model_copy(update={"sharding": level, "stages": stages})
        other = with_options(other, dist_opt_instances=copies)
        facts = rules.facts_of_plan(other, asked.model, asked.workload, asked.target)
        if (copies == 1 or level == "zero1") and not rules.violations(facts):
            steps.append(priced(asked, other).step_time_s)
    assert len(steps) > 3
    assert answer.estimate.step_time_s == pytest.approx(min(steps), rel=1e-9)


def test_a_pinned_exchange_leaves_plans_without_context_parallelism_alone():
    answer = plan(asked_with(fix={"cp": 1, "tp": 2, "cp_comm_type": "a2a"}))
    assert answer.plan.options.cp_comm_type is None


@pytest.mark.parametrize(
    ("fix", "name", "value"),
    [
        ({"dist_opt_instances": 4}, "dist_opt_instances", 4),
        ({"activation_offload_layers": 2}, "activation_offload_layers", 2),
        ({"optimizer_offload_fraction": "0.3"}, "optimizer_offload_fraction", 0.3),
        ({"cp": 8, "cp_comm_type": "a2a+p2p", "cp_a2a_size": 2}, "cp_a2a_size", 2),
        ({"tp": 2, "cp": 1, "tp_comm_overlap": "true"}, "tp_comm_overlap", True),
    ],
)
def test_the_answer_has_what_is_pinned_and_prices_it(fix, name, value):
    asked = asked_with(fix=fix)
    answer = plan(asked)
    assert getattr(answer.plan.options, name) == value
    assert answer.estimate.fits
    assert answer.estimate.step_time_s == pytest.approx(priced(asked, answer.plan).step_time_s, rel=1e-9)
    assert answer.bound.step_time_s <= answer.estimate.step_time_s
    assert not rules.violations(rules.facts_of_plan(answer.plan, asked.model, asked.workload, asked.target))


def test_a_switch_pinned_off_is_not_tried_though_allowed():
    asked = asked_with(fix={"tp_comm_overlap": "false"}, allow=("tp_comm_overlap", "cuda_graph"))
    assert {each.target.switches for each in variants(asked)} == {
        ("cuda_graph", "moe_shared_expert_overlap"), ("moe_shared_expert_overlap",),
    }  # fmt: skip
    on = asked.model_copy(update={"fix": {**asked.fix, "cuda_graph": "true"}})
    assert [each.target.switches for each in variants(on)] == [("cuda_graph", "moe_shared_expert_overlap")]


def test_the_flex_dispatcher_can_be_pinned():
    asked = request(load_model("qwen3-30b-a3b"), "8xH100", workload(32, 4096), fix={"ep": 8, "dispatcher": "flex"})
    answer = plan(asked)
    assert answer.plan.options.dispatcher == "flex"


@pytest.mark.parametrize(
    ("fix", "words"),
    [
        ({"fp8_dispatch": "true"}, "'fp8_dispatch' is not a choice; use one of activation_offload_layers"),
        ({"cp_comm_type": "ring"}, "no cp_comm_type 'ring'; use one of p2p, a2a, allgather"),
        ({"cp_comm_type": "a2a+p2p"}, "needs cp=N and cp_a2a_size=M"),
        ({"cp_comm_type": "a2a+p2p", "cp_a2a_size": 3}, "cp_a2a_size must divide cp"),
        ({"cp_a2a_size": 2}, "belongs to cp_comm_type=a2a\\+p2p"),
        ({"cuda_graph": "yes"}, "cuda_graph must be true or false"),
        ({"optimizer_offload_fraction": "most"}, "must be a share from 0 to 1"),
        ({"dist_opt_instances": 0}, "must be a whole number from 1"),
        ({"dist_opt_instances": 2, "sharding": "fsdp"}, "sharding=fsdp has no dist_opt_instances"),
        ({"ep_comm_overlap": "true"}, "the model has no experts"),
    ],
)
def test_what_cannot_be_pinned_is_named(fix, words):
    fix = {"cp_comm_type": "a2a+p2p"} if words.startswith("needs") else {"cp": 4, **fix}
    with pytest.raises(ValidationError, match=words):
        request(small_model(layers=4, heads=16), "4x2xH100", workload(4, 16384), fix=fix)


def test_the_command_line_pins_options(capsys):
    words = ["--cluster", "8xH100", "--global-batch-size", "64", "--seq-length", "4096", "--json"]
    assert run(["plan", "llama-3.1-8b", *words, "--fix", "tp_comm_overlap=true", "--fix", "tp=2"]) == 0
    assert '"tp_comm_overlap": true' in capsys.readouterr().out
    assert run(["plan", "llama-3.1-8b", *words, "--fix", "tp_comm_overlap=2"]) == 2
    assert "tp_comm_overlap must be true or false" in capsys.readouterr().err


def test_sets_of_allowed_options_share_a_deadline(monkeypatch):
    asked = asked_with(allow=("cuda_graph",), deadline_s=100.0)
    left, now = [], [0.0]

    def searched(variant, progress=None):
        left.append(variant.deadline_s)
        now[0] += 60.0
        return real(variant.model_copy(update={"deadline_s": None}), progress)

    from meshwright.planner import variants as room

    real = room.searched
    monkeypatch.setattr(room, "searched", searched)
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])
    _, _, _, complete = best_search(asked)
    assert left == [100.0, 40.0]
    assert complete
    left.clear()
    _, result, bound_s, complete = best_search(asked.model_copy(update={"deadline_s": 50.0}))
    assert left == [50.0]
    assert result.best is not None
    assert bound_s == 0.0
    assert not complete
