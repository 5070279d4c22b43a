"""Every page is in the navigation, and what pages and README name exists: links, files, commands, options, names."""

import argparse
import itertools
import pkgutil
import re
from pathlib import Path

import pytest
import yaml

from ppma_cli import COMMANDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b|\.\.\.")  # NAME, FOLDER, ...

by_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def in_navigation(entry):
    if isinstance(entry, str):
        return [entry]
    return [page for item in (entry.values() if isinstance(entry, dict) else entry) for page in in_navigation(item)]


def code(page):
    """The lines of code blocks that are not Python, and code in the text."""
    text = re.sub(r"```py(thon)?\n.*?```", "", page.read_text(), flags=re.DOTALL)
    fenced = re.compile(r"```.*?```", re.DOTALL)
    blocks = [line for block in fenced.findall(text) for line in block.splitlines()]
    text = fenced.sub("", text)
    indented = re.findall(r"^    (.*)$", text, re.MULTILINE)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    return [*blocks, *indented, *spans]


def options_of(parser):
    """The options of a command, with those of its subcommands."""
    names = set()
    for action in parser._actions:
        names |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            names |= {name for sub in action.choices.values() for name in options_of(sub)}
    return names


def subcommands_of(parser):
    """What may stand first, for a command that takes one of some words there."""
    first = next((action for action in parser._actions if not action.option_strings), None)
    return set(first.choices or ()) if first else set()


def parser_of(command):
    parser = argparse.ArgumentParser()
    COMMANDS[command].add_arguments(parser)
    return parser


def test_navigation_complete():
    navigation = in_navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(navigation) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@by_page
def test_page_links(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@by_page
def test_page_files(page):
    for name in re.findall(r"\b(?:src|tests|docs|examples)/[\w./{},*-]*\w", page.read_text()):
        choices = [part.split(",") for part in re.findall(r"\{(.*?)\}", name)]
        template = re.sub(r"\{.*?\}", "{}", name)
        for chosen in itertools.product(*choices):
            path = template.format(*chosen)
            assert PLACEHOLDER.search(path) or (ROOT / path).exists(), path


@by_page
def test_page_commands(page):
    for line in code(page):
        found = re.match(r"(?:.*-m )?ppma ([a-z]\S*)(.*)", line)
        if found is None or line.startswith("from "):
            continue
        command, rest = found.groups()
        assert command in COMMANDS, line
        parser = parser_of(command)
        rest = rest.partition(" #")[0]
        assert set(re.findall(r"(?<=\s)--[a-z-]+", rest)) <= options_of(parser), line
        subcommand = re.match(r" ([a-z][a-z0-9-]*)", rest)
        if subcommand and subcommands_of(parser):
            assert subcommand[1] in subcommands_of(parser), line


@by_page
def test_page_names(page):
    for line in code(page):
        if re.fullmatch(r"ppma(\.\w+)+", line):
            pkgutil.resolve_name(line)


def test_pictures_size_and_use():
    text = "".join(page.read_text() for page in PAGES)
    for picture in (DOCS / "images").iterdir():
        assert picture.stat().st_size < 400_000, picture
        assert f"images/{picture.name}" in text, picture
