"""The page in a real browser: it draws without errors, and pointer, keys and address do what they say."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvabr.replay.report import write_page
from tests.replay.report_samples import hostile, sample

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


class Browser:
    """Chromium, spoken to over a pipe in the DevTools protocol: JSON messages that end in a zero byte."""

    def __init__(self, profile: Path, width: int = 1400, height: int = 1000) -> None:
        to_browser, from_browser = os.pipe(), os.pipe()
        # The browser reads from descriptor 3 and writes to 4. A pipe end may already have such a number, so the ends
        # are moved out of the way here, and put in place by a process of their own.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser[0], from_browser[1])]
        for end in (to_browser[0], from_browser[1]):
            os.close(end)
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"]
        place = f"import os, sys; os.dup2({ends[0]}, 3); os.dup2({ends[1]}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        self._process = subprocess.Popen(  # noqa: S603  # the browser found on the path
            [sys.executable, "-c", place, *command], pass_fds=ends, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        for end in ends:
            os.close(end)
        self._out, self._in = to_browser[1], os.fdopen(from_browser[0], "rb", buffering=0)
        self._rest, self._count, self._session = b"", 0, None
        self.problems: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(info["targetId"] for info in targets if info["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Page", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params):
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]
            self._notice(answer)

    def _next(self):
        while b"\0" not in self._rest:
            more = self._in.read(1 << 16)
            assert more, "the browser is gone"
            self._rest += more
        line, self._rest = self._rest.split(b"\0", 1)
        return json.loads(line)

    def _notice(self, event) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning"}:
            self.problems.append(json.dumps(params["args"])[:500])
        elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith("file:"):
            self.problems.append(f"loads {params['request']['url']}")

    def open(self, path: Path, fragment: str = "") -> None:
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.resolve().as_uri() + fragment)
        for _ in range(200):
            if self.js("document.readyState") == "complete":
                return
        raise AssertionError("the page never finished")

    def js(self, expression: str):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        self.mouse("mouseReleased", x, y, button="left", clickCount=1)

    def key(self, key: str) -> None:
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def box(self, selector: str) -> tuple[float, float, float, float]:
        script = f"""(() => {{
            const node = document.querySelector({json.dumps(selector)});
            node.scrollIntoView({{block: "center"}});
            const box = node.getBoundingClientRect();
            return [box.left, box.top, box.width, box.height];
        }})()"""
        return tuple(self.js(script))

    def text(self, selector: str) -> str:
        return self.js(f"document.querySelector({json.dumps(selector)}).innerText")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._out)
        self._in.close()
