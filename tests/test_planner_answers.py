"""What the planner says when things do not fit, pools are left out, layers lie unevenly, or the space is narrowed."""

from __future__ import annotations

import time

import pytest

from meshwright.planner.answer.explain import decoder_layers
from meshwright.planner.answer.no_fit import scaled, smallest_fitting
from meshwright.planner.errors import DeadlineExceeded, IllegalPlan
from meshwright.planner.request import PlanRequest
from meshwright.planner.search import plan
from meshwright.planner.single import document_for_plan, estimate_degrees
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.document import PlanDocument
from meshwright.specs.errors import SpecError
from meshwright.specs.model_io import load_model

from .planner_cases import request, small_model, workload


def kinds(answer: PlanDocument) -> dict[str, str]:
    return {item.kind: item.message for item in answer.explanation}


def test_mixtral_on_16_small_gpus_names_the_optimizer_and_the_size_that_fits() -> None:
    """18 bytes x 46.7e9 parameters are 841 GB of states; 16 GPUs of 40 GB have 640 GB."""
    asked = request(load_model("mixtral-8x7b"), "16xA100-40GB", workload(256, 4096), forbid=("offload",))
    answer = plan(asked)
    assert answer.status == "infeasible"
    assert answer.plan is None
    assert answer.reason is not None
    assert "optimizer state" in answer.reason
    fits = next(item.data["num_gpus"] for item in answer.explanation if item.kind == "would-fit")
    assert 18 * 46.7e9 / 40e9 < fits <= 32
    assert plan(asked.model_copy(update={"cluster": load_cluster(f"{fits}xA100-40GB")})).plan is not None
    assert plan(asked.model_copy(update={"cluster": load_cluster(f"{fits - 8}xA100-40GB")})).plan is None


def test_a_part_of_a_node_grows_to_whole_nodes() -> None:
    """18 bytes x 69e9 parameters need 16 GPUs of 79 GiB for the states alone."""
    asked = request(load_model("llama-2-70b"), "2xH100", workload(64, 4096), forbid=("offload",))
    found = smallest_fitting(asked)
    assert found is not None
    assert found.num_gpus >= 16
    assert found.num_gpus % 8 == 0


def test_the_smallest_part_of_a_node_is_found() -> None:
    """18 bytes x 8.03e9 parameters are 145 GB: two H100 hold the states, one cannot."""
    asked = request(load_model("llama-3.1-8b"), "1xH100", workload(16, 2048), forbid=("offload",))
    found = smallest_fitting(asked)
    assert found is not None
    assert 2 <= found.num_gpus <= 4
    smaller = {2: 1, 4: 2}[found.num_gpus]
    assert plan(asked.model_copy(update={"cluster": scaled(asked.cluster, smaller)})).plan is None


def test_no_smaller_cluster_fits_than_the_one_that_is_named() -> None:
    """Neither legality nor fitting grows with size: a batch of 1,024 leaves many node counts without a legal plan."""
    asked = request(load_model("deepseek-v3"), "8xH100", workload(1024, 4096))
    found = smallest_fitting(asked)
    assert found is not None
    assert plan(asked.model_copy(update={"cluster": found})).plan is not None
    for fewer in (8, 16, 24, 32):
        smaller = load_cluster(f"{found.num_gpus - fewer}xH100")
        assert plan(asked.model_copy(update={"cluster": smaller, "work_limit": 500})).plan is None


def test_the_leanest_plan_that_does_not_fit_is_spread_over_all_gpus() -> None:
    """DeepSeek-V3 on 64 GPUs: 12 of 18 bytes a parameter are optimizer state, 8.05e12 / 64 bytes on each GPU."""
    answer = plan(request(load_model("deepseek-v3"), "64xH100", workload(256, 4096), forbid=("offload",)))
    why = next(item.data for item in answer.explanation if item.kind == "no-fit")
    assert why["term"] == "optimizer"
    assert why["breakdown_bytes"]["optimizer"] == pytest.approx(12 * 671e9 / 64, rel=0.2)


def test_a_search_that_was_cut_short_does_not_claim_that_nothing_fits() -> None:
    forbid = ("offload", "fsdp", "zero2", "dist_opt_instances", "cp_comm_type")  # each would be tried once more
    asked = request(load_model("deepseek-v3"), "192xH100", workload(1024, 4096), work_limit=1, forbid=forbid)
    answer = plan(asked)
    assert answer.status in ("feasible", "unknown")
    assert not answer.complete
    assert (answer.plan is None) == (answer.status == "unknown")


def test_gpus_that_are_left_out_change_nothing_for_the_others() -> None:
    tied = load_model("llama-3.2-1b")
    assert tied.tied_embeddings
    alone = plan(request(tied, "8xH100", workload(64, 4096)))
    offered = plan(request(tied, "8xH100+8xV100-32GB", workload(64, 4096)))
    assert alone.estimate is not None
    assert offered.estimate is not None
    assert offered.estimate.step_time_s == alone.estimate.step_time_s
    assert offered.estimate.stages == alone.estimate.stages


def test_mfu_in_fp32_is_over_the_units_that_run_it() -> None:
    """A100 runs fp32 products on tf32 units: no share of their peak can pass 1."""
    priced = estimate_degrees(request(small_model(), "8xA100-80GB", workload(16, 2048, precision="fp32")), {})
    assert priced.estimate is not None
    assert 0 < priced.estimate.mfu < 1


def test_the_objective_gpus_takes_no_more_than_are_needed() -> None:
    asked = request(load_model("llama-3.1-8b"), "64xH100", workload(16, 2048), objective="gpus")
    answer = plan(asked)
    assert answer.estimate is not None
    assert answer.estimate.gpus_used <= 4


def mixed(precision: str) -> PlanRequest:
    return request(
        load_model("llama-2-13b"),
        "1x8xA100-SXM-80GB+1x8xV100-SXM2-32GB",
        workload(64, 4096, precision=precision),
    )


def test_slow_gpus_get_fewer_layers_and_the_answer_says_why() -> None:
    answer = plan(mixed("fp16"))
    assert answer.plan is not None
    layers = dict.fromkeys(("A100-SXM-80GB", "V100-SXM2-32GB"), 0)
    stages = dict.fromkeys(layers, 0)
    for stage, count in zip(answer.plan.stages, decoder_layers(answer.plan), strict=True):
        layers[stage.groups[0].gpu] += count
        stages[stage.groups[0].gpu] += 1
    assert layers["A100-SXM-80GB"] / stages["A100-SXM-80GB"] > 1.5 * layers["V100-SXM2-32GB"] / stages["V100-SXM2-32GB"]
    said = kinds(answer)["layout"]
    assert "faster GPUs get more layers" in said
    assert "even split" in said
    data = next(item.data for item in answer.explanation if item.kind == "layout")
    assert "even_overflows_stage" in data or data["even_step_time_s"] > answer.estimate.step_time_s  # type: ignore[union-attr]


def test_a_pool_without_the_precision_is_left_out_by_name() -> None:
    answer = plan(mixed("bf16"))
    assert answer.plan is not None
    assert {group.gpu for stage in answer.plan.stages for group in stage.groups} == {"A100-SXM-80GB"}
    assert "V100-SXM2-32GB" in kinds(answer)["left-out"]
    assert "--precision fp16" in kinds(answer)["left-out"]
    assert answer.estimate is not None
    assert (answer.estimate.gpus_used, answer.estimate.gpus_offered) == (8, 16)


def test_a_cluster_without_the_precision_gets_no_plan() -> None:
    answer = plan(request(small_model(), "8xV100-32GB"))
    assert answer.status == "infeasible"
    assert answer.reason is not None
    assert "fp16" in answer.reason


def test_a_model_that_the_target_refuses_everywhere_names_the_rule_with_its_numbers() -> None:
    answer = plan(request(load_model("gpt2"), "8xH100", workload(16, 2048)))
    assert answer.status == "infeasible"
    assert answer.reason is not None
    assert "megatron.C2" in answer.reason
    assert "1024" in answer.reason
    assert "2048" in answer.reason


def test_choices_that_exclude_everything_are_said_to() -> None:
    answer = plan(request(small_model(), "8xH100", fix={"tp": 3}))
    assert answer.status == "infeasible"
    assert answer.reason is not None
    assert "fixed" in answer.reason


@pytest.mark.parametrize("choice", [{"fix": {"tp": 2, "pp": 2}}, {"max": {"tp": 1}}, {"forbid": ("vpp", "recompute")}])
def test_narrowed_spaces_are_kept(choice: dict[str, object]) -> None:
    answer = plan(request(small_model(8), "8xH100", **choice))
    found = answer.plan
    assert found is not None
    for other in (found, *(item.plan for item in answer.alternatives)):
        if "fix" in choice:
            assert (other.tp, other.pp) == (2, 2)
        if "max" in choice:
            assert other.tp == 1
        if "forbid" in choice:
            assert other.vpp == 1
            assert other.recompute.granularity == "none"


def test_degrees_of_the_planners_own_plan_are_priced_the_same() -> None:
    asked = request(small_model(8, experts=8), "16xH100")
    answer = plan(asked)
    found = answer.plan
    assert found is not None
    names = ("tp", "pp", "cp", "ep", "etp", "vpp", "micro_batch_size", "sharding")
    degrees = {name: getattr(found, name) for name in names} | {"recompute": found.recompute.label}
    again = estimate_degrees(asked, degrees)
    assert again.estimate is not None
    assert answer.estimate is not None
    assert again.estimate.step_time_s == pytest.approx(answer.estimate.step_time_s, rel=1e-9)
    whole = document_for_plan(asked, found)
    assert whole.estimate == answer.estimate


def test_a_huge_batch_is_planned_in_bounded_time_and_memory() -> None:
    asked = request(small_model(), "8xH100", workload(10**9, 128))
    answer = plan(asked)
    assert answer.plan is not None
    priced = estimate_degrees(asked, {"pp": 2})
    assert priced.estimate is not None
    assert priced.plan is not None
    busiest = max(stage.busy_s for stage in priced.estimate.stages)
    assert priced.estimate.step_time_s == pytest.approx(busiest, rel=0.1)


def test_the_deadline_ends_the_search_and_the_look_for_a_larger_cluster() -> None:
    asked = request(load_model("llama-3.1-405b"), "8xH100", workload(64, 4096))
    with pytest.raises(DeadlineExceeded):
        smallest_fitting(asked, deadline=time.monotonic() - 1)
    with pytest.raises(DeadlineExceeded, match="no plan was found"):
        plan(asked.model_copy(update={"deadline_s": 1e-9}))


def test_more_chunks_than_layers_are_refused_by_field() -> None:
    with pytest.raises(SpecError, match="decoder layer each"):
        estimate_degrees(request(small_model(4), "8xH100"), {"pp": 4, "vpp": 2})


def test_a_cluster_without_the_precision_cannot_be_priced() -> None:
    with pytest.raises(SpecError, match="fp16"):
        estimate_degrees(request(small_model(4), "8xV100-32GB"), {"pp": 4})


def test_illegal_degrees_name_the_rule() -> None:
    with pytest.raises(IllegalPlan, match="T1"):
        estimate_degrees(request(small_model(heads=6, hidden=768), "8xH100"), {"tp": 4})


@pytest.mark.parametrize(
    ("degrees", "pointer"),
    [
        ({"tp": 3}, "/tp"),
        ({"tp": 0}, "/tp"),
        ({"pp": True}, "/pp"),
        ({"tp": 2, "ep": 3}, "/ep"),
        ({"micro_batch_size": 7}, "/workload/global_batch_size"),
        ({"sharding": "zero9"}, "/sharding"),
        ({"recompute": "some"}, "/recompute"),
        ({"dp": 3}, "/dp"),
    ],
)
def test_numbers_that_cannot_be_a_plan_name_their_field(degrees: dict[str, object], pointer: str) -> None:
    with pytest.raises(SpecError) as caught:
        estimate_degrees(request(small_model(), "8xH100"), degrees)
    assert [fault.pointer for fault in caught.value.faults] == [pointer]


def test_a_plan_that_does_not_fit_is_priced_and_says_what_binds() -> None:
    answer = estimate_degrees(request(load_model("llama-3.1-70b"), "8xH100", workload(8, 4096)), {"tp": 8})
    assert answer.status == "infeasible"
    assert answer.estimate is not None
    assert not answer.estimate.fits
    assert answer.reason is not None
    assert "does not fit" in answer.reason


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"fix": {"tp": 4}, "max": {"tp": 2}}, "above max"),
        ({"fix": {"vpp": 2}, "forbid": ("vpp",)}, "contradicts forbid"),
        ({"fix": {"mbs": 2, "micro_batch_size": 4}}, "one choice"),
        ({"fix": {"sharding": "foo"}}, "zero1"),
        ({"fix": {"recompute": "some"}}, "selective:layernorm"),
        ({"fix": {"tp": 10**20}}, "whole number"),
        ({"fix": {"mbs": 0}}, "whole number"),
        ({"fix": {"qp": 1}}, "not a choice"),
        ({"forbid": ("speed",)}, "not a feature"),
    ],
)
def test_contradictory_or_unknown_choices_are_refused(choices: dict[str, object], words: str) -> None:
    asked = request(small_model(), "8xH100")
    with pytest.raises(SpecError, match=words):
        PlanRequest.parse({**dict(asked), **choices})


def test_a_sequence_beyond_the_models_maximum_is_said() -> None:
    answer = plan(request(small_model(), "8xH100", workload(8, 16384)))
    assert answer.estimate is not None
    assert any("16384" in text and "8192" in text for text in answer.estimate.assumptions)


def test_many_equal_stages_are_settled_in_bounded_time() -> None:
    """21 equal stages of 32 equal layers have millions of splits of equal bound."""
    answer = plan(request(load_model("llama-3.1-8b"), "7x3xA100-SXM-80GB", workload(64, 4096), fix={"pp": 21}))
    assert answer.plan is not None
