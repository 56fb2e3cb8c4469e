"""The configuration file: default options, one section per command.

kvabr reads one file: the one that ``KVABR_CONFIG`` names (none if it is empty), else ``kvabr.toml`` in the current
folder, else ``kvabr.toml`` in the user's configuration folder. Keys are long options without dashes. The command line
takes precedence.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvabr.cli.commands import exists, names
from kvabr.types.errors import UsageError, did_you_mean

NAME = "kvabr.toml"
VARIABLE = "KVABR_CONFIG"


def places() -> tuple[Path, ...]:
    """Return the paths where a file may be; the first that exists is read."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return (Path(named).expanduser(),) if named else ()
    from platformdirs import user_config_path

    return Path(NAME), user_config_path("kvabr") / NAME


@dataclass(frozen=True, slots=True)
class Config:
    """The contents of a configuration file."""

    path: Path
    sections: Mapping[str, object]

    @staticmethod
    def read() -> Config | None:
        """Read the file; return None if there is none.

        Raises:
            UsageError: It cannot be read, is not TOML, or has a section that is not a command.
        """
        path = next((place for place in places() if place.is_file()), None)
        if path is None:
            if os.environ.get(VARIABLE):
                raise UsageError(f"{VARIABLE}={os.environ[VARIABLE]}: no such file")
            return None
        import tomllib

        try:
            sections = tomllib.loads(path.read_text(encoding="utf-8"))
        except RecursionError as error:
            raise UsageError(f"{path}: tables or lists are nested too deeply") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise UsageError(f"{path}: {(error.strerror if isinstance(error, OSError) else None) or error}") from error
        for name, section in sections.items():
            if not exists(name) or not isinstance(section, dict):
                what = "options must be in a section" if not isinstance(section, dict) else "unknown command"
                raise UsageError(
                    f"{path}: {name}: {what}{did_you_mean(name, names())}; sections are named after commands"
                )
        return Config(path, sections)

    def apply(self, parser: argparse.ArgumentParser, command: str, words: Sequence[str] = ()) -> None:
        """Set the defaults of a command's options to the values of the file.

        Args:
            parser: parser of the command.
            command: name of the command.
            words: words of the command line; options of the file that exclude one of them are ignored.

        Raises:
            UsageError: An option does not exist, has a bad value, or excludes another one.
        """
        if (section := self.sections.get(command)) is not None:
            given = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
            self._apply(parser, command, section, given)

    def _apply(self, parser: argparse.ArgumentParser, title: str, section: object, given: Sequence[str]) -> None:
        if not isinstance(section, dict):
            raise UsageError(f"{self.path}: {title} must be a section: [{title}]")
        kinds = {name: inner for kind in _kinds(parser) for name, inner in kind.choices.items()}
        options = dict(_options(parser))
        changed: dict[argparse.Action, object] = {}
        for key, value in section.items():
            if key in kinds:
                self._apply(kinds[key], f"{title}.{key}", value, given)
                continue
            if key not in options:
                hint = did_you_mean(key, [*options, *kinds]) or f"; `kvabr {title.replace('.', ' ')} --help` lists them"
                raise UsageError(f"{self.path}: [{title}] {key}: unknown option{hint}")
            action = options[key]
            try:
                changed[action] = self._value(parser, action, value)
            except (argparse.ArgumentError, argparse.ArgumentTypeError) as error:
                why = getattr(error, "message", None) or error
                raise UsageError(f"{self.path}: [{title}] {key}: {why}") from error
        for group in parser._mutually_exclusive_groups:  # noqa: SLF001 - no public list
            both = [key for key in section if options.get(key) in group._group_actions]  # noqa: SLF001
            if len(both) > 1:
                raise UsageError(f"{self.path}: [{title}] {' and '.join(both)} exclude each other")
            group.required = group.required and not both
            flags = [flag for action in group._group_actions for flag in action.option_strings]  # noqa: SLF001
            if any(flag.startswith(word) for flag in flags for word in given):  # words may be abbreviations
                changed = {action: value for action, value in changed.items() if action not in group._group_actions}  # noqa: SLF001
        for action, default in changed.items():
            action.default, action.required = default, False

    def _value(self, parser: argparse.ArgumentParser, action: argparse.Action, value: object) -> object:
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise argparse.ArgumentTypeError("must be true or false")
            return action.const if value else action.default
        repeated = isinstance(action, argparse._AppendAction)  # noqa: SLF001 - its only name
        several = action.nargs in {"+", "*"} or isinstance(action.nargs, int) or repeated
        words = value if isinstance(value, list) and several else [value]
        if isinstance(action.nargs, int) and len(words) != action.nargs:
            raise argparse.ArgumentTypeError(f"must be a list of {action.nargs} values")
        if not words:
            raise argparse.ArgumentTypeError("must not be empty")
        for word in words:
            if isinstance(word, bool) or not isinstance(word, str | int | float):
                raise argparse.ArgumentTypeError("must be a number or a string" + (", or a list of them" * several))
        found: list[object] = [parser._get_values(action, [str(word)]) for word in words]  # noqa: SLF001 - as it does
        if not repeated and several:
            found = [one for values in found for one in (values if isinstance(values, list) else [values])]
        found = [self.path.parent / one.expanduser() if isinstance(one, Path) else one for one in found]
        return found if several else found[0]


def _kinds(parser: argparse.ArgumentParser) -> Iterator[argparse._SubParsersAction[argparse.ArgumentParser]]:
    return (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))  # noqa: SLF001


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:  # noqa: SLF001 - no public list
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):  # noqa: SLF001
            for option in action.option_strings:
                if option.startswith("--"):
                    yield option.removeprefix("--"), action
