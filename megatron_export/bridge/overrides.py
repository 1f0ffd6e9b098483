"""Megatron-Bridge settings as people keep them: ``KEY=VALUE`` overrides, a file of them, or Python ``cfg.KEY = VALUE``.

Values follow Hydra's override grammar as far as configurations use it: null, booleans, numbers, text with or without
quotes, lists and flat mappings. Nothing is run: of Python, only assignments of literals are read.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.specs.errors import Fault, SpecError

MAX_BYTES = 1_000_000
_KEY = re.compile(r"^(\+\+|\+|~)?([A-Za-z_]\w*(?:\.\w+)*)(?:=(.*))?$", re.S)
_PYTHON = re.compile(r"^\s*(?:cfg|config|recipe)\.\w+(?:\.\w+)*\s*=[^=]", re.M)
_INTEGER, _FLOAT = re.compile(r"[+-]?\d+"), re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
#: Options of Bridge's runner that say something about the run; all others are left alone.
_RUNNER = {"--recipe": "recipe", "--nodes": "nodes", "--num-nodes": "nodes", "--gpus-per-node": "gpus_per_node"}


@dataclass(frozen=True)
class Overrides:
    """``given`` maps keys such as ``model.tensor_model_parallel_size`` to values; the last of a key counts.

    ``recipe`` is the recipe that they change, ``num_gpus`` what the runner's options say; None where not said.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    num_gpus: int | None = None


def read_overrides(source: str | Sequence[str]) -> Overrides:
    """Parse a command line, a file with one override a line, Python assignments, or a list of arguments.

    Raises :class:`SpecError` with one fault for each argument that is neither an override nor an option.
    """
    if isinstance(source, str):
        if len(source) > MAX_BYTES:
            raise SpecError(Fault("", f"the overrides are {len(source)} characters long; {MAX_BYTES} are read"))
        if _PYTHON.search(source):
            return _from_python(source)
        tokens = [token for line in source.replace("\\\n", " ").splitlines() for token in _tokens(line)]
    else:
        tokens = list(source)
    return _from_tokens(tokens)


def _tokens(line: str) -> list[str]:
    """Words of a line. A line that is one override is taken whole: Hydra's quotes are not the shell's."""
    text = line.strip()
    if not text or text.startswith("#"):
        return []
    match = _KEY.match(text)
    if match and match[3] is not None and not re.search(r"\s+(--|\+{0,2}[A-Za-z_][\w.]*=)", text):
        return [text]
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise SpecError(Fault("", f"cannot split the overrides: {str(error).lower()}")) from None


def _from_tokens(tokens: Sequence[str]) -> Overrides:
    given: dict[str, Any] = {}
    options: dict[str, str] = {}
    faults: list[Fault] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if token.startswith("--"):
            name, equals, value = token.partition("=")
            takes = not equals and position < len(tokens) and not _is_setting(tokens[position])
            if takes:
                value = tokens[position]
                position += 1
            options[_RUNNER.get(name, name)] = value
            continue
        match = _KEY.match(token)
        if match and match[1] == "~":
            given[match[2]] = None
        elif match and match[3] is not None:
            given[match[2]] = parse_value(match[3])
        elif token.endswith((".py", ".sh")) or token in ("python", "python3", "bash", "torchrun"):
            continue
        else:
            faults.append(Fault("", f"{token!r} is no override KEY=VALUE"))
    if faults:
        raise SpecError(faults)
    nodes, per_node = options.get("nodes", ""), options.get("gpus_per_node", "")
    gpus = int(nodes) * int(per_node) if nodes.isdigit() and per_node.isdigit() else None
    return Overrides(given, options.get("recipe") or None, gpus)


def _is_setting(token: str) -> bool:
    match = _KEY.match(token)
    return token.startswith("--") or bool(match and "." in match[2] and match[3] is not None)


def parse_value(text: str) -> Any:
    """A value of Hydra's grammar: ``null``, ``true``, ``1``, ``1e-4``, ``"E|t*4L"``, ``[0,1]``, ``{a:1}``."""
    body = text.strip()
    if len(body) >= 2 and body[0] == body[-1] and body[0] in "'\"":
        return body[1:-1].replace(f"\\{body[0]}", body[0])
    if body.startswith("[") and body.endswith("]"):
        return [parse_value(part) for part in _split(body[1:-1])]
    if body.startswith("{") and body.endswith("}"):
        pairs = (part.partition(":") for part in _split(body[1:-1]))
        return {name.strip(): parse_value(value) for name, _, value in pairs}
    return _scalar(body)


def _scalar(body: str) -> Any:
    word = body.lower()
    if word in ("null", "none", ""):
        return None
    if word in ("true", "false"):
        return word == "true"
    if _INTEGER.fullmatch(body):
        return int(body)
    return float(body) if _FLOAT.fullmatch(body) else body


def _split(text: str) -> list[str]:
    """Parts between commas that are not inside brackets or quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    parts.append(text[start:])
    return [part for part in parts if part.strip()]


def format_value(value: Any) -> str:
    """A value as Hydra's grammar reads it back; text with other than plain characters is quoted."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(format_value, value)) + "]"
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z_][\w.+-]*", value):
        return '"' + value.replace('"', '\\"') + '"'
    return str(value)


def _from_python(source: str) -> Overrides:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        raise SpecError(Fault("", "is neither a list of overrides nor Python")) from None
    given: dict[str, Any] = {}
    recipe = None
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target = ast.unparse(node.targets[0])
        if re.fullmatch(r"(cfg|config|recipe)(\.\w+)+", target):
            given[target.partition(".")[2]] = literal(node.value)
        elif target in ("cfg", "config", "recipe") and isinstance(node.value, ast.Call):
            recipe = ast.unparse(node.value.func).rpartition(".")[2]
    return Overrides({key: value for key, value in given.items() if value is not UNREAD}, recipe)


#: Stands for an expression that is not a literal.
UNREAD = object()


def literal(node: ast.expr) -> Any:
    """Value of a literal, ``torch.NAME`` as its name, ``bf16_mixed()`` as the called name; else :data:`UNREAD`."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        pass
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
        return node.attr
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("_mixed"):
        return ast.unparse(node.func).rpartition(".")[2]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("get_mixed_precision_config") and node.args:
        return literal(node.args[0])
    return UNREAD
