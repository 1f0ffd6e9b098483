"""Reading argument lists: the same flags from a line, a script and YAML; faults for everything the parser refuses."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.megatron_export.megatron import (
    check_arguments,
    model_from_arguments,
    plan_from_arguments,
    read_arguments,
    workload_from_arguments,
)
from meshwright.megatron_export.megatron.flags import load_flags
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.errors import SpecError

SCRIPT = r"""#!/bin/bash
# Train (a comment with a bracket)
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=4
NUM_LAYERS=${NUM_LAYERS:-32}
MODEL_ARGS=(
    --num-layers $NUM_LAYERS
    --hidden-size 4096  # width (of the residual)
    --swiglu
    --pipeline-model-parallel-layout 'Et*15|t*17L'
)
PARALLEL_ARGS="
    --tensor-model-parallel-size ${TP} \
    --sequence-parallel
"
torchrun --nproc-per-node 8 pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    $PARALLEL_ARGS --lr=3e-4 "$@"
"""


def faults(source):
    with pytest.raises(SpecError) as caught:
        read_arguments(source)
    return caught.value.faults


def test_a_line_gives_values_by_destination_and_the_parsers_defaults():
    args = read_arguments("--num-layers 4 --bf16 --no-rope-fusion --recompute-modules moe mlp --lr=1e-4")
    assert args["num_layers"] == 4
    assert args["bf16"] is True
    assert args["apply_rope_fusion"] is False
    assert args["recompute_modules"] == ["moe", "mlp"]
    assert args["lr"] == 1e-4
    assert args["transformer_impl"] == "transformer_engine"
    assert "bf16" in args
    assert "fp16" not in args


def test_a_script_is_read_with_its_variables_arrays_and_exports():
    args = read_arguments(SCRIPT)
    assert dict(args.given) == {
        "num_layers": 32,
        "hidden_size": 4096,
        "swiglu": True,
        "pipeline_model_parallel_layout": "Et*15|t*17L",
        "tensor_model_parallel_size": 4,
        "sequence_parallel": True,
        "lr": 3e-4,
    }
    assert args.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_yaml_means_the_same_as_the_line():
    flags = "--num-layers: 4\n  bf16: true\n  fp16: false\n  recompute-modules: [moe, mlp]"
    text = f"MODEL_ARGS:\n  {flags}\nENV_VARS:\n  A: 1\n"
    line = "--num-layers 4 --bf16 --recompute-modules moe mlp"
    assert read_arguments(text).given == read_arguments(line).given
    assert read_arguments(text).environment == {"A": "1"}


def test_the_last_of_repeated_flags_counts():
    assert read_arguments("--num-layers 4 --num-layers 8")["num_layers"] == 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("([0]*3+[1]*2)", [0, 0, 0, 1, 1]),
        ("[0,1]*2", [0, 1, 0, 1]),
        ("([1]*2+[0])*2", [1, 1, 0, 1, 1, 0]),
        ("2", 2),
    ],
)
def test_layer_patterns_are_evaluated(text, expected):
    assert read_arguments(["--moe-layer-freq", text])["moe_layer_freq"] == expected


@pytest.mark.parametrize(
    ("source", "pointer", "words"),
    [
        ("--tensor-parallel-size 4", "/--tensor-parallel-size", "is not a Megatron argument"),
        ("--num-lay 4", "/--num-lay", "is not a Megatron argument"),  # no abbreviations
        ("--num-layers four", "/--num-layers", "whole number, got 'four'"),
        ("--num-layers", "/--num-layers", "needs a value"),
        ("--num-layers 4.5", "/--num-layers", "whole number"),
        ("--bf16=1", "/--bf16", "takes no value"),
        ("--bf16 true", "", "'true' belongs to no flag"),
        ("--normalization BatchNorm", "/--normalization", "must be one of LayerNorm, RMSNorm"),
        ("--rampup-batch-size 1 2", "/--rampup-batch-size", "needs 3 values, got 2"),
        ("--moe-layer-freq '[0]*9999999999'", "/--moe-layer-freq", "is not a list expression"),
        ("--moe-layer-freq '[__import__(1)]'", "/--moe-layer-freq", "must be a list expression"),
        ("--lr '1e-4", "", "cannot split"),
        ("--num-layers 99999999999999999999", "/--num-layers", "too large"),
        ("a: [1", "", "not valid YAML at line 1"),
        ("#!/bin/bash\npython pretrain_gpt.py --num-layers $LAYERS\n", "", "does not set $LAYERS"),
    ],
)
def test_one_clear_fault(source, pointer, words):
    (fault,) = faults(source)
    assert fault.pointer == pointer
    assert words in fault.message


def test_near_names_are_offered():
    (fault,) = faults("--tensor-model-paralel-size 4")
    assert fault.alternatives[0] == "--tensor-model-parallel-size"


def test_every_fault_is_reported():
    assert [fault.pointer for fault in faults("--foo 1 2 --num-layers x --bar --bf16")] == [
        "/--foo",
        "/--num-layers",
        "/--bar",
    ]


def test_a_huge_text_is_refused_unread():
    (fault,) = faults("--num-layers 4 " * 100_000)
    assert "characters long" in fault.message


WORDS = "parallel|moe|layer|batch|head|size|recomp|cp-|fsdp|seq|overlap|dtype|latent|freq|graph|offload|window|mtp"
RELEVANT = [flag for name, flag in sorted(load_flags().items()) if re.search(WORDS, name)]
TEXTS = {
    "int": st.sampled_from(["-1", "0", "1", "2", "3", "8", "4096", "9007199254740991"]),
    "float": st.sampled_from(["-1", "0", "1.5", "nan", "1e308"]),
    "pattern": st.sampled_from(["0", "1", "3", "[0,1]*2", "[1]*4", "[0]*5", "([1]*2+[0]*2)", "[]"]),
    "tuple": st.sampled_from(["127,0", "(1,2)", "7"]),
    "str": st.sampled_from(["Et*2|t*2L", "E(t|)*4L", "M*M-", "x", ""]),
}


def words_of(flag):
    """The flag with values that its parser may take."""
    if flag.kind == "switch":
        return st.just([flag.name])
    one = (
        st.sampled_from([str(choice) for choice in flag.choices])
        if flag.choices
        else TEXTS.get(flag.kind, st.just("1"))
    )
    count = flag.nargs if isinstance(flag.nargs, int) else 1
    return st.lists(one, min_size=count, max_size=count).map(lambda values: [flag.name, *values])


@settings(max_examples=400)
@given(st.lists(st.sampled_from(RELEVANT).flatmap(words_of), max_size=6), st.sampled_from([0, 1, 8, 2**40]))
def test_any_arguments_get_a_verdict_and_a_plan_or_faults(flags, world_size):
    base = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
    line = [
        *base.split(),
        "--micro-batch-size",
        "1",
        "--vocab-size",
        "100",
        *(word for words in flags for word in words),
    ]
    broken = check_arguments(line, world_size)
    assert all(item.rule.startswith("megatron.") and item.message for item in broken)
    if broken or not 1 <= world_size <= 8:
        return
    args = read_arguments(line)
    try:
        model = model_from_arguments(args)
        workload_from_arguments(args, world_size)
    except SpecError:
        return
    found = plan_from_arguments(args, model, load_cluster("8xH100"), world_size)
    assert found.num_ranks == world_size
