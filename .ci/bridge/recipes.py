"""Write the recipes of Megatron-Bridge as data, read from its wheel without running it.

Usage: python .ci/bridge/recipes.py WHEEL > megatron_export/bridge/data/recipes-0.6.json

A recipe is a function ``NAME_config``. Its body is followed statement by statement: assignments of literals to
``cfg.KEY``, a base that it starts from, helpers that get ``cfg``, and ``if`` over nothing (skipped). Only settings
that a plan or its legality depends on are kept. Licence of the source: Apache-2.0.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from typing import Any

ROOTS = ("megatron/bridge/recipes/", "megatron/bridge/perf_recipes/")
KEPT = re.compile(
    r"^(model\.(tensor_model_parallel_size|pipeline_model_parallel_(size|layout)|virtual_pipeline_model_parallel_size|"
    r"context_parallel_size|expert_(model|tensor)_parallel_size|sequence_parallel|seq_length|cp_comm_type|"
    r"hierarchical_context_parallel_sizes|recompute_\w+|num_layers_in_(first|last)_pipeline_stage|num_layers|"
    r"account_for_(embedding|loss)_in_pipeline_split|moe_token_dispatcher_type|moe_flex_dispatcher_backend|"
    r"moe_shared_expert_overlap|cuda_graph_(impl|scope|modules)|use_te_rng_tracker|fine_grained_activation_offloading|"
    r"offload_modules|cpu_offloading\w*|calculate_per_token_loss|mtp_num_layers|moe_grouped_gemm|moe_permute_fusion|"
    r"cross_entropy_loss_fusion|gradient_accumulation_fusion)|"
    r"train\.(micro|global)_batch_size|dataset\.(seq_length|enable_offline_packing)|"
    r"ddp\.(overlap_\w+|use_distributed_optimizer|use_megatron_fsdp|data_parallel_sharding_strategy|bucket_size|"
    r"num_distributed_optimizer_instances|average_in_collective)|dist\.use_\w+|"
    r"optimizer\.(use_precision_aware_optimizer|optimizer_\w+|main_\w+_dtype|exp_avg\w*_dtype|"
    r"use_distributed_optimizer|overlap_cpu_optimizer_d2h_h2d)|"
    r"comm_overlap(\..*)?|mixed_precision(\..*)?|rng\.te_rng_tracker|rerun_state_machine\.check_for_nan_in_loss|peft)$"
)
PRECISIONS = {
    "bf16": "bf16_mixed",
    "fp8_cs": "bf16_with_fp8_current_scaling_mixed",
    "fp8_mx": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
ENVIRONMENT = ("CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_CPU_OFFLOAD_V1")
UNREAD = object()


class Wheel:
    """Functions and constants of the recipe modules by (module, name)."""

    def __init__(self, path: str):
        self.functions: dict[tuple[str, str], ast.FunctionDef] = {}
        self.imports: dict[str, dict[str, tuple[str, str]]] = {}
        self.constants: dict[str, dict[str, Any]] = {}
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if name.startswith(ROOTS) and name.endswith(".py"):
                    self._module(name[:-3].replace("/", ".").removesuffix(".__init__"), ast.parse(archive.read(name)))

    def _module(self, module: str, tree: ast.Module) -> None:
        names = self.imports[module] = {}
        constants = self.constants[module] = {}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                self.functions[module, node.name] = node
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                constants[ast.unparse(target)] = value_of(node.value, {})

    def find(self, module: str, name: str) -> tuple[str, ast.FunctionDef] | None:
        """A function by the name that a module knows it by, through its imports."""
        for _ in range(8):
            if (module, name) in self.functions:
                return module, self.functions[module, name]
            if name not in self.imports.get(module, {}):
                return None
            module, name = self.imports[module][name]
        return None

    def constant(self, module: str, name: str) -> Any:
        """Value of a module's constant, through its imports."""
        for _ in range(8):
            if name in self.constants.get(module, {}):
                return self.constants[module][name]
            if name not in self.imports.get(module, {}):
                return UNREAD
            module, name = self.imports[module][name]
        return UNREAD


def value_of(node: ast.expr, names: dict[str, Any]) -> Any:
    """A literal, a known name, ``torch.DTYPE`` or a recipe of precision by its name; else UNREAD."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        pass
    if isinstance(node, ast.Name):
        return names.get(node.id, UNREAD)
    if isinstance(node, ast.Attribute):
        text = ast.unparse(node)
        return node.attr if text.startswith("torch.") else names.get(text, UNREAD)
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name.endswith("_mixed"):
            return name
        if name == "get_mixed_precision_config":
            return value_of(node.args[0], names)
        if name == "_perf_precision":
            return PRECISIONS.get(str(value_of(node.args[0], names)), UNREAD)
    return UNREAD


class Run:
    """One recipe being followed."""

    def __init__(self, wheel: Wheel):
        self.wheel, self.settings, self.model, self.depth = wheel, {}, None, 0
        self.unread: set[str] = set()

    def call(self, module: str, function: ast.FunctionDef, bound: dict[str, Any]) -> None:
        """Follow a function; ``bound`` holds the arguments that are known."""
        self.depth += 1
        names = dict(bound)
        arguments = function.args
        defaults = zip(arguments.args[len(arguments.args) - len(arguments.defaults) :], arguments.defaults, strict=True)
        for argument, default in (*defaults, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)):
            if default is not None:
                names.setdefault(argument.arg, value_of(default, names))
        if self.depth < 12:
            self.block(module, function.body, names)
        self.depth -= 1

    def block(self, module: str, body: list[ast.stmt], names: dict[str, Any]) -> None:
        for node in body:
            if isinstance(node, ast.Assign):
                self.assign(module, node, names)
            elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or (
                isinstance(node, ast.Return) and isinstance(node.value, ast.Call)
            ):
                self.follow(module, node.value, names)

    def assign(self, module: str, node: ast.Assign, names: dict[str, Any]) -> None:
        for target in node.targets:
            key = ast.unparse(target)
            if key in ("cfg", "config") and isinstance(node.value, ast.Call):
                self.follow(module, node.value, names)
            elif key == "cfg.model" or (key.endswith("provider") and isinstance(node.value, ast.Call)):
                found = re.search(r"from_hf_pretrained\(\s*([^,)]+)", ast.unparse(node.value))
                if found:
                    self.model = self.value(module, ast.parse(found[1], mode="eval").body, names) or self.model
                elif isinstance(node.value, ast.Call):
                    self.follow(module, node.value, names)
            elif re.fullmatch(r"cfg(\.\w+)+", key):
                self.set(module, key[4:], node.value, names)
            elif isinstance(target, ast.Name):
                names[key] = self.value(module, node.value, names)

    def set(self, module: str, key: str, node: ast.expr, names: dict[str, Any]) -> None:
        if isinstance(node, ast.Call) and key == "comm_overlap":
            self.settings = {k: v for k, v in self.settings.items() if not k.startswith("comm_overlap")}
            for word in node.keywords:
                self.set(module, f"comm_overlap.{word.arg}", word.value, names)
            return
        if key == "env_vars" and isinstance(node, ast.Dict):
            for name, value in zip(node.keys, node.values, strict=True):
                if isinstance(name, ast.Constant) and name.value in ENVIRONMENT:
                    self.settings[f"env_vars.{name.value}"] = value_of(value, {})
            return
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("cfg."):
            value = self.settings.get(ast.unparse(node)[4:], UNREAD)
        else:
            value = self.value(module, node, names)
        if not KEPT.match(key):
            return
        if key == "mixed_precision":
            self.settings = {k: v for k, v in self.settings.items() if not k.startswith("mixed_precision")}
        if value is UNREAD:
            self.unread.add(key)
            self.settings.pop(key, None)
        else:
            self.unread.discard(key)
            self.settings[key] = list(value) if isinstance(value, tuple) else value

    def value(self, module: str, node: ast.expr, names: dict[str, Any]) -> Any:
        found = value_of(node, names)
        return self.wheel.constant(module, node.id) if found is UNREAD and isinstance(node, ast.Name) else found

    def follow(self, module: str, node: ast.Call, names: dict[str, Any]) -> None:
        name = ast.unparse(node.func)
        if name == "apply_flex_dispatcher_backend":  # bridge/training/flex_dispatcher_backend.py
            backend = self.value(module, node.args[1], names) if len(node.args) > 1 else None
            if isinstance(backend, str):
                self.settings |= {"model.moe_token_dispatcher_type": "flex", "model.moe_shared_expert_overlap": False}
                self.settings["model.moe_flex_dispatcher_backend"] = backend
            return
        found = self.wheel.find(module, name)
        if found is None:
            return
        where, function = found
        if function.name == "_benchmark_common":  # its branches on CUDA graphs, which are not followed
            graphs = self.settings.get("model.cuda_graph_impl") not in (None, "none")
            self.settings["model.use_te_rng_tracker"] = graphs
        if function.name == "set_deepseek_v3_pipeline_model_parallel_layout" and len(node.args) == 1:
            self.unread.add("model.pipeline_model_parallel_layout")
            self.settings.pop("model.pipeline_model_parallel_layout", None)
            return
        if function.name == "set_deepseek_v3_pipeline_model_parallel_layout":
            self.set(module, "model.pipeline_model_parallel_layout", node.args[1], names)
            return
        bound = {
            argument.arg: self.value(module, value, names)
            for argument, value in zip(function.args.args, node.args, strict=False)
        }
        bound |= {word.arg: self.value(module, word.value, names) for word in node.keywords if word.arg}
        self.call(where, function, {name: value for name, value in bound.items() if value is not UNREAD})


def says_something(key: str, value: Any) -> bool:
    """Whether a setting differs from what its absence means."""
    on_by_default = key.startswith(("ddp.overlap", "ddp.use_dist", "ddp.average", "comm_overlap.", "rerun"))
    return (value not in (None, False, [], "none", "float32") or on_by_default or key == "mixed_precision") and (
        key != "model.cuda_graph_scope" or value != "full"
    )


def main(path: str) -> None:
    wheel = Wheel(path)
    recipes: dict[str, Any] = {}
    for (module, name), function in sorted(wheel.functions.items(), key=lambda item: item[0][::-1]):
        if not name.endswith("_config") or name.startswith("_") or name in recipes:
            continue
        run = Run(wheel)
        run.call(module, function, {})
        if not any(key.startswith(("model.", "train.")) for key in run.settings):
            continue
        gpus = re.search(r"_(\d+)gpu_", name)
        recipes[name] = {
            "model": run.model if isinstance(run.model, str) else None,
            "num_gpus": int(gpus[1]) if gpus else None,
            "settings": {key: value for key, value in sorted(run.settings.items()) if says_something(key, value)},
            **({"unread": sorted(run.unread)} if run.unread else {}),
        }
    head = {"source": "megatron-bridge 0.6.2, Apache-2.0, recipes and perf_recipes", "recipes": recipes}
    json.dump(head, sys.stdout, indent=None, separators=(",", ":"), sort_keys=False)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
