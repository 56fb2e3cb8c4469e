"""Corpora in the repository: inputs that reach all the code which guided runs have reached, and those that once failed.

A file for each target, `corpus/TARGET.txt`, with an input in base64 on each line. Lines that begin with ``#`` say what
the inputs up to the next such line are.
"""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"
MAX_BYTES = 72 << 10
"""Of one file. The shortest inputs are kept; all files together stay below a megabyte."""
_FAILED, _FOUND = (
    "# These failed once.",
    "# These reach what the valid inputs do not; `tools/fuzz --guided --keep` writes them.",
)


@dataclass(frozen=True, slots=True)
class Corpus:
    failed: tuple[bytes, ...] = ()
    """Inputs that once failed; kept whatever they reach."""
    found: tuple[bytes, ...] = ()

    @property
    def inputs(self) -> tuple[bytes, ...]:
        return self.failed + self.found


def read(name: str) -> Corpus:
    """Return the corpus of a target; empty if there is none."""
    path = FOLDER / f"{name}.txt"
    parts: dict[str, list[bytes]] = {_FAILED: [], _FOUND: []}
    into = parts[_FOUND]
    for line in path.read_text(encoding="ascii").splitlines() if path.exists() else ():
        if line.startswith("#"):
            into = parts.get(line, into)
        elif line:
            into.append(base64.b64decode(line, validate=True))
    return Corpus(tuple(parts[_FAILED]), tuple(parts[_FOUND]))


def write(name: str, found: Iterable[bytes], failed: Sequence[bytes] = ()) -> int:
    """Replace what was found for a target, keep what failed and add to it; return how many inputs were left out."""
    before = read(name)
    kept = tuple(dict.fromkeys((*before.failed, *failed)))
    lines = [_FAILED, *map(_line, kept)] if kept else []
    lines.append(_FOUND)
    room, left_out = MAX_BYTES - sum(len(line) + 1 for line in lines), 0
    for data in sorted(set(found) - set(kept), key=lambda data: (len(data), data)):
        line = _line(data)
        room -= len(line) + 1
        if room >= 0:
            lines.append(line)
        else:
            left_out += 1
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.txt").write_text("\n".join([*lines, ""]), encoding="ascii")
    return left_out


def _line(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
