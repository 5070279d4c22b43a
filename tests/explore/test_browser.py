"""The explorer in a real browser: it loads from nowhere else, a click moves the query, bad files get a message."""

import shutil

import pytest
from PIL import Image

from ppma.explore import images

pytest.importorskip("gradio", reason="the explorer needs gradio: pip install 'ppma[explore]'")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'ppma[dev]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
PATIENCE = 60_000  # milliseconds: a machine may be busy


@pytest.fixture
def address(nano):
    from ppma.explore import app

    page = app.build(nano, images.find_image("shapes"))
    yield app.launch(page)
    page.close(verbose=False)


def _edit(page, cells, index, text):
    page.locator(cells).nth(index).dblclick()
    page.keyboard.press("Control+A")
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def test_page_click_changes_panels(address, tmp_path):
    assert address.startswith("http://127.0.0.1:")
    broken, large = tmp_path / "broken.png", tmp_path / "large.png"
    broken.write_text("not a picture")
    Image.new("1", (7000, 7000)).save(large)
    asked, complaints = [], []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1040})
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))

        def changes(selector, action):
            before = page.get_attribute(f"{selector} img", "src")
            action()
            page.wait_for_function("([s, b]) => document.querySelector(s + ' img').src != b", arg=[selector, before])

        page.goto(address)
        page.wait_for_selector("#panels img")
        picture = page.locator("#picture img")
        size = picture.bounding_box()
        place = {"x": size["width"] * 0.26, "y": size["height"] * 0.76}
        changes("#panels", lambda: picture.click(position=place))
        assert "Token (25, 9) of 32 x 32" in page.inner_text("#said")
        page.screenshot(path=tmp_path / "explorer.png", full_page=True)

        changes("#panels", lambda: page.locator("#samples button.thumbnail-item").first.click())
        for file, message in ((broken, "cannot be read"), (large, "at most 40 megapixels")):
            with page.expect_file_chooser() as chooser:
                page.click("#upload")
            chooser.value.set_files(file)
            page.get_by_text(message).wait_for()

        strength = page.locator("#strength input[type=number]")
        strength.fill("4")
        changes("#panels", lambda: [strength.press(key) for key in ("Enter", "Tab")])

        page.get_by_role("tab", name="Grid playground").click()
        changes("#scan", lambda: page.click("#next"))
        changes("#masks", lambda: _edit(page, "#alpha [role=gridcell]", 2, "0.05"))
        _edit(page, "#alpha [role=gridcell]", 3, "7")
        page.get_by_text("expected a number in [0, 1] in row 1, column 4, got 7").first.wait_for()
        browser.close()
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
    assert complaints == []
    with Image.open(tmp_path / "explorer.png") as screenshot:
        assert screenshot.width == 1280
