"""The documentation as a site: it builds, and its pages fit a telephone, in a real browser."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.replay.test_report_browser import CHROMIUM, REQUIRED, Browser

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 390
pytestmark = pytest.mark.slow
shown = pytest.mark.skipif(CHROMIUM is None and not REQUIRED, reason="there is no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Strict: every page is in the navigation, every link and every name of the reference leads somewhere."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: tools/setup-venv")
    folder = tmp_path_factory.mktemp("site")
    path = f"{ROOT}{os.pathsep}{ROOT / 'tools' / 'lab'}"
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    browser.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=800, deviceScaleFactor=1, mobile=True)
    # A page from a file may not fetch another one.
    points = (ROOT / "docs" / "assets" / "calculator.json").read_text()
    source = f"window.fetch = async () => ({{ json: async () => ({points}) }})"
    browser.call("Page.addScriptToEvaluateOnNewDocument", source=source)
    yield browser
    browser.close()


def test_it_builds(site):
    troubles = (site / "guides" / "troubleshooting" / "index.html").read_text()
    assert troubles.count("<dd>") == troubles.count("<dt>") > 10
    assert (site / "reference" / "glossary" / "index.html").read_text().count("<dd>") > 20
    assert "--load" in (site / "reference" / "cli" / "index.html").read_text()
    assert "Request a missing group" in (site / "reference" / "api" / "index.html").read_text()


@shown
@pytest.mark.browser
def test_the_calculator_fits_a_telephone(site, browser):
    browser.open(site / "guides" / "is-it-for-me" / "index.html")
    end_s = time.monotonic() + 300.0
    while browser.js("document.querySelector('#calculator output table') === null"):
        assert time.monotonic() < end_s, "the calculator never said anything"
        time.sleep(0.01)
    assert browser.js("document.documentElement.scrollWidth") <= WIDTH
    assert browser.js("document.querySelector('#calculator').scrollWidth") <= WIDTH
    for name in ("my own, on a GPU", "70B, H200"):
        browser.js(
            "(() => { const form = document.getElementById('calculator');"
            f"form.elements.name.value = {name!r}; form.elements.name.dispatchEvent(new Event('change')); }})()"
        )
        assert browser.js("document.documentElement.scrollWidth") <= WIDTH, name
    assert browser.js("document.querySelector('details.note').open") is False


@shown
@pytest.mark.browser
def test_definitions_have_terms_of_their_own(site, browser):
    browser.open(site / "guides" / "troubleshooting" / "index.html")
    assert browser.js("document.querySelectorAll('dl > dd').length") > 10
    assert browser.js("document.documentElement.scrollWidth") <= WIDTH
