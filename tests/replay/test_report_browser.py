"""The page in a real browser: it draws without errors, and pointer, keys and address do what they say."""

import fcntl
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from kvabr.replay.report import write_page
from kvabr.types.events import DecisionMade
from tests.replay.report_samples import early_base, hostile, live_sample, sample

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

REQUIRED = os.environ.get("KVABR_REQUIRE_BROWSER") == "1"
"""Whether a missing browser is a failure."""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None and not REQUIRED, reason="there is no Chromium: apt-get install chromium"),
]


class Browser:
    """Chromium, spoken to over a pipe in the DevTools protocol: JSON messages that end in a zero byte."""

    def __init__(self, profile: Path, width: int = 1400, height: int = 1000) -> None:
        assert CHROMIUM is not None, "KVABR_REQUIRE_BROWSER=1, and there is no Chromium: apt-get install chromium"
        to_browser, from_browser = os.pipe(), os.pipe()
        # The browser reads from descriptor 3 and writes to 4. A pipe end may already have such a number, so the ends
        # are moved out of the way here, and put in place by a process of their own.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser[0], from_browser[1])]
        for end in (to_browser[0], from_browser[1]):
            os.close(end)
        own = (f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank")
        command = [str(CHROMIUM), *FLAGS, *own]
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
            assert select.select([self._in], [], [], 300)[0], "the browser does not answer"
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
        elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "blob:")):
            self.problems.append(f"loads {params['request']['url']}")

    def open(self, path: Path, fragment: str = "") -> None:
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.resolve().as_uri() + fragment)
        end_s = time.monotonic() + 300.0
        while self.js("document.readyState") != "complete":
            assert time.monotonic() < end_s, "the page never finished"
            time.sleep(0.01)

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
        self._process.wait(timeout=300)
        os.close(self._out)
        self._in.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture
def page(browser, tmp_path):
    write_page(tmp_path / "page.html", *sample())
    browser.problems.clear()
    browser.open(tmp_path / "page.html")
    return browser


def rows(page, selector):
    return page.js(f"document.querySelectorAll({json.dumps(selector)}).length")


def type_filter(page, words):
    page.js(f"""(() => {{
        const box = document.querySelector("#log-filters input");
        box.value = {json.dumps(words)};
        box.dispatchEvent(new Event("input"));
    }})()""")


def test_everything_is_drawn_without_a_complaint(page):
    result, timelines = sample()
    assert page.problems == []
    assert rows(page, ".policies tbody tr") == len(result["summary"])
    assert rows(page, ".multiple") == len(result["summary"])
    assert rows(page, "#strip .strip span") == len(result["runs"][0]["groups"])
    shown = timelines[page.js("JSON.parse(document.getElementById('data').textContent).opening")]
    requests = sum(event.name == "request" for event in shown["log"])
    assert rows(page, ".timeline .wait") == requests
    assert rows(page, ".timeline .deadline") == 1


def test_a_prefill_that_goes_on_meanwhile_has_a_row_and_an_edge(browser, tmp_path):
    write_page(tmp_path / "page.html", *live_sample())
    browser.open(tmp_path / "page.html")
    assert rows(browser, ".timeline rect.prefill") == 12
    assert rows(browser, ".timeline path.edge") == 1
    assert "live edge" in browser.js("document.querySelector('.timeline').textContent")
    assert not browser.js("/NaN|undefined/.test(document.querySelector('.timeline').outerHTML)")
    assert browser.problems == []


def test_every_play_can_be_shown(page):
    plays = page.js("JSON.parse(document.getElementById('data').textContent).plays.length")
    for index in range(plays):
        page.js(f"location.hash = 'play={index}'; new Promise(done => setTimeout(done, 0))")
        assert page.js("document.querySelector('.timeline').getAttribute('aria-label').length") > 40
        nonsense = page.js("document.body.innerText.match(/NaN|undefined|Infinity|\\[object/)")
        assert nonsense is None
        assert not page.js("/NaN|undefined/.test(document.querySelector('.timeline').outerHTML)")
    assert page.problems == []


def test_the_pointer_scrubs_and_a_click_pins(page):
    help_text = page.text("#inspector")
    left, top, width, height = page.box(".timeline")
    page.mouse("mouseMoved", left + width * 0.5, top + height * 0.5)
    moment = page.text("#inspector")
    assert moment != help_text
    assert "lower bound" in moment
    assert "in place" in moment
    assert page.js("document.querySelector('.cursor').getAttribute('visibility')") == "visible"
    assert rows(page, ".log tr.on") == 1
    page.click(left + width * 0.5, top + height * 0.5)
    page.mouse("mouseMoved", left + width * 0.2, top + height * 0.5)
    assert page.text("#inspector") == moment, "a pinned moment stays"
    assert "t=" in page.js("location.hash")
    page.key("Escape")
    page.mouse("mouseMoved", 1, 1)
    assert page.text("#inspector") == help_text


def test_the_log_and_the_charts_point_at_each_other(page):
    left, top, width, height = page.box(".log tbody tr:nth-child(3)")
    page.mouse("mouseMoved", left + width / 2, top + height / 2)
    reason = page.text(".log tbody tr:nth-child(3) .why")
    assert reason in page.text("#inspector")
    assert page.js("document.querySelector('.cursor').getAttribute('visibility')") == "visible"
    all_rows = rows(page, ".log tbody tr")
    type_filter(page, "zzz")
    assert rows(page, ".log tbody tr") == 0
    type_filter(page, "")
    assert rows(page, ".log tbody tr") == all_rows
    page.js("document.querySelector('.chip.fetch').click()")
    assert rows(page, ".log tbody tr") < all_rows


def test_a_drag_zooms_and_keys_change_the_play(page):
    left, top, width, height = page.box(".timeline")
    before = page.js("document.querySelector('.grid text').textContent")
    page.mouse("mouseMoved", left + width * 0.4, top + height * 0.5)
    page.mouse("mousePressed", left + width * 0.4, top + height * 0.5, button="left", clickCount=1)
    page.mouse("mouseMoved", left + width * 0.6, top + height * 0.5, buttons=1)
    page.mouse("mouseReleased", left + width * 0.6, top + height * 0.5, button="left", clickCount=1)
    assert "show all" in page.text("#tools")
    assert page.js("document.querySelector('.grid text').textContent") != before
    page.key("Escape")
    assert "show all" not in page.text("#tools")
    chosen = page.text(".multiple[aria-pressed=true] .name")
    page.key("ArrowRight")
    assert page.text(".multiple[aria-pressed=true] .name") != chosen
    page.key("ArrowLeft")
    assert page.text(".multiple[aria-pressed=true] .name") == chosen
    trace = page.js("document.querySelector('#picker select').value")
    page.key("]")
    page.key("]")
    assert page.js("document.querySelector('#picker select').value") != trace


def test_an_address_names_a_play_and_a_decision(page, tmp_path):
    page.open(tmp_path / "page.html", "#play=4&decision=2")
    reason = page.text(".log tr.on .why")
    assert reason in page.text("#inspector")
    assert page.js("document.querySelector('#inspector').className") == "pinned"
    page.open(tmp_path / "page.html", "#play=999&t=nonsense&decision=-1")
    assert page.problems == []


def test_hostile_names_are_shown_not_run(browser, tmp_path):
    write_page(tmp_path / "page.html", *hostile())
    browser.problems.clear()
    browser.open(tmp_path / "page.html")
    assert browser.problems == []
    assert "</script><script>alert(1)</script>" in browser.text("#policies")
    assert browser.js("document.scripts.length") == 2


@pytest.mark.parametrize("width", [800, 390])
def test_a_narrow_window_is_not_wider_than_itself(page, width):
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
    try:
        page.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert page.js("document.documentElement.scrollWidth") <= width
        for part in (".timeline", ".policies", ".multiple .number", ".picker", ".log"):
            assert page.js(f"document.querySelector('{part}').getBoundingClientRect().right") <= width, part
        assert page.js("document.querySelector('.timeline .side').getBoundingClientRect().left") >= 0
    finally:
        page.call("Emulation.clearDeviceMetricsOverride")


def test_a_decision_shows_what_it_passed_over(browser, tmp_path):
    result, timelines = sample()
    shown = timelines[0]["log"]
    fetches = [i for i, event in enumerate(shown) if isinstance(event, DecisionMade) and event.kind == "fetch"]
    shown[fetches[1]] = replace(
        shown[fetches[1]], track="Int8", alternatives={"FP8": 0.25, "AC-5x": 4000.0, "recomputed": 7.0}
    )
    write_page(tmp_path / "page.html", result, timelines)
    browser.problems.clear()
    browser.open(tmp_path / "page.html", "#play=0")
    browser.js("document.querySelectorAll('.log .kind.fetch')[1].closest('tr').click()")
    table = browser.text("#inspector .rejected")
    assert table.split()[:3] == ["rejected", "compared", "size"]
    assert "FP8\t0.25" in table
    assert "AC-5x\t4.00 kB" in table
    assert "recomputed\t7.00" in table
    assert rows(browser, "#inspector .rejected tbody tr") == 3
    assert browser.problems == []


def test_a_play_that_was_stopped_has_a_mark(browser, tmp_path):
    result, timelines = sample()
    index = early_base(result, timelines)
    write_page(tmp_path / "page.html", result, timelines)
    browser.problems.clear()
    browser.open(tmp_path / "page.html", f"#play={(index + 1) % len(timelines)}")
    assert rows(browser, ".timeline .stop") == 0
    browser.open(tmp_path / "page.html", f"#play={index}")
    assert "stopped" in browser.js("document.querySelector('.timeline .stop text').textContent")
    assert "not worth it" in browser.js("document.querySelector('.timeline .stop title').textContent")
    left, top, width, height = browser.box(".timeline .stop .sign")
    browser.click(left + width / 2, top + height / 2)
    assert "not worth it" in browser.text("#inspector")
    assert "not worth it" in browser.text(".log tr.on .why")
    assert browser.problems == []


def test_two_policies_share_a_time_axis(page, tmp_path):
    data = page.js("JSON.parse(document.getElementById('data').textContent)")
    names = [play["policy"] for play in data["plays"]]
    here, other = names.index("cheapfirst"), names.index("fixed:Int8")
    page.open(tmp_path / "page.html", f"#play={here}")
    alone = rows(page, ".timeline .wait")
    page.js("""(() => {
        const select = document.querySelector(".versus select");
        select.selectedIndex = [...select.options].findIndex((option) => option.text === "fixed:Int8");
        select.dispatchEvent(new Event("change"));
    })()""")
    assert rows(page, ".timeline .wait") == alone + len(data["plays"][other]["requests"])
    assert rows(page, "#strip .strip") == 2
    assert "fixed:Int8" in page.text("#play-head .rival")
    assert page.js("location.hash") == f"#play={here}&with=fixed%3AInt8"
    left, top, width, height = page.box(".timeline")
    page.mouse("mouseMoved", left + width * 0.5, top + height * 0.3)
    assert "in place" in page.text("#inspector .card.rival")
    page.open(tmp_path / "page.html", f"#play={here}&with=nonsense")
    assert rows(page, ".timeline .wait") == alone
    assert page.problems == []


def test_the_timeline_is_saved_as_svg_and_png(page, tmp_path):
    page.open(tmp_path / "page.html", "#play=0&with=bola")
    saved = """new Promise((done) => {
        const create = URL.createObjectURL;
        URL.createObjectURL = (blob) => { if (blob.type === "%s") done(blob); return create(blob); };
        HTMLAnchorElement.prototype.click = () => {};
        [...document.querySelectorAll(".export button")].find((button) => button.innerText === "%s").click();
    })"""
    text = page.js(saved % ("image/svg+xml", "SVG") + ".then((blob) => blob.text())")
    root = ET.fromstring(text)  # noqa: S314  # made by our own page
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "compared with bola" in root[0].text
    assert "var(--" not in text
    assert "class=" not in text
    assert not re.search(r"(?:href|src)=|url\((?!['#])", text), "it loads nothing"
    shapes = len(list(root.iter("{http://www.w3.org/2000/svg}rect")))
    assert shapes > rows(page, ".timeline .wait")
    size = page.js(
        saved % ("image/png", "PNG") + ".then(createImageBitmap).then((image) => [image.width, image.height])"
    )
    assert size == [2 * float(root.get("width")), 2 * float(root.get("height"))]
    assert page.problems == []
