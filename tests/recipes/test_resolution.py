"""How recipes build on others, from files and from the package."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import ppma
from ppma import config as configs
from ppma import recipes
from ppma.config import ConfigError
from ppma.tasks.registry import load_config
from ppma_cli import main


@pytest.fixture
def write(tmp_path):
    def write(name, **values):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


def test_base_packaged(write):
    path = write("mine", base="digits_nano", lr=0.1, data={"image_size": 48}, description="mine")
    packaged, own = recipes.resolve("digits_nano"), recipes.resolve(path)
    assert own == {**packaged, "lr": 0.1, "data": {**packaged["data"], "image_size": 48}}
    assert load_config(path, ["lr=0.2"]).lr == 0.2


def test_base_files_in_order(write):
    write("one", a={"x": 1, "y": 1}, b=1)
    write("two", a={"y": 2, "z": [1, 2]}, b={"c": 2})
    path = write("three", base=["one", "two.yaml"], a={"z": [3]})
    assert recipes.resolve(path) == {"a": {"x": 1, "y": 2, "z": [3]}, "b": {"c": 2}}


def test_base_used_twice(write):
    write("root", a=1)
    write("left", base="root", b=1)
    write("right", base="root", a=2)
    assert recipes.resolve(write("top", base=["left", "right"])) == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("other", r"mine.yaml: base: expected recipes that do not build on themselves, got .* -> .*other.yaml -> .*"),
        ("mine", r"mine.yaml: base: expected recipes that do not build on themselves, got .* -> .*"),
        (
            "digits_nanno",
            r"mine.yaml: base: expected a YAML file beside it or the name of a recipe, got 'digits_na",
        ),
        (3, r"mine.yaml: base: expected the name of a recipe, or a list of names, got 3"),
        ({"x": 1}, r"mine.yaml: base: expected the name of a recipe"),
    ],
)
def test_base_errors(write, base, message, capsys):
    write("other", base="mine")
    path = write("mine", base=base)
    with pytest.raises(ConfigError, match=message):
        recipes.resolve(path)
    assert main(["train", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_name_unknown():
    with pytest.raises(ConfigError, match="got 'digits_nanno'; did you mean 'digits_nano'"):
        recipes.resolve("digits_nanno")


@pytest.mark.parametrize(
    ("recipe", "assignments", "length"),
    [
        ("digits_nano", ["steps=3"], (None, 3)),
        ("digits_nano", ["epochs=2"], (2, None)),
        ("digits_nano", ["epochs=null", "steps=3"], (None, 3)),
        ("ade20k_upernet_ppma_tiny", ["epochs=1"], (1, None)),
    ],
)
def test_length_replaced(recipe, assignments, length):
    config = load_config(recipe, assignments)
    assert (config.epochs, config.steps) == length


def test_length_replaced_in_base(write):
    config = load_config(write("mine", base="digits_nano", steps=3))
    assert (config.epochs, config.steps) == (None, 3)


def test_length_both():
    with pytest.raises(ConfigError, match="epochs, steps"):
        load_config("digits_nano", ["steps=3", "epochs=1"])


def test_command_lists_recipes(capsys):
    assert main(["recipes"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == recipes.names()
    assert not any(name.startswith("_") for name in lines)


def test_command_prints_recipe(tmp_path, capsys):
    assert main(["recipes", "coco_maskrcnn_ppma_tiny_3x", "steps=7"]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "printed.yaml") == load_config("coco_maskrcnn_ppma_tiny_3x", ["steps=7"])
    assert main(["recipes", "digits_nano", "lrr=1"]) == 2
    assert "did you mean lr?" in capsys.readouterr().err


def test_schema_complete(capsys):
    """Every key of every recipe is in the schema, and sections accept no other keys."""
    assert main(["recipes", "--schema"]) == 0
    by_task = {schema["title"]: schema for schema in json.loads(capsys.readouterr().out)["anyOf"]}

    def check(values, schema):
        options = schema.get("anyOf", [schema])
        if isinstance(values, dict):
            (section,) = (one for one in options if one.get("type") == "object")
            if "properties" in section:
                assert section["additionalProperties"] is False
                for key, value in values.items():
                    check(value, section["properties"][key])
        elif isinstance(values, list):
            (array,) = (one for one in options if one.get("type") == "array")
            for value, item in zip(values, array.get("prefixItems", [array.get("items")] * len(values)), strict=True):
                check(value, item)
        else:
            types = {float: "number", int: "integer", str: "string", bool: "boolean", type(None): "null"}
            accepted = [one.get("type") for one in options]
            words = [word for one in options for word in (*one.get("enum", ()), one.get("const"))]
            assert types[type(values)] in accepted or values in words or (type(values) is int and "number" in accepted)

    for name in recipes.names():
        config = load_config(name)
        check(recipes.resolve(name), by_task[config.task])
        check(configs.to_dict(config), by_task[config.task])


def test_package_zipped(tmp_path):
    folder = Path(ppma.__file__).parent
    archive = tmp_path / "zipped.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("ppma/__init__.py", "")
        for path in (folder / "config.py", *(folder / "recipes").iterdir()):
            if path.is_file():
                file.write(path, path.relative_to(folder.parent))
    code = (
        f"import sys; sys.path.insert(0, {str(archive)!r}); from ppma import recipes; "
        "assert '.zip' in recipes.__file__; print(recipes.resolve(recipes.names()[0])['model'])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "ppma_base\n", run.stderr
