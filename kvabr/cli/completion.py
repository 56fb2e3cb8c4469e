"""`kvabr completion SHELL`: print a script that completes commands, options and names."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import suppress

from kvabr.types.errors import KvabrError

_EPILOG = """\
Load it with `source <(kvabr completion bash)`, or write it to a file, such as
~/.local/share/bash-completion/completions/kvabr, or one that ~/.zshrc sources.

The script completes commands, options, the values of options that have a list, and the policies and estimators that are
installed when it is made. Everything else is completed as a file.
"""

_BASH = """\
_kvabr() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} words=""
    COMPREPLY=()
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$current"))
        return
    fi
    if [[ $COMP_CWORD -gt 2 ]]; then
        case "$command ${{COMP_WORDS[2]}}" in
{groups}
        esac
    fi
    case "$command $previous" in
{values}
    esac
    if [[ -z $words && ($current == -* || $COMP_CWORD -eq 2) ]]; then
        case "$command" in
{options}
        esac
    fi
    [[ -n $words ]] && COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _kvabr kvabr
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.description = "Print a script that completes the command line of kvabr."
    parser.epilog = _EPILOG
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell to complete in")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    if args.shell == "zsh":
        print("autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit")
    print(_script(), end="")
    return 0


def _script() -> str:
    from kvabr.cli.commands import is_here, names
    from kvabr.cli.main import command_parser

    commands = [name for name in names() if is_here(name)]
    found: list[tuple[str, list[str], str]] = []
    for name in commands:
        with suppress(KvabrError):  # another package's, which is broken
            found += _lines(name, command_parser(name))
    groups, values, options = (
        "\n".join(
            f'            {pattern}) words="{" ".join(words)}" ;;' for pattern, words, kind in found if kind == wanted
        )
        for wanted in ("group", "value", "option")
    )
    return _BASH.format(
        commands=" ".join([*commands, "--help", "--version"]), groups=groups, values=values, options=options
    )


def _lines(name: str, parser: argparse.ArgumentParser, kind: str = "") -> Iterator[tuple[str, list[str], str]]:
    """Yield (pattern of `case`, words, which `case`) for a command, or one kind of it."""
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]  # noqa: SLF001 - no public list
    words = [word for action in actions for word in action.option_strings]
    for action in actions:
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - its only name
            words += action.choices
            for inner, its_parser in action.choices.items():
                yield from _lines(name, its_parser, inner)
        elif action.option_strings and (values := _values(action)):
            yield "|".join(f'"{name} {option}"' for option in action.option_strings), values, "value"
    yield (f'"{name} {kind}"', words, "group") if kind else (f'"{name}"', words, "option")


def _values(action: argparse.Action) -> list[str]:
    from kvabr.abr.plugins import estimators, policies

    if action.dest in {"policy", "estimator"}:
        names = [*policies()] if action.dest == "policy" else [*estimators()]
        if action.dest == "policy" and action.nargs == "+":
            names.append("all")
        return sorted(name for name in names if name != "fixed")
    return [str(choice) for choice in action.choices or ()]
