"""The configuration reference of the site: every key of a recipe with its type, default and description.

`make docs` puts it in place of a marker in docs/configuration.md (a hook of MkDocs, see mkdocs.yml), so that the page
cannot be out of date. Descriptions are the `Attributes:` of the dataclasses that validate recipes.
"""

import dataclasses
import inspect
import re
import types
import typing
from typing import Any, Literal

MARKER = "<!-- the keys, written by tools/configuration_page.py -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this for every page."""
    return markdown.replace(MARKER, render()) if MARKER in markdown else markdown


def render() -> str:
    """The sections in Markdown: the keys of every run, then those of each task."""
    from ppma.engine.config import RunConfig
    from ppma.tasks.registry import TASKS, task_class

    common = {field.name for field in dataclasses.fields(RunConfig)}
    parts = ["## Every task", _table(RunConfig), *_nested(RunConfig, common, "")]
    for task in TASKS:
        schema = task_class(task).schema
        own = {field.name for field in dataclasses.fields(schema)} - common
        parts += [f"## {task.capitalize()}", _table(schema, own), *_nested(schema, own | {"data"}, f"{task}: ")]
    return "\n\n".join(parts)


def _nested(schema: type, names: set[str], prefix: str) -> list[str]:
    """A section for each key that is a dataclass itself."""
    parts = []
    for name, hint in typing.get_type_hints(schema).items():
        for kind in (hint, *typing.get_args(hint)):
            if name in names and dataclasses.is_dataclass(kind) and isinstance(kind, type):
                intro = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:")[0].strip()
                parts += [
                    f"### {prefix}`{name}:`",
                    intro,
                    _table(kind),
                    *_nested(kind, _names(kind), f"{prefix}{name}."),
                ]
    return parts


def _names(schema: type) -> set[str]:
    return {field.name for field in dataclasses.fields(schema)}


def _table(schema: type, names: set[str] | None = None) -> str:
    hints, described = typing.get_type_hints(schema), descriptions(schema)
    rows = ["| key | values | default | |", "| --- | --- | --- | --- |"]
    for field in dataclasses.fields(schema):
        if names is None or field.name in names:
            text = re.sub(r"see `\w+Config`", "below", described.get(field.name, "")).replace("|", "\\|")
            text = re.sub(r"\bNone\b", "`null`", text)
            rows.append(f"| `{field.name}` | {_values(hints[field.name])} | {_default(field)} | {text} |")
    return "\n".join(rows)


def descriptions(schema: type) -> dict[str, str]:
    """The `Attributes:` of a dataclass and of those that it extends."""
    found: dict[str, str] = {}
    for kind in reversed(schema.__mro__):
        _, _, text = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
        text = re.split(r"\n(?=\S)", text)[0]
        for entry in re.split(r"\n(?= {4}\w)", "\n" + text):
            name, _, description = entry.strip().partition(":")
            if name:
                found[name] = " ".join(description.split())
    return found


def _values(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return ", ".join(_values(argument) for argument in arguments)
    if origin is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {_values(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(_values(argument) for argument in arguments)}]"
    if dataclasses.is_dataclass(hint):
        return "keys below"
    names = {float: "number", int: "whole number", str: "text", bool: "`true`, `false`", type(None): "`null`"}
    return names.get(origin or hint, "keys")


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    if dataclasses.is_dataclass(value):
        return ""
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower().replace('none', 'null')}`"
    return f"`{list(value) if isinstance(value, tuple) else value or repr(value)}`"
