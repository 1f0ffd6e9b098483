"""Text of shell files. Every value that a user chose is quoted or stripped of control characters."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence


def comment(text: str) -> str:
    """One comment line without line breaks or control characters."""
    return "# " + plain(text)


def plain(text: str) -> str:
    """Printable text on one line."""
    return re.sub(r"\s+", " ", "".join(char if char.isprintable() else " " for char in text)).strip()


def literal(*texts: str) -> str:
    """A line that tells shellcheck that ``$`` and back quotes in these quoted texts are meant; empty without any."""
    if any(char in text for text in texts for char in "$`"):
        return "# shellcheck disable=SC2016  # quoted values are meant as they are\n"
    return ""


def argument_array(array: str, sections: Mapping[str, Sequence[tuple[str, ...]]]) -> str:
    """A bash array of this name with one flag a line and a comment a section."""
    lines = []
    for title, flags in sections.items():
        if flags:
            lines.append(f"    {comment(title)}")
            lines += ["    " + " ".join([name, *map(shlex.quote, values)]) for name, *values in flags]
    return f"{array}=(\n" + "\n".join(lines) + "\n)\n"


def exports(environment: Mapping[str, str | None]) -> str:
    """``export`` lines; None unsets."""
    return "".join(
        f"unset {name}\n" if value is None else f"export {name}={shlex.quote(value)}\n"
        for name, value in environment.items()
    )


def label(text: str) -> str:
    """A name that is safe as a job name or a file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "plan"
