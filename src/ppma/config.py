"""Configurations: frozen dataclasses filled from YAML, checked before anything is loaded.

A schema is a frozen dataclass whose field types say what a key takes: numbers, words, `Literal` choices, tuples,
`| None`, free mappings (`dict`) and nested dataclasses. What a type cannot say, its `__post_init__` checks with
`require`.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml

Schema = TypeVar("Schema")


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key."""


def require(condition: bool, key: str, expected: str, got: object) -> None:
    """Raise a ConfigError about `key` unless the condition holds."""
    if not condition:
        raise ConfigError(f"{key}: expected {expected}, got {got!r}")


def read(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"config: expected a YAML file, found none at {path}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, got {type(values).__name__}")
    return values


def override(values: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """A copy with `key=value` assignments applied; dots reach into sections, values are YAML.

    Example:
        >>> override({"lr": 1, "data": {"root": "a"}}, ["lr=1e-3", "data.root=b", "ema=null"])
        {'lr': '1e-3', 'data': {'root': 'b'}, 'ema': None}
    """
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set: expected key=value, got {assignment!r}")
        *sections, last = key.strip().split(".")
        target = result
        for section in sections:
            if not isinstance(target.get(section), dict):
                target[section] = {}
            target = target[section]
        try:
            target[last] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"--set {key}: expected a YAML value, got {text!r}") from None
    return result


def build(schema: type[Schema], values: Mapping[str, Any], *, source: str = "config") -> Schema:
    """An instance of the schema, or a ConfigError that names the key, what was expected and what came.

    Args:
        schema: a frozen dataclass.
        values: as read from YAML.
        source: named in messages.
    """
    try:
        return _section(schema, values, prefix="")
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def to_dict(config: Any) -> dict[str, Any]:
    """Plain values for YAML, the inverse of `build`."""
    return {key: _plain(value) for key, value in dataclasses.asdict(config).items()}


def write(config: Any, path: str | Path) -> None:
    """Write the resolved configuration as YAML."""
    Path(path).write_text(yaml.safe_dump(to_dict(config), sort_keys=False), encoding="utf-8")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What changed between two configurations, as lines `key: old -> new`."""
    changes: list[str] = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            changes.append(f"{prefix}{key}: {before!r} -> {after!r}")
    return changes


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _section(schema: Any, values: Any, prefix: str) -> Any:
    where = prefix.rstrip(".") or "config"
    require(isinstance(values, Mapping), where, "a mapping of keys to values", values)
    hints = typing.get_type_hints(schema)
    fields = {field.name: field for field in dataclasses.fields(schema)}
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.5)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"valid keys: {', '.join(fields)}"
            raise ConfigError(f"{prefix}{key}: unknown key; {hint}")
    for name, field in fields.items():
        if name not in values and _required(field):
            raise ConfigError(f"{prefix}{name}: missing key")
    checked = {key: _value(hints[key], value, f"{prefix}{key}") for key, value in values.items()}
    try:
        return schema(**checked)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _value(kind: Any, value: Any, key: str) -> Any:
    """`value` as the type `kind`; a whole number may stand for a float, as may a text like 1e-3 that YAML left one."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, Union):
        if value is None and type(None) in arguments:
            return None
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        return _value(inner, value, key)
    if dataclasses.is_dataclass(kind):
        return _section(kind, value, f"{key}.")
    if origin is Literal:
        near = difflib.get_close_matches(str(value).lower(), [str(word) for word in arguments], n=1, cutoff=0.4)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        require(value in arguments, key, f"one of {', '.join(map(repr, arguments))}{hint}", value)
        return value
    if origin is tuple:
        return _tuple(arguments, value, key)
    if origin is dict:
        require(isinstance(value, Mapping), key, "a mapping", value)
        return dict(value)
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    elif isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    names = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}
    raise ConfigError(f"{key}: expected {names[kind]}, got {value!r}")


def _tuple(arguments: tuple[Any, ...], value: Any, key: str) -> tuple[Any, ...]:
    require(isinstance(value, list | tuple), key, "a list", value)
    if arguments[-1] is Ellipsis:
        kinds = (arguments[0],) * len(value)
    else:
        require(len(value) == len(arguments), key, f"a list of {len(arguments)} entries", value)
        kinds = arguments
    return tuple(_value(kind, item, f"{key}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))
