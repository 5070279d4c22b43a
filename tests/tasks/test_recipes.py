"""Every recipe is valid, and the ImageNet recipes are the paper's."""

from pathlib import Path

import pytest
import torch

from ppma.config import ConfigError
from ppma.engine.optim import make_ema, make_optimizer
from ppma.tasks.registry import find_config, load_config, make_task

CONFIGS = Path(__file__).parents[2] / "configs"
IMAGENET = sorted(path.name for path in CONFIGS.glob("imagenet_*.yaml"))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_is_valid(path):
    config = load_config(path)
    assert config.model.split("_")[0] in ("ppma", "rmt")
    assert find_config(path.stem) == path


def test_the_imagenet_recipes_are_there():
    sizes = ("tiny", "small", "base")
    assert set(IMAGENET) == {f"imagenet_{family}_{size}.yaml" for family in ("ppma", "rmt") for size in sizes}


@pytest.mark.parametrize("name", IMAGENET)
def test_the_imagenet_recipes_are_the_papers(name):
    config = load_config(CONFIGS / name)
    family, size = name.removesuffix(".yaml").split("_")[1:]
    assert config.model == f"{family}_{size}"
    assert config.model_args == {"drop_path_rate": {"tiny": 0.1, "small": 0.15, "base": 0.4}[size]}
    assert (config.epochs, config.batch_size, config.scaled_lr) == (300, 1024, 1e-3)
    assert (config.optimizer.name, config.optimizer.weight_decay) == ("adamw", 0.05)
    assert (config.optimizer.eps, config.optimizer.betas) == (1e-8, (0.9, 0.999))
    schedule = config.schedule
    assert (schedule.name, schedule.min_lr, schedule.warmup_epochs, schedule.warmup_lr) == ("cosine", 1e-5, 5, 1e-6)
    augment = config.augment
    assert (augment.auto_augment, augment.color_jitter) == ("rand-m9-mstd0.5-inc1", 0.4)
    assert (augment.mixup, augment.cutmix, augment.mix_switch) == (0.8, 1.0, 0.5)
    assert (augment.erasing, augment.erasing_mode) == (0.25, "pixel")
    assert (config.label_smoothing, config.repeats, config.sync_batch_norm) == (0.1, 3, True)
    assert config.amp in ("bf16", "fp16")
    assert config.ema.for_batch(1024) == pytest.approx(0.99996 ** (1024 / 512))
    data = config.data
    assert (data.image_size, data.interpolation, round(data.image_size / data.crop_pct)) == (224, "bicubic", 256)
    assert load_config(CONFIGS / name, ["batch_size=512"]).scaled_lr == pytest.approx(5e-4)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("model=ppma_tinny", r"model: expected one of .*got 'ppma_tinny'; did you mean 'ppma_tiny'\?"),
        ("model_args.maks=2d", r"model argument: .*did you mean 'mask'\?"),
        ("model_args.mask=polyline", r"mask: expected one of .*got 'polyline'"),
        ("model_args.num_classes=3", r"model_args.num_classes: expected the data to say it"),
        ("augment.mixupp=1", r"augment.mixupp: unknown key; did you mean augment.mixup\?"),
        ("data.image_sise=3", r"data.image_sise: unknown key; did you mean data.image_size\?"),
        ("task=detektion", r"task: expected one of classification.*got 'detektion'"),
    ],
)
def test_mistakes_are_named(assignment, message):
    with pytest.raises(ConfigError, match=message):
        load_config(CONFIGS / "digits_nano.yaml", [assignment])


def test_mixing_needs_an_even_micro_batch():
    with pytest.raises(ConfigError, match="even micro-batch"):
        load_config(CONFIGS / "digits_nano.yaml", ["augment.mixup=0.8", "batch_size=9"])


def test_weight_decay_spares_biases_norms_and_decay_parameters():
    task = make_task(load_config(CONFIGS / "digits_nano.yaml", ["model_args.formulation=release"]))
    model = task.model()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {group["weight_decay"]: group["params"] for group in make_optimizer(task.config, model).param_groups}
    assert set(groups) == {0.0, 0.05}
    spared, decayed = ({names[id(p)] for p in groups[rate]} for rate in (0.0, 0.05))
    assert all(name.endswith("weight") for name in decayed)
    assert {name for name in names.values() if name.endswith(("dt_bias", "A_log", "bias"))} <= spared
    assert {name for name, p in model.named_parameters() if p.ndim == 1} <= spared


def test_mixup_and_label_smoothing_make_soft_targets():
    torch.manual_seed(0)
    settings = ["augment.mixup=0.8", "augment.cutmix=1.0", "label_smoothing=0.1"]
    task = make_task(load_config(CONFIGS / "digits_nano.yaml", settings))
    data = task.train_data()
    images, labels = task.collate([data[index] for index in range(4)])
    seen = []

    def scores(mixed):
        seen.append(mixed)
        return torch.zeros(4, 10)

    loss = task.loss(scores, (images.clone(), labels))["cross_entropy"]
    assert loss.item() == pytest.approx(torch.tensor(10.0).log().item())  # targets sum to 1
    assert not torch.equal(seen[0], images)


def test_ema_starts_as_the_model():
    task = make_task(load_config(CONFIGS / "digits_nano.yaml"))
    model = task.model()
    ema = make_ema(task.config, model)
    assert all(torch.equal(tensor, ema.module.state_dict()[name]) for name, tensor in model.state_dict().items())
