"""The site builds strictly, works without a network, and its reference shows public names only."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_resources_local(site):
    """Scripts, styles, fonts and pictures are files of the site."""
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text())
        for source in re.findall(r'(?:src|href)="([^"]+)"', " ".join(tags)):
            assert not source.startswith(("http:", "https:", "//")), (page.name, source)
    css = (site / "assets" / "katex" / "katex.min.css").read_text()
    for font in re.findall(r"url\(([^)]+)\)", css):
        assert (site / "assets" / "katex" / font).is_file()


def test_reference_public(site):
    for page in (site / "api").glob("*.html"):
        text = page.read_text()
        assert "TypeVar" not in text, page.name
        assert re.findall(r'<h\d id="(ppma[^"]*\._[^"]*)"', text) == [], page.name
        assert "&gt;&gt;&gt;" not in re.sub(r"<code.*?</code>", "", text, flags=re.DOTALL), (
            page.name
        )  # examples as code


def test_search_prose_first(site):
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    reference = [entry for entry in entries if entry["location"].startswith("api/")]
    assert reference
    assert all(entry.get("boost", 1) < 1 for entry in reference)
    assert all(entry.get("boost", 1) == 1 for entry in entries if not entry["location"].startswith("api/"))


def test_explorer_embedded(site):
    assert '<iframe src="explorer.html#embed=1' in (site / "index.html").read_text()
    explorer = (site / "explorer.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!data:|#|\$)[^"]', explorer)  # self-contained


def test_configuration_generated(site):
    assert "written by tools/" not in (site / "configuration.html").read_text()
    assert "weight_decay_groups" in (site / "configuration.html").read_text()


def test_pages_on_a_phone(site):
    """In Chromium: no formula fails, no page scrolls sideways, search works."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = next((path for path in ("/usr/bin/chromium", "/usr/bin/google-chrome") if Path(path).exists()), None)
    if chromium is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 844})
        failures = []
        page.on("pageerror", lambda error: failures.append(error))
        for name in (
            "index",
            "mathematics",
            "glossary",
            "configuration",
            "results",
            "api/ppma",
            "paper-versus-release",
        ):
            page.goto((site / f"{name}.html").as_uri())
            assert page.locator(".katex-error").count() == 0, name
            assert page.locator(".arithmatex").count() == page.locator(".arithmatex .katex-html").count(), name
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        page.goto((site / "mathematics.html").as_uri())
        assert page.locator(".katex").count() > 50
        page.locator('label[for="__search"]').first.click()  # search, from the file system
        page.keyboard.type("glossary")
        result = page.locator(".md-search-result__link").first
        result.wait_for(timeout=20_000)
        assert "glossary.html" in result.get_attribute("href")
        assert failures == []
        browser.close()
