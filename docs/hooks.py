# ruff: noqa: INP001  # mkdocs loads it by its path
"""Hooks for `mkdocs build`: the help of every command, and the calculator, where pages ask for them."""

from __future__ import annotations

import os
import re
from typing import Any

from kvabr.cli.commands import COMMANDS, LAB
from kvabr.cli.main import command_parser

_MARK = re.compile(r"<!-- the help of every command.*?-->")
_CALCULATOR = """<style>
#calculator label:not([hidden]) { display: flex; flex-wrap: wrap; gap: 0.2em 1em; margin-bottom: 0.3em; }
#calculator label > :first-child { flex: 0 1 16em; min-width: 0; max-width: 100%; }
#calculator output { display: block; overflow-x: auto; }
#calculator input, #calculator select { border: 1px solid; padding: 0.1em 0.4em; color: inherit; background: inherit; }
</style>
<form id="calculator" data-points="../../assets/calculator.json">
<label>model and engine <select name="name"></select></label>
<label class="own">prefills, tokens a second <input name="speed" type="number" min="30" max="100000"></label>
<label class="own">FP16 cache, kB a token <input name="kilobytes" type="number" min="1" max="9999" step="any"></label>
<label>prompt, tokens <input name="tokens" type="number" min="512" max="131072"></label>
<label>link, Mbit/s <input name="mbit" type="number" min="1" max="100000" step="any"></label>
<output></output>
</form>
<script src="../../assets/calculator.js"></script>"""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the help of every command, and the calculator, where a page asks for it."""
    if page.file.src_uri == "guides/is-it-for-me.md":
        return markdown.replace("<!-- calculator -->", _CALCULATOR)
    return _MARK.sub(lambda _: _commands(), markdown) if page.file.src_uri == "reference/cli.md" else markdown


def _commands() -> str:
    os.environ["COLUMNS"] = "82"  # the width of a box on the site
    parts = []
    for name, line in ({name: line for name, (_, line) in COMMANDS.items()} | LAB).items():
        parts.append(
            f"## kvabr {name}\n\n{line[0].upper()}{line[1:]}.\n\n```text\n{command_parser(name).format_help()}```\n"
        )
    return "\n".join(parts)
