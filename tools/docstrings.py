"""griffe extension: the docstrings' reStructuredText as Markdown, for the site (mkdocs.yml)."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod):`([^`]+)`")
#: A paragraph that ends in two colons, and the indented code after it.
CODE = re.compile(r"^( *)(.*?) ?::\n\n((?:\1    .*\n|\n)+)", re.M)


def markdown(text: str) -> str:
    def fenced(match: re.Match[str]) -> str:
        indent, before, code = match.groups()
        lines = [f"{before}:", ""] if before else []
        lines += ["```python", *textwrap.dedent(code).strip().splitlines(), "```"]
        return textwrap.indent("\n".join(lines), indent) + "\n\n"

    return CODE.sub(fenced, ROLE.sub(r"`\1`", text) + "\n").rstrip()


class MarkdownDocstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
