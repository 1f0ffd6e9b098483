"""Files that start a plan on Megatron-Bridge: its settings as overrides, a program that builds the rest around them."""

from __future__ import annotations

import json

from meshwright.specs.document import PlanDocument
from meshwright.specs.plan import Plan

from ..launch import NO_SITE, Hosts, Program, Site, launch_files, legal_nodes, plan_in, require_launcher
from ..launch.shell import comment, exports, plain
from ..megatron import environment_of
from .overrides import format_value
from .precisions import RECIPE_OF
from .settings import bridge_settings, layer_spec_of, provider_of

#: ``train.py`` beside the scripts; NVIDIA's NeMo containers hold Megatron-Bridge.
PROGRAM = Program(
    name="bridge",
    command='"$here/train.py"',
    image="BRIDGE_IMAGE",  # with Megatron-Bridge, megatron-core and Transformer Engine
)

_SPECS = {
    "default": ("", ""),
    "block": (
        "from functools import partial\n\n",
        "\n        # One spec a layer: dense and expert layers, and the layers of multi-token prediction, differ.\n"
        "        transformer_layer_spec=partial(get_gpt_decoder_block_spec, use_transformer_engine=True),",
    ),
    "experimental": (
        "",
        "\n        transformer_layer_spec=get_transformer_block_with_experimental_attention_variant_spec,",
    ),
}
_IMPORTS = {
    "default": "",
    "block": "from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec\n",
    "experimental": (
        "from megatron.core.models.gpt.experimental_attention_variant_module_specs import (\n"
        "    get_transformer_block_with_experimental_attention_variant_spec,\n)\n"
    ),
}

_TRAIN = '''\
"""{title}

Model, degrees and numerics stand in overrides.txt beside this file; arguments KEY=VALUE come after them and win.
Data and tokenizer are placeholders: mock data, no vocabulary file.
"""

{functools}import sys
from pathlib import Path

import torch
{core}from megatron.bridge.models.{module} import {provider}
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.mixed_precision import get_mixed_precision_config
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

TRAIN_ITERS = 20
#: Numerics that overrides.txt refines; None = fp32.
PRECISION = {precision!r}


def base_config() -> ConfigContainer:
    """Everything that the plan does not decide."""
    model = {provider}(
        num_layers=1,
        hidden_size={hidden},
        num_attention_heads=1,{spec}
        attention_dropout=0.0,
        hidden_dropout=0.0,
        pipeline_dtype={dtype},
    )
    return ConfigContainer(
        model=model,
        train=TrainingConfig(train_iters=TRAIN_ITERS, global_batch_size=1, micro_batch_size=1),
        validation=ValidationConfig(eval_interval=TRAIN_ITERS, eval_iters=0),
        optimizer=OptimizerConfig(optimizer="adam", lr=1e-4, min_lr=1e-5, bf16={bf16}, fp16={fp16}),
        scheduler=SchedulerConfig(lr_decay_style="cosine", lr_warmup_iters=2, lr_decay_iters=TRAIN_ITERS),
        ddp=DistributedDataParallelConfig(check_for_nan_in_grad=False, grad_reduce_in_fp32=True),
        dataset=MockGPTDatasetConfig(
            seq_length={seq_length},
            random_seed=1234,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            dataloader_type="single",
            split="9999,8,2",
        ),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size={vocab}),
        checkpoint=CheckpointConfig(save=None, load=None),
        rng=RNGConfig(seed=1234),
        dist=DistributedInitConfig(),
        comm_overlap=CommOverlapConfig(tp_comm_overlap=False),
        mixed_precision=None if PRECISION is None else get_mixed_precision_config(PRECISION),
    )


def plan_config(arguments: list[str]) -> ConfigContainer:
    """The whole configuration: base, plan, arguments."""
    lines = Path(__file__).with_name("overrides.txt").read_text(encoding="utf-8").splitlines()
    overrides = [line for line in lines if line and not line.startswith("#")]
    return process_config_with_overrides(base_config(), cli_overrides=[*overrides, *arguments])


if __name__ == "__main__":
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    pretrain(config=plan_config(sys.argv[1:]), forward_step_func=forward_step)
'''


def export_bridge(
    document: PlanDocument, launcher: str = "torchrun", hosts: Hosts | None = None, site: Site = NO_SITE
) -> dict[str, str]:
    """File name to text: overrides, training program, environment, launch scripts, host file, README, the plan.

    ``hosts`` names the plan's nodes in rank order, or maps hosts to pools or GPU types; ``site`` adds what the launch
    scripts need. Raises :class:`SpecError` for a document without a plan, an unknown
    launcher, a plan that the target refuses (each broken rule is a fault), or devices that cannot be launched.
    """
    inputs, plan = document.inputs, plan_in(document)
    require_launcher(launcher)
    nodes = legal_nodes(document, hosts)
    return {
        "overrides.txt": overrides_text(document),
        "train.py": train_program(document),
        "env.sh": _environment(document, plan),
        **launch_files(inputs.model.name, nodes, PROGRAM, launcher, site),
        "README.md": _readme(document, plan, launcher, known=all(node.known for node in nodes)),
        "plan.json": json.dumps(document.to_json(), indent=2, ensure_ascii=False) + "\n",
    }


def overrides_text(document: PlanDocument) -> str:
    """``overrides.txt``: one Hydra override a line, sections as comments."""
    lines = [comment(f"Megatron-Bridge settings of {document.inputs.model.name}. One override a line.")]
    for title, settings in bridge_settings(document).items():
        lines += ["", comment(title), *(f"{key}={format_value(value)}" for key, value in settings.items())]
    return "\n".join(lines) + "\n"


def train_program(document: PlanDocument) -> str:
    """``train.py``: a configuration on mock data with a null tokenizer, and Bridge's pretraining loop."""
    model, work = document.inputs.model, document.inputs.workload
    provider, kind = provider_of(model), layer_spec_of(model)
    dtypes = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}
    half = work.precision if work.precision in ("fp16", "fp32") else "bf16"
    return _TRAIN.format(
        title=f"Train {plain(model.name)} on Megatron-Bridge by a plan of Meshwright.",
        functools=_SPECS[kind][0].rstrip("\n") + "\n" if _SPECS[kind][0] else "",
        core=_IMPORTS[kind],
        module={"MLAModelProvider": "mla_provider", "GPTModelProvider": "gpt_provider"}[provider],
        provider=provider,
        precision=RECIPE_OF.get(work.precision),
        hidden=model.hidden_size,
        spec=_SPECS[kind][1],
        dtype=dtypes[half],
        bf16=half == "bf16",
        fp16=half == "fp16",
        seq_length=work.seq_length,
        vocab=model.vocab_size,
    )


def _environment(document: PlanDocument, plan: Plan) -> str:
    environment = environment_of(plan, document.inputs.cluster)
    return "# shellcheck shell=bash\n" + (exports(environment) or "# Nothing to set for this plan.\n")


def _readme(document: PlanDocument, plan: Plan, launcher: str, *, known: bool) -> str:
    inputs, degrees = document.inputs, plan.stages[0].degrees
    start = {
        "torchrun": "bash launch_torchrun.sh        # on every node",
        "slurm": "sbatch job.sbatch              # from this folder",
        "ssh": "bash launch_ssh.sh             # from a node that reaches all hosts",
        "kubernetes": "kubectl apply -f jobset.yaml   # after the two steps named in its first lines",
    }.get(launcher, "bash launch_torchrun.sh")
    lines = [
        f"# {plain(inputs.model.name)} on {plain(inputs.cluster.name)}, Megatron-Bridge {inputs.target.version}",
        "",
        f"TP {degrees.tp}, PP {plan.pp} (virtual stages {plan.vpp}), CP {degrees.cp}, DP {degrees.dp}, "
        f"EP {degrees.ep}, ETP {degrees.etp}; micro-batch {plan.stages[0].micro_batch_size}, "
        f"{plan.num_microbatches} micro-batches a step; {plan.num_ranks} ranks.",
        "",
        "```",
        start,
        "```",
        "",
        "| file | is |",
        "|---|---|",
        "| `overrides.txt` | model and plan, one `KEY=VALUE` a line, as Bridge's own scripts take them |",
        "| `train.py` | builds the configuration around them: mock data, null tokenizer, 20 steps |",
        "| `env.sh` | environment that the plan needs |",
        "| `hostfile` | hosts in plan order; the order decides which GPUs run which stage |",
        "| `launch_torchrun.sh` | starts one node, found by its name in `hostfile` or by `NODE_RANK` |",
        "| `plan.json` | the plan document |",
        "",
        "Arguments after the script are overrides and win: `bash launch_torchrun.sh train.train_iters=100`.",
        "To change a recipe instead, give it the lines of `overrides.txt` but those under Model:",
        "`grep -v '^#' overrides.txt`.",
        "",
        "The plan does not hold rotary base and scaling, initialisation, norm epsilon and router losses: they change",
        "no cost, set them for a real run.",
    ]
    if not known:
        lines += [
            "",
            "Host names were not known: replace the placeholders in `hostfile`, keeping the order of GPU types.",
        ]
    return "\n".join(lines) + "\n"
