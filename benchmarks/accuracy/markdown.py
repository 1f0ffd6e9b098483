"""Pieces of a page in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 120


def prose(text: str) -> str:
    """A paragraph, filled to :data:`WIDTH`."""
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def bullet(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def page(*parts: str) -> str:
    """Parts with an empty line between them; empty parts are left out."""
    return "\n\n".join(part for part in parts if part)


def percent(share: float, sign: bool = False) -> str:
    return f"{100 * share:{'+' if sign else ''}.1f}%"


def table(heads: Sequence[str], lines: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table whose first ``texts`` columns are text and the others numbers."""
    rule = ["---"] * texts + ["--:"] * (len(heads) - texts)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *lines))


def chart(name: str, alternative: str) -> str:
    return f"![{alternative}](accuracy/{name}.svg)"
