"""Manual pages of invented programs, with answers unknown to any model."""

from __future__ import annotations

import random

from kvabr.publish.texts import SYLLABLES

_SETTINGS = {
    "timeout": "Give up on a peer that has not answered for N seconds",
    "retries": "Try a failed transfer again at most N times before the file is skipped",
    "depth": "Descend into folders no further than N levels below the first one",
    "buffer": "Read N kilobytes at once, which helps on disks that are slow to seek",
    "workers": "Run N processes side by side; more than there are processors seldom help",
    "limit": "Print the N largest entries and leave out the others",
    "keep": "Keep the N newest copies of each file and delete older ones",
    "width": "Wrap lines of the report after N columns",
    "delay": "Wait N milliseconds between two requests to the same host",
    "port": "Listen on port N of every interface for commands of other machines",
    "age": "Ignore whatever has not been touched for N days",
    "level": "Compress with effort N; higher ones are slower and save little",
    "sample": "Check only one file in N, chosen at random with a fixed seed",
    "rotate": "Begin a new log file whenever the old one has N megabytes",
    "margin": "Leave N per cent of the disk free, and stop when less is left",
    "batch": "Send N messages in one packet, and fewer only at the end",
    "quota": "Refuse users who own more than N gigabytes",
    "context": "Show N lines before and behind each difference",
    "threads": "Use N threads to compute checksums",
    "interval": "Write a line of progress every N minutes",
}
_DEEDS = ("copies", "sorts", "checks", "merges", "compares", "archives", "lists", "signs", "splits", "mirrors")
_THINGS = ("records", "folders", "tables", "messages", "pictures", "journals", "invoices", "packages")
_OPTIONS = 7


class ManualPage:
    """A page of an invented program's manual. Pages have some options in common, with different defaults."""

    def __init__(self, dice: random.Random) -> None:
        program = "".join(dice.choices(SYLLABLES, k=3))
        deed, thing = dice.choice(_DEEDS), dice.choice(_THINGS)
        entries, answers = [], []
        for name in dice.sample(sorted(_SETTINGS), _OPTIONS):
            said = f"{_SETTINGS[name]}. The default is {dice.randint(2, 9999)}."
            entries.append(f"    --{name} N\n        {said}")
            answers.append((f"What does the option --{name} of {program} do, and what is its default?", said))
        name = f"{program.upper()}(1)\n\nNAME\n    {program} - {deed} {thing}"
        usage = f"SYNOPSIS\n    {program} [OPTION]... FILE..."
        options = "OPTIONS\n" + "\n".join(entries)
        self.text = f"{name}\n\n{usage}\n\n{options}\n\nFILES\n    /etc/{program}.conf\n\n"
        self.answers: tuple[tuple[str, str], ...] = tuple(answers[:3])
        """Questions about the first entries, each with the answer in the page's words."""
