"""Write megatron_export/megatron/data/flags-0.19.json from the parser of the installed megatron-core.

Usage: VENV/bin/python .ci/megatron/dump_flags.py > megatron_export/megatron/data/flags-0.19.json
"""

from __future__ import annotations

import argparse
import enum
import json
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import shims  # noqa: F401


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
        row["kind"] = {"enum_type_handler": "str", "tuple_type": "tuple"}.get(row["kind"], row["kind"])
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


def main() -> None:
    import megatron.core
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags: dict[str, Any] = {}
    for action in parser._actions:
        if action.option_strings and action.dest != "help":
            long = [name for name in action.option_strings if name.startswith("--")]
            flags[(long or action.option_strings)[0]] = describe(action)
    document = {
        "source": f"parser of megatron-core {megatron.core.__version__}, written by .ci/megatron/dump_flags.py",
        "flags": dict(sorted(flags.items())),
    }
    json.dump(document, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
