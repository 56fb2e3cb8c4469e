"""Hooks for `mkdocs build`: the help of every command becomes the page reference/cli.md."""

from __future__ import annotations

import os
import re
from typing import Any

from kvabr.cli.commands import COMMANDS, LAB
from kvabr.cli.main import command_parser

_MARK = re.compile(r"<!-- the help of every command.*?-->")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the help of every command where the page asks for it."""
    return _MARK.sub(lambda _: _commands(), markdown) if page.file.src_uri == "reference/cli.md" else markdown


def _commands() -> str:
    os.environ["COLUMNS"] = "82"  # the width of a box on the site
    parts = []
    for name, line in ({name: line for name, (_, line) in COMMANDS.items()} | LAB).items():
        parts.append(
            f"## kvabr {name}\n\n{line[0].upper()}{line[1:]}.\n\n```text\n{command_parser(name).format_help()}```\n"
        )
    return "\n".join(parts)
