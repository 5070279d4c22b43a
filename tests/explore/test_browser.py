"""The explorer in Chromium, served and as a file: clicks, keys, links, playground, uploads, phone width, dark mode."""

import re
import threading
import xml.etree.ElementTree as ElementTree
from urllib.parse import parse_qs, urlsplit

import browser
import pytest
from PIL import Image

from ppma.explore import images, page, server, subject
from ppma.tasks.segmentation.inside import segmenter_subject

pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'ppma[dev]'")
pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
PATIENCE = 60_000  # milliseconds: a machine may be busy


@pytest.fixture(scope="module")
def chromium():
    with browser.browser() as launched:
        yield launched


@pytest.fixture(scope="module")
def static(nano, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "explorer.html"
    page.write_page(nano, {name: images.find_image(name) for name in ("shapes", "cat")}, path)
    return path.as_uri()


@pytest.fixture
def tab(chromium):
    """A tab that fails the test at an error of the page, or a request to anywhere but the page's own address."""
    opened, asked, complaints = chromium.new_page(viewport=browser.DESKTOP), [], []
    opened.set_default_timeout(PATIENCE)
    opened.on("request", lambda request: asked.append(request.url))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    yield opened
    address = re.match(r"[a-z]+://[^/]*", opened.url)[0]
    opened.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []


def click(tab, selector, x, y):
    """Click at a fraction of an element's width and height."""
    box = tab.locator(selector).bounding_box()
    tab.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])


def pixels(tab, panel):
    return tab.evaluate("n => document.querySelectorAll('#panels canvas')[n].toDataURL()", panel)


def link(tab):
    return {name: values[0] for name, values in parse_qs(urlsplit(tab.url).fragment).items()}


def saved_svg(tab, path):
    with tab.expect_download() as download:
        tab.click("#save")
    download.value.save_as(path)
    return ElementTree.parse(path).getroot()


def test_click_moves_query(static, tab):
    tab.goto(static)
    before = pixels(tab, 2), pixels(tab, 5)
    click(tab, "#picture img", 0.26, 0.76)
    assert "Query: token (25, 9) of 32 × 32." in tab.inner_text("#caption")
    assert pixels(tab, 2) != before[0]
    assert pixels(tab, 5) != before[1]
    taken = []
    for place in (0.2, 0.4, 0.6):
        click(tab, "#picture img", place, place)
        taken.append(float(tab.get_attribute("#panels", "data-milliseconds")))
    assert min(taken) < 200  # the machine may be busy; idle, a click takes about 10
    click(tab, "#panels figure:nth-child(3) canvas", 0.5, 0.1)
    assert "token (4, 17)" in tab.inner_text("#caption")
    tab.focus("#picture")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")
    assert "token (5, 18)" in tab.inner_text("#caption")


def test_caption_names_every_choice(static, tab):
    tab.goto(static)
    said = tab.inner_text("#caption")
    for part in (
        "ppma_nano (random weights), stage 1, block 1: criss-cross attention, mean over 2 heads.",
        "Mask: 2d (the model’s own). Formulation: paper (the model’s own), the mask after the softmax.",
        "Decays: set from the image’s edges, not learned. Strength: 1.",
    ):
        assert part in said
    tab.select_option("#layer", "4")
    tab.select_option("#head", "2")
    tab.select_option("#mask", "v2h")
    tab.select_option("#formulation", "release")
    tab.select_option("#decays", "")
    tab.fill("#strength", "2.5")
    said = tab.inner_text("#caption")
    for part in (
        "stage 3, block 2: full attention, head 3 of 3.",
        "Mask: v2h (changed). Formulation: release (changed), the mask inside the softmax.",
        "Decays: of random weights, not learned. Strength: 2.5.",
    ):
        assert part in said


def test_permalink_restores_view(static, tab, chromium):
    tab.goto(static)
    tab.click("#samples [data-name=cat]")
    tab.select_option("#layer", "1")
    tab.select_option("#mask", "hilbert")
    click(tab, "#picture img", 0.1, 0.9)
    assert link(tab) | {"at": ""} == {
        "tab": "image", "image": "cat", "at": "", "layer": "1", "head": "-1", "decays": "edges", "mask": "hilbert",
        "strength": "1",
    }  # fmt: skip
    other = chromium.new_page()
    other.goto(tab.url)
    assert other.inner_text("#caption") == tab.inner_text("#caption")
    assert pixels(other, 4) == pixels(tab, 4)
    other.close()
    tab.goto(f"{static}#layer=99&head=x&at=7&mask=nothing&strength=-1&image=none")
    assert "Strength: 1. Query: token (3, 3) of 4 × 4" in tab.inner_text("#caption")


def test_segmentation_shown(chromium, tmp_path):
    """Shares of the pixels in the colours of the overlay, which can be switched off; logarithmic colours."""
    opened = subject.from_checkpoint("upernet_ppma_nano.pets")
    page.write_page(
        segmenter_subject(opened, "upernet_ppma_nano.pets"), {"dog": images.find_image("dog")}, tmp_path / "pets.html"
    )
    tab = chromium.new_page(viewport=browser.DESKTOP)
    tab.goto((tmp_path / "pets.html").as_uri())
    assert "Prediction of upernet_ppma_nano.pets: share of the pixels" in tab.inner_text("#prediction")
    bar = "getComputedStyle(document.querySelectorAll('#prediction .bar')[1]).backgroundColor"
    assert tab.evaluate(bar) == "rgb(255, 140, 0)"
    overlay = "getComputedStyle(document.querySelector('#picture .overlay')).backgroundImage"
    assert tab.evaluate(overlay).startswith('url("data:image/png')
    tab.uncheck("#overlay input")
    assert tab.evaluate(overlay) == "none"
    before = [pixels(tab, panel) for panel in range(5)]
    tab.select_option("#scale", "log")
    changed = [pixels(tab, panel) != before[panel] for panel in range(5)]
    assert changed == [False, False, True, True, True]
    assert link(tab)["scale"] == "log"
    assert "log" in tab.inner_text("#panels figure:nth-child(3) .scale")
    assert "log" in ElementTree.tostring(saved_svg(tab, tmp_path / "saved.svg"), encoding="unicode")
    tab.close()


def test_prediction_without_overlay(static, tab):
    tab.goto(static)
    assert tab.is_hidden("#overlay")


def test_image_saved_as_svg(static, tab, tmp_path):
    tab.goto(static)
    svg = saved_svg(tab, tmp_path / "attention.svg")
    assert len(svg.findall(".//{*}rect")) > 6 * 32 * 32
    assert "Mask: 2d" in " ".join(text.text for text in svg.findall(".//{*}text"))


def test_playground_query_key_walls(static, tab, tmp_path):
    tab.goto(f"{static}#tab=grid")
    weights = "#board text"
    tab.select_option("#preset", "open")
    assert tab.locator(weights).all_text_contents()[:3] == ["0.81", "0.90", "0.81"]
    tab.click("[data-tool=query]")
    click(tab, "#board", 0.5 / 6, 0.5 / 5)
    tab.click("[data-tool=key]")
    click(tab, "#board", 2.5 / 6, 1.5 / 5)
    assert tab.inner_text("#products").splitlines()[0] == "V2H: 0.90 × 0.90 × 0.90 = 0.729"
    tab.click("[data-tool=wall]")
    box = tab.locator("#board").bounding_box()
    side = box["width"] / 6
    tab.mouse.move(box["x"] + side, box["y"] + side / 2)
    tab.mouse.down()
    tab.mouse.move(box["x"] + side, box["y"] + 1.5 * side, steps=5)
    tab.mouse.up()
    # α of (1, 2) and (2, 2) is a wall now: both paths cross it.
    products = tab.inner_text("#products").splitlines()
    assert products == ["V2H: 0.90 × 0.90 × 0.10 = 0.081", "H2V: 0.90 × 0.10 × 0.90 = 0.081"]
    assert tab.locator(weights).all_text_contents()[:3] == ["1.00", "0.10", "0.09"]
    address, board = tab.url, tab.inner_html("#board")
    assert len(saved_svg(tab, tmp_path / "grid.svg").findall(".//{*}text")) == 30
    tab.goto("about:blank")
    tab.goto(address)
    assert tab.inner_html("#board") == board
    tab.click("[data-tool=erase]")
    click(tab, "#board", 1 / 6, 0.5 / 5)
    assert tab.locator(weights).all_text_contents()[1] == "0.90"


def test_playground_scan_steps(static, tab):
    tab.goto(f"{static}#tab=grid")
    tab.select_option("#shown", "steps-v2h")
    assert "0 of 24: input x" in tab.inner_text("#step-value")
    tab.fill("#step", "24")
    assert "every row is complete" in tab.inner_text("#step-value")
    tab.select_option("#shown", "2d")
    tab.fill("#rows", "8")
    assert tab.locator("#board text").count() == 8 * 6
    tab.fill("#rows", "99")
    assert tab.locator("#board text").count() == 8 * 6


@pytest.mark.parametrize("view", ["image", "grid"])
def test_phone_width(view, static, chromium):
    phone = chromium.new_page(viewport=browser.PHONE, has_touch=True, is_mobile=True)
    phone.goto(f"{static}#tab={view}")
    assert phone.evaluate("document.documentElement.scrollWidth") == browser.PHONE["width"]
    small = """[...document.querySelectorAll("button, select, #board text")].filter((shown) => {
        const [box] = shown.getClientRects();
        return box && box.height < (shown.ownerSVGElement ? 12 : 40);
    }).length"""
    assert phone.evaluate(small) == 0, "buttons for fingers, numbers for eyes"
    phone.close()


def test_dark_mode(static, chromium):
    dark = chromium.new_page(color_scheme="dark")
    dark.goto(static)
    background = "getComputedStyle(document.body).backgroundColor"
    assert dark.evaluate(background) == "rgb(18, 22, 28)"
    dark.click("#theme")
    assert dark.evaluate(background) == "rgb(255, 255, 255)"
    assert link(dark)["theme"] == "light"
    dark.close()


def test_served_samples_and_uploads(nano, tab, tmp_path):
    broken, good = tmp_path / "broken.png", tmp_path / "good.png"
    broken.write_text("not a picture")
    Image.effect_noise((64, 64), 60).save(good)
    with server.Server(nano, images.find_image("shapes"), "shapes") as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            tab.goto(running.url)
            before = tab.get_attribute("#picture img", "src")
            tab.click("#samples [data-name=coffee]")
            tab.wait_for_function("before => document.querySelector('#picture img').src != before", arg=before)
            tab.set_input_files("#upload input", broken)
            tab.get_by_text("image: expected a picture").wait_for()
            tab.set_input_files("#upload input", good)
            tab.wait_for_selector("#samples [data-name=upload][aria-pressed=true]")
            assert tab.is_hidden("#message")
            tab.goto(f"{running.url}#image=rocket")
            tab.wait_for_selector("#samples [data-name=rocket][aria-pressed=true]")
        finally:
            running.shutdown()
            thread.join()
        running.server_close()
        tab.click("#samples [data-name=cat]")
        tab.get_by_text("is `ppma explore` still running?").wait_for()
