"""Bytes by hand: activations of older and eager stacks, hybrid mixers, sharding groups, fp8 weights, offload."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cost_models import memory, offload, stage_memory
from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.estimate import estimate
from meshwright.cost_models.multipliers import NEUTRAL
from meshwright.cost_models.operators import device
from meshwright.specs.attention import LinearAttention, MambaMixer
from meshwright.specs.estimate import Estimate
from meshwright.specs.model import LayerKind, ModelSpec
from meshwright.specs.plan import Hsdp, HsdpSharding, Plan
from meshwright.specs.target import RecomputeMode

from .cost_cases import FULL, H100, NONE, cluster, dense, keys, mla_moe, plan, target, workload

ALONE = (1, 1, 1, 1, 8, 1, 0, 0)


def kept(model: ModelSpec, row: tuple[int, ...] = ALONE, mode: RecomputeMode = NONE, work=None, **changes: object):
    """(kept, transient) bytes of the first layer kind."""
    costs = CostModel(model, cluster(4), work or workload(), target(mode, **changes))
    cells = costs.cells(keys(row))  # type: ignore[arg-type]
    layer = next(b for b, kind in enumerate(costs.kinds) if kind.layer is not None)
    return float(cells.activation_bytes[0, layer]), float(cells.transient_bytes[0, layer])


def test_llama_2_7b_layer() -> None:
    """8h + 4ad + 4gd + 6f + 4a with h = ad = gd = 4096, f = 11008, a = 32: 131,712 bytes a token."""
    assert kept(dense(1, 4096, 32, 32, 11008, 32000))[0] == 131_712 * 4096


def test_korthikanti_unfused_layer_with_dropout() -> None:
    """34 s b h + 5 a s^2 b (Korthikanti et al. 2022, equation 2)."""
    h, a, s = 2048, 16, 1024
    model = dense(1, h, a, a, 4 * h, 32000, gated=False)
    work = workload(seq=s, dropout=True)
    assert kept(model, work=work, fused_attention=False)[0] == 34 * s * h + 5 * a * s * s
    core = RecomputeMode(granularity="selective", modules=("core_attn",))
    assert kept(model, mode=core, work=work, fused_attention=False)[0] == 34 * s * h
    tensor = kept(model, row=(4, 1, 1, 1, 8, 1, 0, 0), work=work, fused_attention=False, sequence_parallel=True)[0]
    assert tensor == (34 * s * h + 5 * a * s * s) / 4  # equation 4: tensor with sequence parallelism


def test_unfused_attention_without_dropout_keeps_the_softmax() -> None:
    h, a, s = 2048, 16, 1024
    fused, plain = (
        kept(dense(1, h, a, a, 4 * h, 32000), work=workload(seq=s), fused_attention=f)[0] for f in (True, False)
    )
    assert plain - fused == 2 * a * s * s - 4 * a * s


def test_every_second_operator_of_a_llama_layer() -> None:
    """Input and last product 2h each, query 2ad, value 2gd, attention 2ad + 4a, first product of the MLP 2f."""
    h, a, g, d, f = 4096, 32, 8, 128, 14336
    mode = RecomputeMode(granularity="selective", modules=("alternate_ops",))
    expected = 4 * h + 4 * a * d + 2 * g * d + 2 * f + 4 * a
    assert kept(dense(1, h, a, g, f, 32000), mode=mode)[0] == expected * 4096


def test_eager_stack_keeps_more() -> None:
    """The activation before its gate (2f); under TP the two gathered norm outputs (2h each instead of 2h / 4)."""
    h, f = 4096, 14336
    model = dense(1, h, 32, 8, f, 32000)
    assert kept(model, fused_activation=False)[0] - kept(model)[0] == 2 * f * 4096
    row = (4, 1, 1, 1, 8, 1, 0, 0)
    assert kept(model, row, gathered_inputs_kept=True)[0] - kept(model, row)[0] == 4 * h * 3 / 4 * 4096


def test_fp8_inputs_count_one_byte_only_where_they_are_saved_in_fp8() -> None:
    h, a, d, f = 4096, 32, 128, 14336
    model, work = dense(1, h, a, 8, f, 32000), workload(precision="fp8")
    saved = 2 * h + a * d + f  # both norm outputs, attention output, activation output: one byte less each
    assert kept(model)[0] - kept(model, work=work)[0] == saved * 4096
    assert kept(model, work=work, low_precision_inputs=False)[0] == kept(model)[0]


def test_mamba_layer() -> None:
    """Residual and norm 4h; scan input 2(2i + 2gn + heads), scan output, norm input and output projection input 2i."""
    h, heads, groups, n = 2048, 64, 8, 128
    inner = heads * 64
    mixer = MambaMixer(num_heads=heads, head_dim=64, num_groups=groups, state_size=n, conv_kernel=4)
    model = dense(1, h, 16, 16, 8192, 32000).model_copy(update={"kinds": (LayerKind(attention=mixer, norms=1),)})
    expected = 4 * h + 2 * (2 * inner + 2 * groups * n + heads) + 6 * inner
    assert kept(model)[0] == expected * 4096


def test_gated_delta_net_layer() -> None:
    """Keys k = 2048 and values v = 6144 wide, 48 value heads of key size 128: projection, its copy and convolution
    3(2k + v) + v, query and key repeated to the value heads twice, output v, inverses 48 * 64, gated norm v."""
    h, k, v = 5120, 2048, 6144
    mixer = LinearAttention(num_key_heads=16, key_head_dim=128, num_value_heads=48, value_head_dim=128, conv_kernel=4)
    model = dense(1, h, 16, 16, 8192, 32000).model_copy(update={"kinds": (LayerKind(attention=mixer, norms=1),)})
    elements = 2 * h + 3 * (2 * k + v) + v + 2 * 2 * 48 * 128 + v + 48 * 64 + v
    assert kept(model)[0] == 2 * elements * 4096


def test_flex_dispatcher_weights_inside_the_activation() -> None:
    h, k = 2048, 2
    model, row = mla_moe(1, h, 16, 8, k, 1024, 0, 32000), (1, 1, 8, 1, 8, 1, 0, 0)
    standard, flex = kept(model, row)[0], kept(model, row, dispatcher="flex")[0]
    assert standard - flex == 2 * h * k * 4096
    assert kept(model, row, dispatcher="flex", moe_comm_overlap=True)[0] == standard


# -- states ------------------------------------------------------------------------------------------------------------


def states(sharding: str, shards: float = 8.0, low: float = 0.0, low_bytes: float = 0.0, **changes: object):
    one = np.array([1.0])
    parts = memory.static_bytes(one, one, np.array([shards]), sharding, workload(**changes), low, low_bytes)
    return [float(part[0]) for part in parts]


def test_hybrid_sharding_divides_inside_a_replica() -> None:
    assert states("hsdp:4", 32.0) == states("fsdp", 8.0) == pytest.approx([2 / 8, 4 / 8, 12 / 8])
    assert states("hsdp:4", 2.0) == states("none")


def test_precision_aware_adam_and_muon() -> None:
    assert states("zero1", moments_dtype="bf16", main_params_dtype="bf16") == [2, 4, 4 / 8]  # their own main copy
    assert states("zero1", gradient_dtype="bf16", main_gradient_dtype="fp32") == [2, 4, 12 / 8]
    assert states("zero1", optimizer="muon") == [2, 4, 8 / 8]
    assert memory.optimizer_bytes_per_param(workload(optimizer="muon"), matrices=False) == 12


def test_primary_fp8_weights() -> None:
    """Three quarters of the parameters are maps: 1 byte, 2 with Hopper's transposed copy, the others 2 bytes."""
    work = {"precision": "fp8", "params_dtype": "fp8"}
    assert states("none", low=0.75, low_bytes=memory.low_precision_bytes("fp8", False), **work)[0] == 0.75 + 0.5
    assert states("none", low=0.75, low_bytes=memory.low_precision_bytes("fp8", True), **work)[0] == 1.5 + 0.5
    assert memory.low_precision_bytes("mxfp8", False) == 2 * (1 + 1 / 32)
    assert memory.low_precision_bytes("bf16", True) == 0


def test_full_sharding_keeps_no_quantised_copies() -> None:
    model = dense(2, 4096, 32, 8, 14336, 32000)
    costs = CostModel(model, cluster(1), workload(precision="fp8"), target(), shardings=("zero1", "fsdp"))
    cells = costs.cells(keys((1, 1, 1, 1, 8, 1, 0, 0), (1, 1, 1, 1, 8, 1, 0, 1)))
    layer = next(b for b, kind in enumerate(costs.kinds) if kind.layer is not None)
    params = sum(w.numel for w in model.kinds[0].weights(4096))
    maps = params - 2 * 4096
    assert cells.static_bytes_by[:, layer, 0] == pytest.approx([2 * params + 2 * maps, 2 * params / 8])


# -- plans -------------------------------------------------------------------------------------------------------------


def run(laid: Plan, model: ModelSpec, **changes: object) -> Estimate:
    return estimate(model, cluster(2), workload(), target(**changes), laid)


def small() -> ModelSpec:
    return dense(8, 2048, 16, 16, 8192, 32000)


def with_options(laid: Plan, **options: object) -> Plan:
    return laid.model_copy(update={"options": laid.options.model_copy(update=options)})


def test_offloaded_layers_leave_two_buffers() -> None:
    model = small()
    laid = plan(model, dp=8, m=8)
    whole, some = run(laid, model), run(with_options(laid, activation_offload_layers=5), model)
    layer = kept(model)[0]
    parts, after = whole.stages[0].breakdown_bytes, some.stages[0].breakdown_bytes
    assert parts["activations"] - after["activations"] == pytest.approx(5 * layer)
    assert after["transient"] - parts["transient"] == pytest.approx(2 * layer)
    assert some.host_ram_bytes == pytest.approx(8 * 5 * layer)
    assert whole.host_ram_bytes == 0
    moved = 5 * layer / offload.PCIE5
    exposed = sum(max(moved - s, 0) for s in (whole.stages[0].forward_s, whole.stages[0].backward_s))
    assert some.step_time_s - whole.step_time_s == pytest.approx(8 * exposed)
    assert sum(some.breakdown_s.values()) == pytest.approx(some.step_time_s)


def test_two_copies_of_a_model_move_each_micro_batch_once() -> None:
    """DualPipe: both chunks of a rank run half of the micro-batches each, so do their transfers."""
    model = small()
    laid = plan(model, pp=2, dp=4, m=8)
    laid = Plan.model_validate({**laid.model_dump(), "schedule": "dualpipe"})
    some = run(with_options(laid, activation_offload_layers=99), model)
    moved = 8 * kept(model)[0] / offload.PCIE5  # four layers of its own stage, four of the mirrored one
    exposed = [sum(max(moved - s, 0) for s in (stage.forward_s, stage.backward_s)) for stage in some.stages]
    assert some.breakdown_s["offload"] == pytest.approx(8 / 2 * max(exposed))


def test_offloaded_optimizer_state_moves_to_the_host() -> None:
    model = small()
    laid = plan(model, dp=8, m=8)
    whole, half = run(laid, model), run(with_options(laid, optimizer_offload_fraction=0.5), model)
    state = whole.stages[0].breakdown_bytes["optimizer"]
    assert half.stages[0].breakdown_bytes["optimizer"] == pytest.approx(state / 2, abs=1)
    assert half.host_ram_bytes == pytest.approx(8 * state / 2, abs=8)
    # 12 bytes of state a parameter; fp32 gradients down, 16-bit parameters up, 4 + 2 * 12 bytes through host memory.
    params = state / 2 / 12
    down, up = params * 4 / offload.PCIE5, params * 2 / offload.PCIE5
    update = params * 28 / offload.HOST_MEMORY_BANDWIDTH
    assert half.breakdown_s["offload"] == pytest.approx(down + update + up)
    overlapped = run(with_options(laid, optimizer_offload_fraction=0.5, optimizer_offload_overlap=True), model)
    assert overlapped.breakdown_s["offload"] == pytest.approx(max(down, update, up))
    for one in (half, overlapped):
        assert sum(one.breakdown_s.values()) == pytest.approx(one.step_time_s)


def test_the_device_does_not_update_what_the_host_does() -> None:
    """A parameter's update moves 4 + 2 * 12 + 2 bytes; zeroing, norm and clipping stay on the device."""
    model, spared = small(), []
    laid = plan(model, dp=8, m=8)
    on = device(H100, "bf16")
    params = run(laid, model).stages[0].breakdown_bytes["optimizer"] / 12
    whole = estimate(model, cluster(2), workload(), target(), laid, multipliers=(NEUTRAL,))
    for share in (0.5, 1.0):
        away = with_options(laid, optimizer_offload_fraction=share)
        found = estimate(model, cluster(2), workload(), target(), away, multipliers=(NEUTRAL,))
        spared.append(whole.breakdown_s["optimizer"] - found.breakdown_s["optimizer"])
    each = 30 / (H100.memory_bandwidth_bytes_per_s * on.fit.optimizer)
    assert spared == pytest.approx([0.5 * params * each, params * each])


@pytest.mark.parametrize(("changes", "down", "host", "up"), [
    ({}, 4, 28, 2),
    ({"gradient_dtype": "bf16"}, 2, 26, 2),
    ({"moments_dtype": "bf16"}, 4, 20, 2),
    ({"optimizer": "sgd"}, 4, 20, 2),
    ({"precision": "fp32"}, 4, 28, 4),
])  # fmt: skip
def test_the_host_moves_the_bytes_of_the_dtypes(changes: dict[str, object], down: int, host: int, up: int) -> None:
    seconds = offload.host_update_s(H100, workload(**changes), 1e9, False)
    assert seconds == pytest.approx((down + up) * 1e9 / offload.PCIE5 + host * 1e9 / offload.HOST_MEMORY_BANDWIDTH)


def test_offloaded_modules_leave_the_layer() -> None:
    model, row = mla_moe(1, 2048, 16, 8, 2, 1024, 0, 32000), (1, 1, 8, 1, 8, 1, 0, 0)
    gone = kept(model, row)[0] - kept(model, row, activation_offload_modules=("expert_fc1",))[0]
    assert gone == 2 * 2048 * 2 * 4096  # the permuted input of two experts a token


def test_chunked_loss_holds_one_chunk() -> None:
    model = small()
    laid = plan(model, dp=8, m=8)
    whole = run(laid, model).stages[0].breakdown_bytes["logits"]
    assert whole == 4 * 4096 * 32000
    chunked = run(with_options(laid, loss_chunks=8), model).stages[0].breakdown_bytes
    assert chunked["logits"] in (0, whole // 8)  # 0 where a layer's working set is now the largest


def test_gathered_parameters_that_stay() -> None:
    """16-bit parameters and 32-bit gradients of the whole model stay beside the shards."""
    model = small()
    laid = plan(model, dp=8, m=8)
    stages = tuple(stage.model_copy(update={"sharding": "fsdp"}) for stage in laid.stages)
    laid = laid.model_copy(update={"stages": stages})
    kept_whole = run(with_options(laid, reshard_after_forward=False), model).stages[0].breakdown_bytes
    sharded = run(laid, model).stages[0].breakdown_bytes
    assert kept_whole["weights"] - sharded["weights"] == pytest.approx(2 * model.total_params, rel=1e-6)
    assert kept_whole["gradients"] - sharded["gradients"] == pytest.approx(4 * model.total_params, rel=1e-6)


def test_hybrid_sharding_of_a_plan() -> None:
    model = small()
    laid = plan(model, dp=16, m=4)

    def optimizer(sharding: object) -> int:
        stages = tuple(stage.model_copy(update={"sharding": sharding}) for stage in laid.stages)
        return run(laid.model_copy(update={"stages": stages}), model).stages[0].breakdown_bytes["optimizer"]

    assert optimizer(Hsdp(hsdp=HsdpSharding(replicate=2, shard=8))) == pytest.approx(2 * optimizer("fsdp"), abs=1)


def test_gradients_without_a_buffer_use_the_room_that_activations_leave() -> None:
    static = np.array([1e9, 4e9, 6e9])
    work = memory.WORKSPACE_BYTES
    assert stage_memory.parts(static, 3e9, 0.5e9 + work, 0.0, gradient_buffer=False)["gradients"] == 0.5e9
    assert stage_memory.parts(static, 30e9, work, 0.0, gradient_buffer=False)["gradients"] == 0
    assert stage_memory.parts(static, 30e9, work, 0.0, gradient_buffer=True)["gradients"] == 4e9


def test_first_step_has_no_moments_until_its_end() -> None:
    """Adam with 12 bytes, 8 of them moments: a third of the state while activations live, all of it after."""
    parts = {"weights": 2, "gradients": 4, "optimizer": 12, "activations": 9, "logits": 0, "transient": 0, "fixed": 1}
    assert stage_memory.first_step_bytes(parts, workload()) == 20  # 2 + 4 + 4 + 9 + 1
    assert stage_memory.first_step_bytes({**parts, "activations": 1}, workload()) == 19  # 2 + 4 + 12 + 1


def test_full_recompute_is_not_offloaded_by_module() -> None:
    model = mla_moe(1, 2048, 16, 8, 2, 1024, 0, 32000)
    row = (1, 1, 8, 1, 8, 1, 0, 0)
    offloaded = kept(model, row, FULL, activation_offload_modules=("expert_fc1",))
    assert offloaded[0] == kept(model, row, FULL)[0]


def test_host_links() -> None:
    assert offload.host_link_bandwidth(H100) == offload.PCIE5
    superchip = H100.model_copy(update={"name": "GB200-186GB"})
    assert offload.host_link_bandwidth(superchip) == offload.C2C
    old = H100.model_copy(update={"name": "V100", "compute_capability": 7.0})
    assert offload.host_link_bandwidth(old) == offload.PCIE3
