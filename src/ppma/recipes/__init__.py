"""Recipes: training configurations of the package, and those of users that build on them.

A recipe is a YAML file. `base:` names one or several recipes that it builds on, each a file in the same folder or a
packaged recipe. Sections are merged; later bases override earlier ones, and the recipe overrides its bases.
`description:` is its line in `ppma recipes`. Packaged files with a leading underscore are bases only.
"""

import difflib
import importlib.resources
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ppma import config as configs
from ppma.config import ConfigError, require

_FOLDER = importlib.resources.files(__name__)
_SUFFIXES = (".yaml", ".yml")

Source = Path | str  # a file, or the name of a packaged recipe
Adapt = Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]]


def names() -> list[str]:
    """The packaged recipes."""
    return [name for name in _packaged() if not name.startswith("_")]


def is_recipe(text: str) -> bool:
    """Whether `text`, which may also be the path of a folder, names a recipe."""
    return Path(text).suffix in _SUFFIXES or (text in names() and not Path(text).exists())


def description(name: str) -> str:
    """The description of a packaged recipe, one line."""
    return _read(name).get("description", "")


def _keep(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    return below


def resolve(recipe: str | Path, assignments: Iterable[str] = (), adapt: Adapt = _keep) -> dict[str, Any]:
    """The values of a recipe, merged with its bases and overridden by `key=value` assignments.

    Args:
        recipe: path of a YAML file, or name of a packaged recipe.
        assignments: see `ppma.config.override`; `steps` alone replaces `epochs`, and vice versa.
        adapt: called with the values of the bases and those of a recipe (or of the assignments) before the latter
            override the former; returns the former, changed where the latter make that necessary.

    Examples:
        >>> from ppma import recipes
        >>> recipes.resolve("imagenet_ppma_tiny", ["lr=0.1"])["model_args"]
        {'formulation': 'release', 'drop_path_rate': 0.1}
    """
    assignments = list(assignments)
    values = _resolve(_find(recipe), (), {}, adapt)
    given = configs.override({}, assignments)
    values = adapt(values, given)
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


def _resolve(
    source: Source, above: tuple[Source, ...], done: dict[Source, dict[str, Any]], adapt: Adapt
) -> dict[str, Any]:
    """Merge a recipe with its bases; `above` are the recipes that build on it, `done` caches the results."""
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
            values = _resolve(_find_base(base, source), (*above, identity), done, adapt)
            result = _replace_length(_merge(result, values), values)
        done[identity] = _replace_length(_merge(adapt(result, own), own), own)
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
    """Remove `epochs` if only `steps` is given, and vice versa: a run has one length."""
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if given.get(key) is not None and other not in given:
            values.pop(other, None)
    return values
