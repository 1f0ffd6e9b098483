"""Write megatron_export/megatron/data/flags-VERSION.json from the parser of an installed megatron-core.

Usage: VENV/bin/python .ci/megatron/dump_flags.py 0.19 > megatron_export/megatron/data/flags-0.19.json

The newest release is written in full, an older one as what differs from it. The wheel of 0.16 has no parser: its flags
are those of 0.17 without the ones made from configuration fields that 0.16 does not have, and with two it still had.
"""

from __future__ import annotations

import argparse
import ast
import enum
import json
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import shims


def describe(action: argparse.Action) -> dict[str, Any]:
    """One flag. ``kind`` says how its values are read; ``constant`` is what a flag without values stores."""
    row: dict[str, Any] = {"dest": action.dest, "default": plain(action.default)}
    negative = [name for name in action.option_strings[1:] if name.startswith("--no-")]
    if isinstance(action, argparse.BooleanOptionalAction):
        row["negated"] = negative
    elif len(action.option_strings) > 1:
        row["aliases"] = action.option_strings[1:]
    if action.nargs == 0:
        row["kind"] = "switch"
        row["constant"] = True if "negated" in row else plain(action.const)
    else:
        kind = action.type
        row["kind"] = getattr(kind, "__name__", "str") if kind is not None else "str"
        row["kind"] = {"enum_type_handler": "str", "<lambda>": "str", "tuple_type": "tuple"}.get(
            row["kind"], row["kind"]
        )
        if row["kind"].endswith("_freq_type"):
            row["kind"] = "pattern"
        if row["kind"].startswith("_parse_"):
            row["kind"] = "str"
        if isinstance(action, argparse._AppendAction):
            row["repeat"] = True
        if action.nargs is not None:
            row["nargs"] = action.nargs
        if action.choices is not None:
            row["choices"] = [plain(choice) for choice in action.choices]
    return row


def plain(value: Any) -> Any:
    """A JSON value; enums and dtypes become their name."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)


def flags_of_parser() -> dict[str, Any]:
    """Every flag of the release that is in use."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags: dict[str, Any] = {}
    for action in parser._actions:
        if action.option_strings and action.dest != "help":
            long = [name for name in action.option_strings if name.startswith("--")]
            flags[(long or action.option_strings)[0]] = describe(action)
    return dict(sorted(flags.items()))


def fields(core: pathlib.Path) -> set[str]:
    """Names of the fields of a release's configuration classes, from which 0.17 makes most of its flags."""
    names = set()
    for file in (
        "transformer/transformer_config.py",
        "model_parallel_config.py",
        "optimizer/optimizer_config.py",
        "distributed/distributed_data_parallel_config.py",
    ):
        classes = [node for node in ast.parse((core / file).read_text()).body if isinstance(node, ast.ClassDef)]
        lines = [line for node in classes for line in node.body]
        names |= {
            line.target.id for line in lines if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        }
    return names


def flags_of_0_16(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags of 0.16, from those of 0.17."""
    folder = pathlib.Path(sys.prefix, "megatron-core")
    older, newer = (fields(folder / version / "megatron/core") for version in ("0.16", "0.17"))
    kept = {name: row for name, row in flags.items() if row["dest"] not in newer - older}
    for name in ("moe_extended_tp", "moe_use_legacy_grouped_gemm"):
        row = {"dest": name, "default": False, "kind": "switch", "constant": True}
        kept[f"--{name.replace('_', '-')}"] = row
    return dict(sorted(kept.items()))


def main() -> None:
    version = sys.argv[1] if len(sys.argv) > 1 else shims.NEWEST
    shims.use_release("0.17" if version == "0.16" else version)
    import megatron.core

    flags = flags_of_parser()
    release, document = megatron.core.__version__, {}
    if version == "0.16":
        flags = flags_of_0_16(flags)
        source = f"configuration classes of megatron-core 0.16.1 and the parser of {release}"
    else:
        source = f"parser of megatron-core {release}"
    document["source"] = f"{source}, written by .ci/megatron/dump_flags.py"
    if version != shims.NEWEST:
        name = f"megatron_export/megatron/data/flags-{shims.NEWEST}.json"
        newest = json.loads((pathlib.Path(__file__).parents[2] / name).read_text())["flags"]
        document["base"] = shims.NEWEST
        document["absent"] = sorted(set(newest) - set(flags))
        flags = {name: row for name, row in flags.items() if newest.get(name) != row}
    json.dump(document | {"flags": flags}, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
