"""Hooks for `mkdocs build`: the help of every command, and the calculator, where pages ask for them."""

from __future__ import annotations

import json
import os
import re
from dataclasses import astuple
from typing import Any

from kvabr.cli.commands import COMMANDS, LAB
from kvabr.cli.main import command_parser
from kvabr.replay.engines import ENGINES

_MARK = re.compile(r"<!-- the help of every command.*?-->")
_CALCULATED = {"8B": "h200-8b", "70B": "h200-70b"}
"""Engines of the calculator, by the models of docs/assets/load-or-compute.json."""
_CALCULATOR = """<form id="calculator" data-points="{points}" data-engines='{engines}'>
<label>model, on an H200 <select name="model">{models}</select></label>
<label>prompt, tokens <input name="tokens" type="number" value="32768" min="8192" max="131072" step="1024"></label>
<label>link, Mbit/s <input name="mbit" type="number" value="10000" min="100" max="100000" step="100"></label>
<output></output>
</form>
<script src="{script}"></script>"""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the help of every command, and the calculator, where a page asks for it."""
    if page.file.src_uri == "guides/is-it-for-me.md":
        return markdown.replace("<!-- calculator -->", _calculator())
    return _MARK.sub(lambda _: _commands(), markdown) if page.file.src_uri == "reference/cli.md" else markdown


def _calculator() -> str:
    engines = {model: astuple(ENGINES[engine]) for model, engine in _CALCULATED.items()}
    return _CALCULATOR.format(
        points="../../assets/load-or-compute.json",
        script="../../assets/calculator.js",
        engines=json.dumps(engines),
        models="".join(f"<option>{model}</option>" for model in engines),
    )


def _commands() -> str:
    os.environ["COLUMNS"] = "82"  # the width of a box on the site
    parts = []
    for name, line in ({name: line for name, (_, line) in COMMANDS.items()} | LAB).items():
        parts.append(
            f"## kvabr {name}\n\n{line[0].upper()}{line[1:]}.\n\n```text\n{command_parser(name).format_help()}```\n"
        )
    return "\n".join(parts)
