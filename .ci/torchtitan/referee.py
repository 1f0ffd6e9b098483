"""Ask torchtitan's own code whether it builds a configuration, or let it train one.

Usage: VENV/bin/python .ci/torchtitan/referee.py < requests.jsonl > verdicts.jsonl
       torchrun --nproc-per-node N .ci/torchtitan/referee.py --train ARGUMENTS OF torchtitan.train

A request is a JSON object a line: ``folder`` with ``train.toml`` (0.2) or ``plan_config.py`` (0.3), ``world_size``,
and ``rank`` (default 0). A verdict has ``ok``, ``error``, ``where``, and when accepted ``dims`` of ParallelDims,
``layers`` of each model part of the rank, ``heads`` (whether a part holds embedding or output), ``parameters`` of the
parts before sharding and ``micro_batches``. The model stays on the meta device; it stops before the optimizer.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import sys
import traceback
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import shims  # patches torch, so that it comes before torchtitan
import torch
import torch.distributed
import torchtitan

PYTHON_CONFIG = (pathlib.Path(torchtitan.__file__).parent / "trainer.py").exists()
if PYTHON_CONFIG:
    from torchtitan.trainer import Trainer
else:
    from torchtitan.train import Trainer


class BuiltError(Exception):
    """Raised where the optimizer would be built: the model stands."""


def stop(*args: Any, **kwargs: Any) -> Any:
    raise BuiltError


def judge(request: dict[str, Any]) -> dict[str, Any]:
    """The verdict on one request."""
    verdict: dict[str, Any] = {"name": request.get("name"), "ok": False, "error": None}
    os.environ["NGPU"] = os.environ["WORLD_SIZE"] = str(request["world_size"])
    rank = int(request.get("rank", 0))
    os.environ["RANK"] = str(rank)
    folder = request["folder"]
    sys.path.insert(0, folder)
    output = io.StringIO()
    trainer = Trainer.__new__(Trainer)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            torch.distributed.init_process_group("fake", rank=rank, world_size=request["world_size"])
            try:
                Trainer.__init__(trainer, configuration(folder))
            except BuiltError:
                verdict |= {"ok": True, **built(trainer)}
    except SystemExit:
        verdict["error"] = output.getvalue()[-500:]
    except Exception as error:
        verdict["error"] = f"{type(error).__name__}: {error}"[:500]
        where = traceback.extract_tb(error.__traceback__)[-1]
        verdict["where"] = f"{pathlib.Path(where.filename).name}:{where.lineno}"
    finally:
        sys.path.remove(folder)
        forget()
    return verdict


def forget() -> None:
    """Undo what a configuration left behind."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in ("plan_model", "plan_config"):
        sys.modules.pop(name, None)
    if not PYTHON_CONFIG:
        from torchtitan.protocols import train_spec

        train_spec._extra_train_specs.clear()


def configuration(folder: str) -> Any:
    """The configuration in ``folder``, read by torchtitan's own manager."""
    from torchtitan.config import ConfigManager

    manager = ConfigManager()
    if PYTHON_CONFIG:
        return manager.parse_args(["--module", "plan_config", "--config", "plan"])
    return manager.parse_args(["--job.config_file", f"{folder}/train.toml"])


def built(trainer: Any) -> dict[str, Any]:
    """What the trainer stands for."""
    dims, parts = trainer.parallel_dims, trainer.model_parts
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
    schedule = getattr(trainer, "pp_schedule", None)
    return {
        "dims": {name: getattr(dims, name) for name in names},
        "layers": [[int(name) for name, _ in part.layers.named_children()] for part in parts],
        "heads": [
            [part.tok_embeddings is not None, getattr(part, "lm_head", getattr(part, "output", None)) is not None]
            for part in parts
        ],
        "parameters": sum(each.numel() for each in {id(p): p for part in parts for p in part.parameters()}.values()),
        "micro_batches": trainer.gradient_accumulation_steps * (schedule._n_microbatches if schedule else 1),
    }


def tie(self: Any, *args: Any, **kwargs: Any) -> None:
    """What is left of ``init_weights`` on the meta device."""
    if getattr(self.model_args, "enable_weight_tying", False):
        self.output.weight = self.tok_embeddings.weight


def watch() -> None:
    """Keep models on the meta device and stop before the optimizer."""
    torch.nn.Module.to_empty = lambda self, *, device, recurse=True: self  # type: ignore[method-assign]
    if PYTHON_CONFIG:
        from torchtitan.components.optimizer import OptimizersContainer
        from torchtitan.models.common.decoder import Decoder

        OptimizersContainer.Config.build = stop
        Decoder.init_weights = Decoder.init_states = lambda self, **kwargs: None
        return
    from torchtitan.protocols import train_spec

    original = train_spec.get_train_spec

    def quiet(name: str) -> Any:
        from dataclasses import replace

        spec = original(name)
        spec.model_cls.init_weights = tie
        return replace(spec, build_optimizers_fn=stop)

    train_spec.get_train_spec = quiet


def train() -> None:
    """One rank of a real run."""
    from torchtitan.train import main

    if PYTHON_CONFIG:
        main()
    else:
        main(Trainer)


if __name__ == "__main__":
    if shims.TRAINS:
        train()
    else:
        watch()
        for line in sys.stdin:
            print(json.dumps(judge(json.loads(line))), flush=True)
