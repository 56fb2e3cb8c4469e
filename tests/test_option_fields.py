"""Options of commands are the fields of a dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
from annotated_types import Ge

from kvabr.cli.fields import command
from kvabr.cli.options import CommandParser
from kvabr.types.errors import UsageError
from kvabr.types.fields import Heading, OptionGroup, Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    rate: Annotated[float, Ge(0), Shown("--rate X")] = 1.0
    """Rate of something. Help leaves this out."""
    hidden: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """Do something.

    More about it.
    """

    place: Annotated[str, Shown("PLACE")]
    """Where."""
    more: Annotated[tuple[Path, ...], Shown("MORE")] = ()
    """Further places."""
    group: ClassVar = Heading("a group", "about the group")
    kind: Annotated[Literal["one", "two"], Shown("-k --kind")] = "one"
    """Which kind."""
    pair: Annotated[tuple[int, int] | None, Ge(0), Shown("--pair A B")] = None
    """Two numbers."""
    word: Annotated[tuple[str, ...], Shown("--word W", repeated=True)] = ()
    """A word; may be repeated."""
    live: Annotated[bool, Shown()] = False
    """Whether it is live."""
    edge: Annotated[int | None, Shown("--edge N", needs="live")] = None
    """An edge."""
    json: Annotated[Path | None, Shown("--json F", written=True)] = None
    """Write the result."""
    log: Annotated[Path | None, Shown("--log F", written=True)] = None
    """Write the events."""
    inner: Annotated[Inner, OptionGroup("the inner part", prefix="up-", defaults=(("rate", 2.0),))]


def parsed(*words):
    """Return the options that a command gets for words."""
    got = []

    def run(options):
        got.append(options)
        return 0

    parser = CommandParser(prog="kvabr test")
    command(Outer, run, lambda: "the end")(parser)
    args = parser.parse_args(words)
    assert args.run(args) == 0
    return got[0], parser.format_help()


def test_defaults_are_those_of_the_fields():
    options, _ = parsed("here")
    assert options == Outer(place="here", inner=Inner(rate=2.0))


def test_values_have_the_types_of_the_fields():
    words = "here a b -k two --pair 1 2 --word x --word y --live --edge 4 --up-rate 0.5"
    options, _ = parsed(*words.split())
    assert options == Outer(
        place="here", more=(Path("a"), Path("b")), kind="two", pair=(1, 2), word=("x", "y"), live=True, edge=4,
        inner=Inner(rate=0.5),
    )  # fmt: skip


def test_help_has_the_docstrings():
    _, text = parsed("here")
    for said in ("Do something.", "More about it.", "the end", "a group:", "about the group", "the inner part:"):
        assert said in text
    assert "rate of something (default: 2)" in " ".join(text.split())
    assert "leaves this out" not in text
    assert "hidden" not in text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("x", "--up-rate", "-1"), "--up-rate"),
        (("x", "--pair", "1", "-2"), "--pair"),
        (("x", "--edge", "4"), "--live"),
        (("x", "--json", "no/such/folder.json"), "folder.json"),
        (("x", "--json", "out", "--log", "./out"), "--log out: --json writes the same file"),
    ],
)
def test_wrong_values_name_their_option(words, named):
    with pytest.raises(UsageError) as caught:
        parsed(*words)
    assert named in str(caught.value)


def test_two_outputs_may_share_a_device():
    assert parsed("x", "--json", "/dev/null", "--log", "/dev/null")[0].log == Path("/dev/null")


def test_a_missing_argument_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as caught:
        parsed()
    assert caught.value.code == 2
    assert "PLACE" in capsys.readouterr().err
