"""The configuration reference has every key of the schema, described."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from ppma.tasks.registry import recipe_schema

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page():
    file = ROOT / "tools" / "configuration_page.py"
    specification = importlib.util.spec_from_file_location("configuration_page", file)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert module.MARKER in text
    return module.on_page_markdown(text)


def keys(schema):
    for name, value in schema.get("properties", {}).items():
        yield name
        for part in (value, *value.get("anyOf", ())):
            yield from keys(part)


def test_keys_complete(page):
    for task in recipe_schema()["anyOf"]:
        for key in set(keys(task)) - {"base", "description"}:
            assert f"| `{key}` |" in page, (task["title"], key)


def test_keys_described(page):
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*?) \|$", page, re.MULTILINE)
    assert len(rows) > 100
    assert [key for key, description in rows if not description.strip()] == []


def test_hook_registered():
    text = (ROOT / "mkdocs.yml").read_text()
    assert yaml.safe_load(text)["hooks"] == ["tools/configuration_page.py", "tools/explorer_page.py"]
