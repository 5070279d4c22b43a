"""Recipes: the training configurations that come with the package, and one's own that build on them.

A recipe is a YAML file. `base:` names one or several others, a file beside it or a packaged recipe, whose values it
changes; later bases win over earlier ones, and sections are merged. `description:` is its line in `ppma recipes`. Files
whose names begin with an underscore are bases of a family.
"""

import difflib
import importlib.resources
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ppma import config as configs
from ppma.config import ConfigError, require

_FOLDER = importlib.resources.files(__name__)
_SUFFIXES = (".yaml", ".yml")

Source = Path | str  # a file, or the name of a packaged recipe


def names() -> list[str]:
    """The packaged recipes."""
    return [name for name in _packaged() if not name.startswith("_")]


def is_recipe(text: str) -> bool:
    """Whether this names a recipe where it may also name a folder."""
    return Path(text).suffix in _SUFFIXES or (text in names() and not Path(text).exists())


def description(name: str) -> str:
    """One line about a packaged recipe."""
    return _read(name).get("description", "")


def resolve(recipe: str | Path, assignments: Iterable[str] = ()) -> dict[str, Any]:
    """The values of a recipe on top of its bases, with `key=value` changes.

    Args:
        recipe: the path of a YAML file, or the name of a packaged recipe.
        assignments: see `ppma.config.override`; `steps` alone replaces `epochs`, and the other way round.
    """
    assignments = list(assignments)
    values = _resolve(_find(recipe), (), {})
    given = configs.override({}, assignments)
    return _replace_length(configs.override(values, assignments), given)


def _packaged() -> list[str]:
    return sorted(file.name.removesuffix(".yaml") for file in _FOLDER.iterdir() if file.name.endswith(".yaml"))


def _find(recipe: str | Path) -> Source:
    path, name = Path(recipe), str(recipe)
    if name in _packaged() and not path.is_file():
        return name
    if path.suffix or path.exists():
        return path
    near = difflib.get_close_matches(name[:100], names(), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "; `ppma recipes` lists them"
    raise ConfigError(f"config: expected a YAML file or the name of a recipe, got {configs.shown(name)}{hint}")


def _read(source: Source) -> dict[str, Any]:
    if isinstance(source, Path):
        return configs.read(source)
    with importlib.resources.as_file(_FOLDER / f"{source}.yaml") as path:
        return configs.read(path)


def _resolve(source: Source, above: tuple[Source, ...], done: dict[Source, dict[str, Any]]) -> dict[str, Any]:
    """Values with those of all bases; `above` are the recipes that build on this one, `done` what is resolved."""
    identity = source.resolve() if isinstance(source, Path) else source
    if identity in above:
        chain = " -> ".join(str(one) for one in (*above[above.index(identity) :], identity))
        raise ConfigError(f"{source}: base: expected recipes that do not build on themselves, got {chain}")
    if len(above) >= configs.MAX_DEPTH:
        raise ConfigError(f"{source}: base: expected at most {configs.MAX_DEPTH} recipes on one another, got more")
    if identity not in done:
        own = _read(source)
        bases, text = own.pop("base", []), own.pop("description", "")
        require(isinstance(text, str), f"{source}: description", "text", text)
        result: dict[str, Any] = {}
        for base in bases if isinstance(bases, list) else [bases]:
            require(isinstance(base, str), f"{source}: base", "the name of a recipe, or a list of names", base)
            values = _resolve(_find_base(base, source), (*above, identity), done)
            result = _replace_length(_merge(result, values), values)
        done[identity] = _replace_length(_merge(result, own), own)
    return done[identity]


def _find_base(base: str, source: Source) -> Source:
    if isinstance(source, Path):
        for path in (source.parent / base, source.parent / f"{base}.yaml"):
            if os.path.isfile(path):  # unlike Path.is_file, False for a name that is too long
                return path
    require(base in _packaged(), f"{source}: base", "a YAML file beside it or the name of a recipe", base)
    return base


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], Mapping) and isinstance(above[key], Mapping):
            both[key] = _merge(below[key], above[key])
    return both


def _replace_length(values: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Without `epochs` where only `steps` was given on top, and the other way round: a run has one length."""
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if given.get(key) is not None and other not in given:
            values.pop(other, None)
    return values
