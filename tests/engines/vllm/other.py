"""Another vLLM, in a process of its own: it reads prompts from its standard input, and answers with their texts.

As a program: ``python -m tests.engines.vllm.other MODEL EXTRA ROLE OPTIONS``, the last three in JSON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


class OtherEngine:
    """vLLM with kvabr's connector in another process, which shares nothing with this one."""

    def __init__(self, model, extra, role, **options):
        given = [str(model), json.dumps(extra), json.dumps(role), json.dumps(options)]
        self._process = subprocess.Popen(  # noqa: S603  # our own command
            [sys.executable, "-m", "tests.engines.vllm.other", *given],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            text=True,
        )
        self._up = False  # it starts beside whatever else starts

    def begin(self, prompt, tokens=1, **params):
        """Have it compute a prompt once it is up, and do not wait for the text."""
        if not self._up:
            self._up = bool(self._answer())
        self._process.stdin.write(json.dumps({"prompt": list(prompt), "tokens": tokens, "params": params}) + "\n")
        self._process.stdin.flush()

    def end(self):
        """Return the answer to the begun prompt: its text, seconds to the first token, and counters."""
        return self._answer()

    def generate(self, prompt, tokens=1, **params):
        """Return the text of a prompt."""
        self.begin(prompt, tokens, **params)
        return self.end()["text"]

    def close(self):
        """End it after its publications."""
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _answer(self):
        line = self._process.stdout.readline()
        assert line, "the other engine has ended"
        return json.loads(line)


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to its standard output

    from tests.engines.vllm.engine import RealEngine

    model, *given = sys.argv[1:]
    extra, role, options = (json.loads(each) for each in given)
    engine = RealEngine(model, extra, role, **options)

    def answer(**told):
        answers.write(json.dumps(told) + "\n")
        answers.flush()

    answer(up=True)
    for line in sys.stdin:
        asked = json.loads(line)
        engine.forget()
        engine.counted()
        params = {"kv_transfer_params": asked["params"]} if asked["params"] else {}
        (text,) = engine.generate([asked["prompt"]], asked["tokens"], **params)
        first_s = engine.first_tokens_s[0]
        engine.settle()
        answer(text=list(text), first_s=first_s, counted=engine.counted())
    engine.close()


if __name__ == "__main__":
    main()
