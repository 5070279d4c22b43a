"""Configurations: frozen dataclasses filled from YAML and validated before anything is loaded.

A schema is a frozen dataclass. Its field types are validated: numbers, strings, `Literal` choices, tuples, `| None`,
free mappings (`dict`) and nested dataclasses. Ranges are validated by `require` in its `__post_init__`.
"""

import dataclasses
import difflib
import math
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml

Schema = TypeVar("Schema")

# Far above any real configuration; a larger file is damaged or hostile.
MAX_BYTES, MAX_DEPTH, MAX_VALUES = 1 << 17, 20, 20_000


class ConfigError(ValueError):
    """An invalid configuration; the message is one line and names the key."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def require(condition: bool, key: str, expected: str, got: object) -> None:
    """Raise a ConfigError about `key` unless the condition holds.

    Examples:
        >>> require(0 < 3, "lr", "a number > 0", 3)
        >>> require(0 < -1, "lr", "a number > 0", -1)
        Traceback (most recent call last):
        ppma.config.ConfigError: lr: expected a number > 0, got -1
    """
    if not condition:
        raise ConfigError(f"{key}: expected {expected}, got {shown(got)}")


def shown(value: object) -> str:
    """A value as it appears in a message: on one line, and short."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 120, 120, 40
_SHORT.maxtuple = _SHORT.maxlist = _SHORT.maxdict = 8


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses duplicate keys."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(None, None, f"duplicate key {shown(key.value)}", key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node


def _parse(text: str, source: str) -> Any:
    """Parse YAML text; `source` names it in messages."""
    try:
        value = yaml.load(text, _Loader)
        _check_size(value)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ConfigError(f"{source}: not valid YAML: {problem[:200]}{where}") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{source}: expected at most {MAX_DEPTH} nested sections, got more") from None
    except (ValueError, OverflowError, TypeError) as error:  # numbers and dates beyond Python's limits
        raise ConfigError(f"{source}: not valid YAML: {error}") from None
    return value


def _check_size(value: Any) -> None:
    """Refuse values that are recursive, or huge once aliases are expanded."""
    counted: dict[int, int] = {}

    def count(part: Any, above: tuple[int, ...]) -> int:
        if not isinstance(part, list | dict | set | tuple):
            return 1
        if id(part) in above:
            raise ConfigError("expected plain values, got a section that contains itself")
        if len(above) >= MAX_DEPTH:
            raise ConfigError(f"expected at most {MAX_DEPTH} nested sections, got more")
        if id(part) not in counted:
            inner = [*part.keys(), *part.values()] if isinstance(part, dict) else part
            counted[id(part)] = 1 + sum(count(item, (*above, id(part))) for item in inner)
            if counted[id(part)] > MAX_VALUES:
                raise ConfigError(f"expected at most {MAX_VALUES} values, got more")
        return counted[id(part)]

    count(value, ())


def read(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping."""
    path = Path(path)
    if not path.is_file():
        found = "a folder" if path.is_dir() else "none"
        raise ConfigError(f"config: expected a YAML file, found {found} at {path}")
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError(f"{path}: expected a YAML file of at most {MAX_BYTES:,} bytes, got {path.stat().st_size:,}")
    try:
        values = _parse(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected text in UTF-8, got {error.object[error.start : error.end]!r}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if values is None:
        raise ConfigError(f"{path}: expected a mapping of keys to values, got an empty file")
    require(isinstance(values, dict), str(path), "a mapping of keys to values", values)
    return values


def override(values: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Apply `key=value` assignments to a copy; dots select sections, values are YAML.

    Examples:
        >>> override({"lr": 1, "data": {"root": "a"}}, ["lr=1e-3", "data.root=b", "ema=null"])
        {'lr': '1e-3', 'data': {'root': 'b'}, 'ema': None}
    """
    result = _plain(values)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set: expected key=value, got {shown(assignment)}")
        *sections, last = key.strip().split(".")
        target = result
        for section in sections:
            if not isinstance(target.get(section), dict):
                target[section] = {}
            target = target[section]
        target[last] = _parse(text, f"--set {key}")
    return result


def build(schema: type[Schema], values: Mapping[str, Any], *, source: str = "config") -> Schema:
    """Validate `values` and build an instance of the schema.

    Args:
        schema: a frozen dataclass.
        values: as read from YAML.
        source: prefix of error messages, such as the file's path.

    Raises:
        ConfigError: names the key, what was expected and the value found.

    Examples:
        >>> from ppma.engine.config import EmaConfig
        >>> build(EmaConfig, {"decay": 0.9}).decay
        0.9
        >>> build(EmaConfig, {"decai": 0.9}, source="run.yaml")
        Traceback (most recent call last):
        ppma.config.ConfigError: run.yaml: decai: unknown key; did you mean decay?
    """
    try:
        return _section(schema, values, prefix="")
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def json_schema(kind: Any) -> dict[str, Any]:
    """The JSON schema of what `build` accepts, for editors. No key is required, since a base recipe may set it.

    Args:
        kind: a schema, or the type of a field.

    Examples:
        >>> json_schema(tuple[float, ...])
        {'type': 'array', 'items': {'type': 'number'}}
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, Union):
        return {"anyOf": [json_schema(argument) for argument in arguments]}
    if dataclasses.is_dataclass(kind):
        properties = {name: json_schema(hint) for name, hint in typing.get_type_hints(kind).items()}
        return {"type": "object", "properties": properties, "additionalProperties": False}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": json_schema(arguments[0])}
    if origin is tuple:
        items = [json_schema(argument) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    names = {float: "number", int: "integer", str: "string", bool: "boolean", dict: "object", type(None): "null"}
    return {"type": names[origin or kind]}


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a configuration to plain values for YAML; the inverse of `build`."""
    return {key: _plain(value) for key, value in dataclasses.asdict(config).items()}


def write(config: Any, path: str | Path) -> None:
    """Write the resolved configuration as YAML."""
    Path(path).write_text(yaml.safe_dump(to_dict(config), sort_keys=False), encoding="utf-8")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """List the changes between two configurations, as `key: old -> new`.

    Examples:
        >>> differences({"lr": 0.1, "ema": {"decay": 0.9}}, {"lr": 0.2, "ema": {"decay": 0.9}})
        ['lr: 0.1 -> 0.2']
    """
    changes: list[str] = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            changes.append(f"{prefix}{key}: {shown(before)} -> {shown(after)}")
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
            near = difflib.get_close_matches(str(key)[:100], fields, n=1, cutoff=0.5)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"valid keys: {', '.join(fields)}"
            raise ConfigError(f"{prefix}{_name(key)}: unknown key; {hint}")
    for name, field in fields.items():
        if name not in values and _required(field):
            raise ConfigError(f"{prefix}{name}: missing key")
    checked = {key: _value(hints[key], value, f"{prefix}{key}") for key, value in values.items()}
    try:
        return schema(**checked)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None


def _name(key: Any) -> str:
    return key if isinstance(key, str) and key.isidentifier() and len(key) < 100 else shown(key)


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _value(kind: Any, value: Any, key: str) -> Any:
    """Validate `value` as the type `kind`; floats also accept whole numbers and strings like "1e-3"."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, Union):
        if value is None and type(None) in arguments:
            return None
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        return _value(inner, value, key)
    if dataclasses.is_dataclass(kind):
        return _section(kind, value, f"{key}.")
    if origin is Literal:
        near = difflib.get_close_matches(str(value)[:100].lower(), [str(word) for word in arguments], n=1, cutoff=0.4)
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
            number = float(value)
        except OverflowError:
            number = math.inf
        except ValueError:
            raise ConfigError(f"{key}: expected a number, got {shown(value)}") from None
        require(math.isfinite(number), key, "a finite number", value)
        return number
    if kind is not float and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        require(kind is not int or abs(value) < 2**63, key, "a whole number of at most 64 bits", value)
        return value
    names = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}
    raise ConfigError(f"{key}: expected {names[kind]}, got {shown(value)}")


def _tuple(arguments: tuple[Any, ...], value: Any, key: str) -> tuple[Any, ...]:
    require(isinstance(value, list | tuple), key, "a list", value)
    if arguments[-1] is Ellipsis:
        kinds = (arguments[0],) * len(value)
    else:
        require(len(value) == len(arguments), key, f"a list of {len(arguments)} entries", value)
        kinds = arguments
    return tuple(_value(kind, item, f"{key}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))
