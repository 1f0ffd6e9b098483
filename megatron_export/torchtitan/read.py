"""torchtitan's own configurations read: TOML, and Python by its keyword literals, never by running it."""

from __future__ import annotations

import ast
import math
import tomllib
from dataclasses import dataclass, field
from typing import Any

from meshwright.planner.rules.torchtitan_models import PYTHON_CONFIG
from meshwright.specs.errors import Fault, SpecError

from .shapes import PRESETS, Shape, base_flavor

#: Defaults of the keys that rules and plans read, for 0.2.2 (config/job_config.py) and, where equal, 0.3.0
#: (config/configs.py).
DEFAULTS: dict[str, dict[str, Any]] = {
    "training": {
        "local_batch_size": 8,
        "global_batch_size": -1,
        "seq_len": 2048,
        "mixed_precision_param": "bfloat16",
        "dtype": "float32",
    },
    "parallelism": {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": -1,
        "fsdp_reshard_after_forward": "default",
        "tensor_parallel_degree": 1,
        "enable_async_tensor_parallel": False,
        "pipeline_parallel_degree": 1,
        "module_fqns_per_model_part": None,
        "pipeline_parallel_first_stage_less_layers": 1,
        "pipeline_parallel_last_stage_less_layers": 1,
        "pipeline_parallel_layers_per_stage": None,
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_schedule_csv": "",
        "pipeline_parallel_microbatch_size": 1,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
        "expert_tensor_parallel_degree": 1,
        "expert_parallel_comm_backend": "standard",
    },
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"},
    "compile": {"enable": False, "components": ["model", "loss"], "enable_async_tensor_parallel": False},
    "model": {"name": "llama3", "flavor": "debugmodel", "converters": []},
    "checkpoint": {},
}
#: Sections of the TOML (job_config.py:915).
SECTIONS = (
    "job", "profiling", "metrics", "model", "optimizer", "lr_scheduler", "training", "parallelism", "checkpoint",
    "activation_checkpoint", "compile", "quantize", "comm", "memory_estimation", "fault_tolerance", "experimental",
    "validation", "debug",
)  # fmt: skip
#: Every key of the sections that are read (job_config.py), and those of 0.3 beside them.
_MORE = {
    "training": ("dataset", "dataset_path", "max_norm", "steps", "enable_cpu_offload", "mixed_precision_reduce",
                 "gc_freq", "gc_debug", "dataloader"),
    "parallelism": ("disable_loss_parallel", "pipeline_parallel_expert_parallel_overlap",
                    "context_parallel_load_balancer", "context_parallel_rotate_method"),
    "activation_checkpoint": ("per_op_sac_force_recompute_mm_shapes_by_fqns", "early_stop", "memory_budget",
                              "visualize_memory_budget_pareto", "preserve_rng_state", "determinism_check", "debug"),
    "compile": ("backend",),
    "model": ("hf_assets_path", "tokenizer_path", "print_after_conversion"),
}  # fmt: skip
#: PyTorch's schedules that run one stage a rank, and those that run several (SC:3627, without their case).
SINGLE, MULTI = (
    ("1f1b", "gpipe"),
    ("interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev"),
)
V_SHAPED = ("zbvzerobubble", "dualpipev")


#: Nodes of a Python file that say something, all of which know their line.
_PLACED = (ast.Call, ast.ImportFrom, ast.keyword, ast.Assign)


@dataclass(frozen=True)
class Configuration:
    """Sections of a configuration with defaults filled in, and what is wrong with its form.

    ``exact`` says that every value that matters was a literal; else ``unread`` names what was not.
    """

    version: tuple[int, ...]
    sections: dict[str, dict[str, Any]]
    faults: tuple[str, ...] = ()
    unread: tuple[str, ...] = field(default=())

    def get(self, section: str, key: str) -> Any:
        return self.sections[section][key]

    @property
    def shape(self) -> Shape | None:
        """Sizes of the preset that the configuration names; None for a flavor of the user's own."""
        return PRESETS.get((self.get("model", "name"), base_flavor(self.get("model", "flavor"))[0]))

    @property
    def attention(self) -> str:
        """Which attention the flavor runs."""
        if self.version >= PYTHON_CONFIG:
            return "flex"
        flavor, backend = base_flavor(self.get("model", "flavor"))
        big = self.get("model", "name") == "deepseek_v3" and flavor in ("16B", "236B", "671B")
        return backend or ("flex" if big or self.get("model", "name") == "gpt_oss" else "sdpa")


def read_toml(text: str) -> Configuration:
    """A TOML job configuration of torchtitan 0.2. Raises :class:`SpecError` where it is no TOML."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(Fault("", f"is no TOML: {error}")) from None
    faults = [f"section [{name}] is unknown" for name in data if name not in SECTIONS]
    given = {}
    for section, defaults in DEFAULTS.items():
        values = data.get(section, {})
        if not isinstance(values, dict):
            faults.append(f"{section} is not a section")
            values = {}
        if section in _MORE:
            known = {*defaults, *_MORE[section]} - ({"enable_async_tensor_parallel"} if section == "compile" else set())
            faults += [f"{section}.{key} is unknown" for key in values if key not in known]
        given[section] = values
    return _filled((0, 2), given, faults, ())


def read_python(text: str, version: tuple[int, ...] = (0, 3)) -> Configuration:
    """The keyword literals of a Python configuration of torchtitan 0.3: ``TrainingConfig(...)``,
    ``ParallelismConfig(...)``, ``CompileConfig(...)``, the policy of ``activation_checkpoint`` and the flavor of
    ``model_registry``. Assignments to ``config.training.KEY`` and the like come after. The module is never run.

    Raises :class:`SpecError` where it is no Python, or configures more than one trainer.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(Fault("", f"is no Python: {error}")) from None
    names = {"TrainingConfig": "training", "ParallelismConfig": "parallelism", "CompileConfig": "compile"}
    given: dict[str, dict[str, Any]] = {section: {} for section in DEFAULTS}
    unread: list[str] = []
    seen: set[str] = set()
    policies = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory_budget"}
    placed = [(node.lineno, node.col_offset, node) for node in ast.walk(tree) if isinstance(node, _PLACED)]
    for *_, node in sorted(placed, key=lambda item: item[:2]):
        if isinstance(node, ast.Call) and (section := names.get(_last(node.func))):
            if section in seen:
                raise SpecError(Fault("", f"holds more than one {_last(node.func)}; give one configuration a file"))
            seen.add(section)
            for word in node.keywords:
                _literal(given[section], word.arg, word.value, section, unread)
        elif isinstance(node, ast.Call) and _last(node.func) == "model_registry":
            flavor = node.args[0] if node.args else next((w.value for w in node.keywords if w.arg == "flavor"), None)
            if isinstance(flavor, ast.Constant):
                given["model"].setdefault("flavor", flavor.value)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchtitan.models."):
            family = str(node.module).split(".")[2]
            if family != "common":
                given["model"].setdefault("name", family)
        elif isinstance(node, ast.keyword) and node.arg == "activation_checkpoint":
            mode = "none" if isinstance(node.value, ast.Constant) else _policy(node.value, policies)
            given["activation_checkpoint"] = {"mode": mode, "selective_ac_option": "op"}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            owner = node.targets[0].value
            if isinstance(owner, ast.Attribute) and owner.attr in given:
                _literal(given[owner.attr], node.targets[0].attr, node.value, owner.attr, unread)
    if "spec.flavor" in text and '"plan"' in text:
        given["model"]["flavor"] = "plan"
    given["activation_checkpoint"].setdefault("selective_ac_option", "op")
    return _filled(version, given, [], tuple(unread))


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _policy(node: ast.expr, policies: dict[str, str]) -> str:
    words = {_last(part) for part in ast.walk(node) if isinstance(part, ast.Attribute | ast.Name)}
    return next((mode for name, mode in policies.items() if name in words), "selective")


def _literal(values: dict[str, Any], key: str | None, node: ast.expr, section: str, unread: list[str]) -> None:
    try:
        values[str(key)] = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        unread.append(f"{section}.{key}")


def _filled(
    version: tuple[int, ...], given: dict[str, dict[str, Any]], faults: list[str], unread: tuple[str, ...]
) -> Configuration:
    sections = {name: {**defaults, **given.get(name, {})} for name, defaults in DEFAULTS.items()}
    for name, defaults in DEFAULTS.items():
        for key, default in defaults.items():
            value = sections[name][key]
            if not _fits(key, value, default):
                faults.append(f"{name}.{key} cannot be {value!r}")
                sections[name][key] = default
    size = sections["parallelism"]["pipeline_parallel_microbatch_size"]
    if size < 1:
        faults.append(f"parallelism.pipeline_parallel_microbatch_size cannot be {size}")
        sections["parallelism"]["pipeline_parallel_microbatch_size"] = 1
    return Configuration(version, sections, tuple(faults), unread)


_CHOICES = {
    "mixed_precision_param": ("bfloat16", "float32"),
    "dtype": ("bfloat16", "float32"),
    "fsdp_reshard_after_forward": ("default", "always", "never"),
    "expert_parallel_comm_backend": ("standard", "deepep"),
    "mode": ("selective", "full", "memory_budget", "none"),
}


def _fits(key: str, value: Any, default: Any) -> bool:
    if key in _CHOICES:
        return value in _CHOICES[key]
    if key == "module_fqns_per_model_part":
        return value is None or (
            isinstance(value, list)
            and bool(value)
            and all(isinstance(part, list) and all(isinstance(name, str) for name in part) for part in value)
        )
    if key == "pipeline_parallel_layers_per_stage":
        return value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, int):
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, type(default))


def split_of(config: Configuration, num_layers: int, pp: int) -> tuple[list[list[str]], int, str]:
    """Module names of each stage chunk, chunks a rank, and what is wrong (PP:62-140, PP:215-300)."""
    parallel = config.sections["parallelism"]
    head = "output" if config.version < PYTHON_CONFIG else "lm_head"
    if pp == 1:
        return _even(1, num_layers, 1, 1, head)[0], 1, ""
    schedule = parallel["pipeline_parallel_schedule"].lower()
    if schedule not in (*SINGLE, *MULTI):
        return [], 1, f"schedule {parallel['pipeline_parallel_schedule']!r} is unknown"
    single = schedule in SINGLE
    first, last = (parallel[f"pipeline_parallel_{end}_stage_less_layers"] for end in ("first", "last"))
    per_stage, stages = parallel["pipeline_parallel_layers_per_stage"], pp * (1 if single else 2)
    if per_stage is not None:
        stages = math.ceil((num_layers + first + last) / per_stage)
        if stages % pp:
            return [], 1, f"{stages} stages of {per_stage} layers are not a multiple of PP {pp}"
        if single and stages != pp:
            return [], 1, f"schedule {schedule} runs one stage a rank, not {stages // pp}"
        if not single and stages < 2 * pp:
            return [], 1, f"schedule {schedule} needs two stages a rank or more"
    modules = parallel["module_fqns_per_model_part"]
    if modules is None:
        modules, fault = _even(stages, num_layers, first, last, head)
        if fault:
            return [], 1, fault
    if len(modules) % pp:
        return [], 1, f"{len(modules)} stages are not a multiple of PP {pp}"
    if single and len(modules) != pp:
        return [], 1, f"schedule {schedule} runs one stage a rank; the other {len(modules) - pp} would be left out"
    if schedule in V_SHAPED and len(modules) != 2 * pp:
        return [], 1, f"schedule {schedule} runs exactly two stages a rank, not {len(modules) // pp}"
    return modules, len(modules) // pp, ""


def _even(stages: int, layers: int, first: int, last: int, head: str) -> tuple[list[list[str]], str]:
    """torchtitan's own split: embedding and output weigh as many layers as given."""
    names = [f"layers.{index}" for index in range(layers)]
    if stages == 1:
        return [["tok_embeddings", *names, "norm", head]], ""
    each, more = divmod(layers + first + last, stages)
    if each == 0:
        return [], f"{stages} stages are more than {layers + first + last} layers and their ends"
    if max(first, last) > each:
        return [], f"the ends weigh {max(first, last)} layers, a stage has {each}"
    out, at = [], 0
    for stage in range(stages):
        count = each + (stage < more) - (first if stage == 0 else last if stage == stages - 1 else 0)
        taken = names[at : at + count]
        at += len(taken)
        out.append([*(["tok_embeddings"] * (stage == 0)), *taken, *(["norm", head] * (stage == stages - 1))])
    return out, ""
