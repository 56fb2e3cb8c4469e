"""`kvabr completion SHELL`: print a script that completes commands, options and names."""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal

from kvabr.cli.fields import command
from kvabr.types.errors import KvabrError
from kvabr.types.fields import Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCommand:
    """Print a script that completes the command line of kvabr.

    For bash, put `source <(kvabr completion bash)` into ~/.bashrc, or write the script to a file such as
    ~/.local/share/bash-completion/completions/kvabr. For zsh, put `eval "$(kvabr completion zsh)"` into ~/.zshrc after
    compinit, or write the script to a file _kvabr in a folder of $fpath.

    It completes commands, options, their values, and the policies and estimators installed now; otherwise file names.
    """

    shell: Annotated[Literal["bash", "zsh"], Shown("SHELL")]
    """The shell to complete in: bash or zsh."""


def run(args: CompletionCommand) -> int:
    """Print the script."""
    import shtab

    print(shtab.complete(_parser(), args.shell, root_prefix="kvabr"))
    return 0


add = command(CompletionCommand, run)


def _parser() -> argparse.ArgumentParser:
    from kvabr.cli.commands import COMMANDS, LAB, declare, is_here, names

    top = argparse.ArgumentParser(prog="kvabr")
    top.add_argument("--version", action="store_true", help="show the version, and exit")
    commands = top.add_subparsers()
    lines = {name: line for name, (_, line) in COMMANDS.items()} | LAB
    for name in filter(is_here, names()):
        parser = commands.add_parser(name, help=lines.get(name, "of another package"))  # hidden without help
        with suppress(KvabrError):  # a broken package
            declare(name, parser)
        parser.description = lines.get(name, parser.description)
        _complete_values(parser)
    return top


def _complete_values(parser: argparse.ArgumentParser) -> None:
    """Set how option values are completed: installed policies and estimators, else files."""
    import shtab

    from kvabr.abr.plugins import estimators, policies

    for action in parser._actions:  # noqa: SLF001 - no public list
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - its only name
            for inner in action.choices.values():
                _complete_values(inner)
        elif action.dest in {"policy", "estimator"}:
            known = sorted(policies() if action.dest == "policy" else estimators())
            action.choices = [name for name in known if name != "fixed"] + ["all"] * (action.nargs == "+")
        elif action.choices is None and action.nargs != 0:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
