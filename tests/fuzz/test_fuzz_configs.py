"""Mutated recipes: reading one gives a configuration or a ConfigError of one line, in a moment, and nothing else."""

import copy
import random
import time
from pathlib import Path

import pytest
import yaml

from ppma import config as configs
from ppma import recipes
from ppma.engine.config import RunConfig
from ppma.tasks.registry import load_config

RECIPES = sorted(Path(recipes.__file__).parent.glob("*.yaml"))
SECONDS = 5.0  # of CPU time for one recipe, the first import of its task included

VALUES = [
    *(None, True, False, "", " ", "x", "ü€😀", "a\nb", "null", "nan", "inf", "-inf", "1e30", "1e-400", "0x10", "1_000"),
    *(0, 1, -1, 2, 3, 1000, 2**31, 2**63, 2**64, -(2**70), 10**40, 10**400),
    *(0.0, -0.0, 0.5, 1.5, -1e-30, 1e30, 1e308, float("inf"), float("-inf"), float("nan")),
    *(
        [],
        [1],
        [None],
        [[1]],
        [0, 0],
        [1, 2],
        [1, 2, 3, 4],
        ["a", "b"],
        list(range(50)),
        {},
        {"a": 1},
        {1: 2},
        {None: None},
    ),
    *(
        {"a": {"b": {"c": []}}},
        "../..",
        "/dev/null",
        "digits",
        "ppma_tiny",
        "classification",
        "detection",
        "segmentation",
    ),
]
TEXTS = [
    *(":", "- ", "[", "]", "{", "}", "&a ", "*a", "<<: *a", "!!set ", "!!binary x", "!!python/name:os.system ", "? "),
    *(
        "\t",
        "\0",
        "\ufeff",
        "\x85",
        "\u2028",
        "---\n",
        "...\n",
        "%YAML 9.9\n",
        "|\n",
        ">\n",
        '"',
        "'",
        "#",
        "@",
        "`",
        "%",
    ),
    *("2020-13-45", "1:60:60", "0b2", "0o9", ".inf", ".nan", "~", "yes", "lr: 1\n", "task: [1]\n", "'\\x", '"\\xZZ"'),
]


def places(value, path=()):
    """Every place in a tree of mappings and lists."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, (*path, index))


def changed_tree(tree, chance):
    """The tree with a value replaced, removed, repeated, moved or renamed."""
    tree = copy.deepcopy(tree)
    *outer, key = chance.choice([place for place in places(tree) if place])
    section = tree
    for step in outer:
        section = section[step]
    kind = chance.randrange(5)
    if kind == 0:
        section[key] = copy.deepcopy(chance.choice(VALUES))
    elif kind == 1:
        del section[key]
    elif kind == 2 and isinstance(section, dict):
        name = chance.choice([str(key) + "s", str(key)[:-1], str(key).upper(), 3, None, "", "lr", "data", "root"])
        section[name] = section.pop(key)
    elif kind == 3:
        section[key] = [section[key]] if chance.random() < 0.5 else {"value": section[key]}
    else:
        other = chance.choice([place for place in places(tree) if place])
        value = tree
        for step in other:
            value = value[step]
        section[key] = copy.deepcopy(value)
    return tree


def changed_text(content, chance):
    """The file with bytes flipped, cut, repeated or put in between."""
    content = bytearray(content)
    first, last = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    kind = chance.randrange(5)
    if kind == 0 and content:
        content[min(first, len(content) - 1)] = chance.randrange(256)
    elif kind == 1:
        del content[first:last]
    elif kind == 2:
        content[first:first] = content[first:last]
    elif kind == 3:
        content[first:first] = chance.choice(TEXTS).encode() * chance.choice([1, 1, 1, 2, 100])
    else:
        del content[last:]
    return bytes(content)


def mutated(seed):
    """A recipe with a few changes, as bytes; a function of the seed."""
    chance = random.Random(seed)
    content = chance.choice(RECIPES).read_bytes()
    kind = chance.random()
    if kind < 0.6:
        # Most files are a few lines on a base, so half of the time the base's keys are mutated too.
        tree = yaml.safe_load(content) if kind < 0.3 else recipes.resolve(chance.choice(recipes.names()))
        for _ in range(chance.randint(1, 3)):
            if isinstance(tree, dict) and tree:
                tree = changed_tree(tree, chance)
        return yaml.safe_dump(tree, allow_unicode=True, sort_keys=False).encode()
    for _ in range(chance.randint(1, 4)):
        content = changed_text(content, chance)
    return content


def attempt(load):
    """A configuration, or the message of the ConfigError; anything else that is raised fails the test."""
    try:
        return load()
    except configs.ConfigError as error:
        return str(error)


def check(content, path):
    """Read it as `ppma train` would; returns whether it was accepted."""
    path.write_bytes(content)
    began = time.process_time()
    config = attempt(lambda: load_config(path))
    assert time.process_time() - began < SECONDS
    if isinstance(config, str):
        assert len(config.splitlines()) == 1
        assert len(config) < 2000
        return False
    assert isinstance(config, RunConfig)
    configs.write(config, path)
    assert load_config(path) == config
    return True


def fuzz(seeds, path):
    accepted = 0
    for seed in seeds:
        content = mutated(seed)
        try:
            accepted += check(content, path)
        except BaseException:
            print(f"seed {seed}; the file:\n{content.decode(errors='backslashreplace')}")
            raise
    # Neither all refused nor all accepted, or it tests little.
    assert 0.05 * len(seeds) < accepted < 0.8 * len(seeds)


def test_fuzz_recipes(tmp_path):
    fuzz(range(150), tmp_path / "run.yaml")


@pytest.mark.slow
def test_fuzz_recipes_at_length(tmp_path):
    fuzz(range(1000, 3000), tmp_path / "run.yaml")


@pytest.mark.parametrize("recipe", ["digits_nano", "scenes_maskrcnn_nano", "scenes_upernet_nano"])
def test_fuzz_every_key(recipe):
    """A wrong type, null, a list, a mapping, extremes, for each key of each section in turn."""
    (base,) = (path for path in RECIPES if path.stem == recipe)
    loaded = load_config(base)
    full = configs.to_dict(loaded)
    for *outer, key in (place for place in places(full) if place):
        for value in (None, "x", -1, 10**400, float("nan"), float("inf"), True, [], [[]], {"a": 1}):
            tree = copy.deepcopy(full)
            section = tree
            for step in outer:
                section = section[step]
            section[key] = value
            config = attempt(lambda tree=tree: configs.build(type(loaded), tree))
            if isinstance(config, str):
                assert "\n" not in config, (outer, key, value)
            else:
                configs.to_dict(config)
