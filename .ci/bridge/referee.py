"""Ask Megatron-Bridge's own code whether it accepts a configuration.

Usage: VENV/bin/python .ci/bridge/referee.py < requests.jsonl > verdicts.jsonl

A request is a JSON object a line: ``train`` (text of an export's train.py), ``overrides`` (text of its overrides.txt),
``arguments`` (further overrides), ``world_size``, optional ``env`` and ``sm`` (default 9.0). Bridge's override parser,
``runtime_config_update`` (precision, communication overlap, ``ConfigContainer.validate`` with the post-initialisation
of megatron-core's classes) and megatron-core's rank arithmetic run; no model is built. A verdict has ``ok``, ``step``,
``error``, and when accepted ``derived``: degrees, virtual stages, decoder layers of every stage chunk.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import sys
import tempfile
import traceback
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import importlib.util

_spec = importlib.util.spec_from_file_location("bridge_shims", pathlib.Path(__file__).with_name("shims.py"))
assert _spec is not None
assert _spec.loader is not None
shims = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shims)

ENVIRONMENT = ("CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_CPU_OFFLOAD_V1")


def judge(request: dict[str, Any]) -> dict[str, Any]:
    """The verdict on one request."""
    verdict: dict[str, Any] = {"name": request.get("name"), "ok": False, "step": "build", "error": None}
    for name in ENVIRONMENT:
        os.environ.pop(name, None)
    os.environ |= {name: value for name, value in request.get("env", {}).items() if value}
    os.environ |= {"WORLD_SIZE": str(request["world_size"]), "RANK": "0"}
    shims.core.set_gpu(float(request.get("sm", 9.0)))
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            verdict["derived"] = examine(request, verdict)
        verdict |= {"ok": True, "step": "done"}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        verdict["error"] = f"{type(error).__name__}: {error}"
        verdict["where"] = f"{pathlib.Path(where.filename).name}:{where.lineno}"
    return verdict


def examine(request: dict[str, Any], verdict: dict[str, Any]) -> dict[str, Any]:
    """Run Bridge's checks in its own order, naming the step in ``verdict``; return what it derived."""
    from megatron.bridge.training.config import runtime_config_update

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "train.py")
        path.write_text(request["train"], encoding="utf-8")
        path.with_name("overrides.txt").write_text(request["overrides"], encoding="utf-8")
        namespace: dict[str, Any] = {"__name__": "export", "__file__": str(path)}
        exec(compile(request["train"], str(path), "exec"), namespace)  # noqa: S102 - the export under test
        verdict["step"] = "overrides"
        config = namespace["plan_config"](request.get("arguments", []))
    verdict["step"] = "validate"
    runtime_config_update(config)
    verdict["step"] = "groups"
    model = config.model
    groups(model, request["world_size"])
    return {
        "dp": config.data_parallel_size,
        "vpp": model.virtual_pipeline_model_parallel_size or 1,
        "etp": model.expert_tensor_parallel_size,
        "micro_batch_size": config.train.micro_batch_size,
        "global_batch_size": config.train.global_batch_size,
        "sequence_parallel": model.sequence_parallel,
        "precision": [model.bf16, model.fp16, model.fp8, model.fp8_recipe if model.fp8 else None],
        "overlap": [config.ddp.overlap_grad_reduce, config.ddp.overlap_param_gather, model.overlap_p2p_comm],
        "layers": layers(model),
        "mlp": [model.ffn_hidden_size, model.gated_linear_unit, getattr(model.activation_func, "__name__", None)],
        "vocab_size": model.vocab_size,
    }


def groups(model: Any, world_size: int) -> None:
    """The expert grid, which megatron-core checks when it forms process groups (parallel_state.py:881)."""
    size = (
        (model.expert_tensor_parallel_size or model.tensor_model_parallel_size)
        * model.expert_model_parallel_size
        * model.pipeline_model_parallel_size
    )
    assert world_size % size == 0, f"world_size {world_size} is not divisible by ETP x EP x PP {size}"


def layers(model: Any) -> list[list[int]]:
    """Decoder layers of every [stage][chunk]."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    chunks = model.virtual_pipeline_model_parallel_size
    if model.pipeline_model_parallel_layout is not None:
        return [
            [chunk.count(LayerType.decoder) for chunk in stage] for stage in model.pipeline_model_parallel_layout.layout
        ]
    return [
        [
            get_num_layers_to_build(model, vp_stage=chunk if chunks else None, pp_rank=stage)
            for chunk in range(chunks or 1)
        ]
        for stage in range(model.pipeline_model_parallel_size)
    ]


def main() -> None:
    shims.install()
    for line in sys.stdin:
        if line.strip():
            sys.stdout.write(json.dumps(judge(json.loads(line))) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
