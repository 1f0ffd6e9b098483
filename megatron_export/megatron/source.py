"""Argument lists in the forms that people keep them: a command line, a bash script, a YAML file.

A script is read, never run: assignments, arrays, ``export`` and plain ``$NAME`` are followed, nothing else.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import Any

import yaml

from meshwright.specs.errors import Fault, SpecError

MAX_BYTES = 1_000_000
_ASSIGNMENT = re.compile(r"^(?:export\s+|declare\s+(?:-\w+\s+)?|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?=)(.*)$", re.S)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|(\w+))")


@dataclass
class Source:
    """Tokens of the argument list and the environment that the text exports."""

    tokens: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


def read_source(text: str) -> Source:
    """Find the argument list in ``text``; SpecError if it has none or cannot be split."""
    if len(text) > MAX_BYTES:
        raise SpecError(Fault("", f"the arguments are {len(text)} characters long; {MAX_BYTES} are read"))
    if _looks_like_yaml(text):
        return _from_yaml(text)
    if "\n" in text.strip() and re.search(r"^\s*(#!|export\s|\w+\+?=|torchrun|python|srun)", text, re.M):
        return _from_script(text)
    return Source(_split(text.replace("\\\n", " ")))


def _split(text: str, comments: bool = True) -> list[str]:
    try:
        return shlex.split(text, comments=comments)
    except ValueError as error:
        raise SpecError(Fault("", f"cannot split the arguments: {str(error).lower()}")) from None


def _looks_like_yaml(text: str) -> bool:
    for line in text.splitlines():
        body = line.strip()
        if body and not body.startswith("#"):
            return bool(re.match(r"^(---|[\w.-]+:(\s|$))", body)) and not body.startswith("-- ")
    return False


def _from_yaml(text: str) -> Source:
    try:
        if re.search(r"(^|[\s:\[{,-])[&*]\w", text):
            raise SpecError(Fault("", "YAML anchors and aliases are not read"))
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise SpecError(Fault("", f"is not valid YAML{where}")) from None
    except RecursionError:
        raise SpecError(Fault("", "the YAML is nested too deeply")) from None
    if not isinstance(data, dict):
        raise SpecError(Fault("", "YAML arguments must be a mapping of flag: value"))
    environment = data.get("ENV_VARS") or {}
    mapping = data.get("MODEL_ARGS", {k: v for k, v in data.items() if k != "ENV_VARS"})
    if not isinstance(mapping, dict) or not isinstance(environment, dict):
        raise SpecError(Fault("", "MODEL_ARGS and ENV_VARS must be mappings"))
    source = Source(environment={str(name): str(value) for name, value in environment.items()})
    for key, value in mapping.items():
        source.tokens += _yaml_flag(str(key), value)
    return source


def _yaml_flag(key: str, value: Any) -> list[str]:
    name = key if key.startswith("--") else "--" + key.lstrip("-").replace("_", "-")
    if value is True or value is None:
        return [name]
    if value is False:
        return []
    if isinstance(value, dict):
        raise SpecError(Fault(f"/{key}", "must be a value or a list of values"))
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, dict | list) for item in items):
        raise SpecError(Fault(f"/{key}", "must be a value or a list of values"))
    return [name, *map(str, items)]


def _from_script(text: str) -> Source:
    source = Source()
    variables: dict[str, list[str]] = {}
    arrays: list[str] = []
    command: list[str] | None = None
    for line in _logical_lines(text):
        match = _ASSIGNMENT.match(line)
        if match:
            name, operator, body = match[1], match[2], match[3].strip()
            if body.startswith("("):
                values = _expand(_split(body[1 : body.rindex(")")]) if ")" in body else [], variables)
            else:
                values = _expand(_split(body), variables)
                values = [" ".join(values)] if operator == "=" and len(values) > 1 else values
            before = variables.get(name, []) if operator == "+=" else []
            variables[name] = before + values
            if name not in arrays:
                arrays.append(name)
            if line.startswith("export") and values:
                source.environment[name] = values[0]
            continue
        tokens = _split(line)
        places = [index for index, token in enumerate(tokens) if token.endswith(".py")]
        if places:
            command = _expand(tokens[places[-1] + 1 :], variables)
    if command is None:
        command = [v for name in arrays for v in variables[name] if any(x.startswith("--") for x in variables[name])]
    source.tokens = [part for token in command for part in _resplit(token)]
    unknown = sorted({name for token in source.tokens for name in _names(token)})
    if unknown:
        raise SpecError([Fault("", f"the script does not set ${name}") for name in unknown])
    if not source.tokens:
        raise SpecError(Fault("", "found no arguments: neither after a .py file nor in an array"))
    return source


def _logical_lines(text: str) -> list[str]:
    """Lines with continuations joined, quoted text and arrays kept whole."""
    lines: list[str] = []
    pending, quote = "", ""
    for line in text.replace("\\\n", " ").splitlines():
        body = line.strip()
        if not quote and (not body or body.startswith("#")):
            continue
        body, quote = _scan(body, quote)
        pending = f"{pending}\n{body}" if pending else body
        in_array = re.match(r"^(?:\w+\s+)*\w+\+?=\(", pending) and not body.endswith(")")
        if quote or in_array:
            continue
        lines.append(pending)
        pending = ""
    return [*lines, pending] if pending else lines


def _scan(line: str, quote: str) -> tuple[str, str]:
    """``line``, which starts inside ``quote`` ("" = none), without its comment; and the quote that it leaves open."""
    escaped, before = False, " "
    for index, char in enumerate(line):
        if escaped:
            escaped = False
        elif char == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and before.isspace():
            return line[:index].rstrip(), quote
        before = char
    return line, quote


def _expand(tokens: list[str], variables: dict[str, list[str]]) -> list[str]:
    """Replace ``$NAME``; a token that is only an array becomes its items. Unknown names stay, to be reported."""
    out: list[str] = []
    for token in tokens:
        if token in ("$@", "$*", "${@}", "${*}"):  # the script's own arguments, which are not in its text
            continue
        whole = _VARIABLE.fullmatch(token)
        name = (whole[1] or whole[3]) if whole else None
        if name and name in variables:
            out += variables[name]
            continue

        def value(match: re.Match[str]) -> str:
            found = variables.get(match[1] or match[3])
            return " ".join(found) if found is not None else match[2] if match[2] is not None else match[0]

        out.append(_VARIABLE.sub(value, token))
    return out


def _resplit(token: str) -> list[str]:
    """Words of a token that holds several flags (``ARGS="--a 1 --b 2"``)."""
    return _split(token, comments=False) if re.match(r"^\s*--[\w-]+\s", token) else [token] if token.strip() else []


def _names(token: str) -> list[str]:
    return [match[1] or match[3] for match in _VARIABLE.finditer(token)]
