"""`ppma recipes`: the packaged recipes."""

import argparse
import json

from ppma_cli.output import show_warnings_in_one_line
from ppma_cli.settings import add_settings

HELP = "list the packaged recipes, or print one with its bases resolved"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a recipe name or a YAML file (default: list all)")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of recipes, for editors")
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """List the recipes, or print one."""
    from ppma import recipes

    if arguments.recipe is None and not arguments.schema:
        names = recipes.names()
        width = max(map(len, names))
        for name in names:
            print(f"{name:{width}}  {recipes.description(name)}")
        return 0
    import yaml

    from ppma.tasks.registry import load_config, recipe_schema, resolve

    if arguments.schema:
        print(json.dumps(recipe_schema(), indent=2))
        return 0
    show_warnings_in_one_line()
    load_config(arguments.recipe, arguments.assignments)  # validates
    values = resolve(arguments.recipe, arguments.assignments)
    print(yaml.safe_dump(values, sort_keys=False, default_flow_style=None), end="")
    return 0
