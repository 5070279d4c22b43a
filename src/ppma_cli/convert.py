"""`ppma convert`: convert the authors' checkpoints to safetensors, or ours to half the size."""

import argparse

from ppma_cli import choices
from ppma_cli.model_options import larger_model

HELP = "convert one of the authors' checkpoints to safetensors, or one of ours to float16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="IN", help="a checkpoint of the authors, such as best.pth, a published name, or one of ours"
    )
    parser.add_argument("target", metavar="OUT.safetensors")
    parser.add_argument(
        "--ema",
        action=argparse.BooleanOptionalAction,
        help="use the EMA weights or the raw ones (default: EMA weights if the file has them)",
    )
    parser.add_argument(
        "--mask", choices=choices.MASKS, help="the mask, where the shapes leave it open (v2h, for example)"
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=choices.ATTENTION_KINDS,
        help="attention of each stage, if the shapes match no published model",
    )
    parser.add_argument("--half", action="store_true", help="store the weights of one of our files as float16")


def run(arguments: argparse.Namespace) -> int:
    """Convert a checkpoint."""
    from ppma.models import load_checkpoint, open_checkpoint, save_checkpoint
    from ppma.models.checkpoints import write_half
    from ppma.models.timm_config import variant_name
    from ppma.outputs import check_target
    from ppma.progress import Progress
    from ppma.tasks.registry import task_class

    overrides = {
        option: getattr(arguments, option) for option in ("mask", "kinds") if getattr(arguments, option) is not None
    }
    source = open_checkpoint(arguments.source)
    if arguments.half:
        if not source.native or overrides or arguments.ema is not None:
            raise ValueError("--half: expected one of our safetensors files and no other option")
        write_half(source, target := check_target("OUT", arguments.target, (".safetensors",)))
        print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")
        return 0
    if source.larger and not arguments.ema:
        target = check_target("OUT", arguments.target, (".safetensors", ".pth"))
        with Progress("converting"):
            line = task_class(source.task, f"{source.path}: task").convert(source, target, **overrides)
        if line:
            print(line)
            return 0
    target = check_target("OUT", arguments.target, (".safetensors",))
    with Progress("converting"):
        model = load_checkpoint(source, ema=arguments.ema, **overrides)
        save_checkpoint(model, target)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    name = variant_name(model.config) or "custom architecture"
    head = f"{model.num_classes} classes" if model.num_classes else "no classifier"
    if inside := larger_model(source):
        print(f"converted: the backbone of {inside}, without its heads")
    print(f"{target}: {name}, mask {model.config.mask}, {parameters:,} parameters, {head}")
    return 0
