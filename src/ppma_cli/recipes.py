"""`ppma recipes`: the recipes that come with the package."""

import argparse

from ppma_cli.settings import add_settings

HELP = "list the recipes, or print one with its bases and changes resolved"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a name or a YAML file; all names if omitted")
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """List the recipes, or print one."""
    from ppma import recipes

    if arguments.recipe is None:
        names = recipes.names()
        width = max(map(len, names))
        for name in names:
            print(f"{name:{width}}  {recipes.description(name)}")
        return 0
    import yaml

    from ppma.tasks.registry import load_config

    load_config(arguments.recipe, arguments.assignments)  # what is printed can be trained
    values = recipes.resolve(arguments.recipe, arguments.assignments)
    print(yaml.safe_dump(values, sort_keys=False, default_flow_style=None), end="")
    return 0
