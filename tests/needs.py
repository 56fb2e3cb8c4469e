"""Why tests are skipped, and behind the colon the command that runs them; those that several tests share."""

import re
from pathlib import Path

ORDINARY_USER = (
    "root may read and write everything: "
    "setpriv --bounding-set -dac_override,-dac_read_search --inh-caps -dac_override,-dac_read_search tools/test"
)
OLD_PEFT = "this transformers takes adapters of a newer PEFT only: pip install --upgrade peft"
GEMMA = "there is no Gemma 3 270M: KVABR_GEMMA=DIR tools/engine vllm, with DIR from tools/gemma-model"


def may_read_everything() -> bool:
    """Return whether the permissions of files do not hold for this process: it is root's, with its capabilities."""
    status = Path("/proc/self/status")
    found = re.search(r"CapEff:\s*(\w+)", status.read_text()) if status.exists() else None
    return found is not None and bool(int(found[1], 16) & 0b110)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
