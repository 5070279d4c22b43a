"""The packaged recipes, and the messages about mistakes in recipes."""

import pytest
import torch

from ppma import recipes
from ppma.config import ConfigError
from ppma.engine.optim import make_ema, make_optimizer
from ppma.models import CONFIGS
from ppma.tasks.detection import DetectorConfig
from ppma.tasks.registry import load_config, make_task

DROP_PATH = {"tiny": 0.1, "small": 0.15, "base": 0.4}  # of the paper


@pytest.mark.parametrize("name", recipes.names())
def test_recipe_valid(name):
    config = load_config(name)
    assert config.model in (*CONFIGS, "grid")
    assert config.task in ("classification", "detection", "regions", "segmentation")
    family = name.split("_")[0]
    if family in ("imagenet", "coco", "ade20k", "cityscapes"):
        assert config.model in name
        assert config.model_args["drop_path_rate"] == DROP_PATH[config.model.split("_")[1]]
    if family in ("coco", "ade20k", "cityscapes"):
        assert config.init == f"runs/imagenet_{config.model}{'_paper' * name.endswith('_paper')}/best.safetensors"


def test_recipes_paper_complete():
    sizes = [f"{family}_{size}" for family in ("ppma", "rmt") for size in DROP_PATH]
    papers = {f"{data}_{model}" for data in ("imagenet", "ade20k_upernet", "cityscapes_upernet") for model in sizes}
    papers |= {f"{data}_ppma_{size}_paper" for data in ("imagenet", "ade20k_upernet") for size in DROP_PATH}
    papers |= {f"coco_maskrcnn_{model}_{schedule}" for model in sizes for schedule in ("1x", "3x")}
    papers |= {f"coco_maskrcnn_ppma_{size}_1x_paper" for size in DROP_PATH}
    assert papers <= set(recipes.names())


def test_recipes_learning_rate_scaling():
    assert load_config("imagenet_ppma_tiny").scaled_lr == pytest.approx(1e-3)
    assert load_config("imagenet_ppma_tiny", ["batch_size=512"]).scaled_lr == pytest.approx(5e-4)
    assert load_config("imagenet_ppma_tiny").ema.for_batch(1024) == pytest.approx(0.99996 ** (1024 / 512))


def test_recipes_3x_inherits_1x():
    short, long = (load_config(f"coco_maskrcnn_ppma_small_{schedule}") for schedule in ("1x", "3x"))
    assert (short.epochs, short.schedule.milestones) == (12, (8, 11))
    assert (long.epochs, long.schedule.milestones) == (36, (27, 33))
    assert long.schedule.warmup_steps == short.schedule.warmup_steps == 500
    assert (long.augment.crop_short_sides, short.augment.crop_short_sides) == ((400, 500, 600), ())
    assert long.detector == short.detector == DetectorConfig.mmdetection()


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("model=ppma_tinny", r"model: expected one of .*got 'ppma_tinny'; did you mean 'ppma_tiny'\?"),
        ("model_args.maks=2d", r"model argument: .*did you mean 'mask'\?"),
        ("model_args.mask=polyline", r"mask: expected one of .*got 'polyline'"),
        ("model_args.num_classes=3", r"model_args.num_classes: expected nothing: the data set it"),
        ("augment.mixupp=1", r"augment.mixupp: unknown key; did you mean augment.mixup\?"),
        ("data.image_sise=3", r"data.image_sise: unknown key; did you mean data.image_size\?"),
        ("task=detektion", r"task: expected one of classification.*got 'detektion'"),
    ],
)
def test_recipe_mistakes(assignment, message):
    with pytest.raises(ConfigError, match=message):
        load_config("digits_nano", [assignment])


def test_mixing_odd_micro_batch():
    with pytest.raises(ConfigError, match="even micro-batch"):
        load_config("digits_nano", ["augment.mixup=0.8", "batch_size=9"])


def test_optimizer_weight_decay_exclusions():
    task = make_task(load_config("digits_nano", ["model_args.formulation=release"]))
    model = task.model()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {group["weight_decay"]: group["params"] for group in make_optimizer(task.config, model).param_groups}
    assert set(groups) == {0.0, 0.05}
    spared, decayed = ({names[id(p)] for p in groups[rate]} for rate in (0.0, 0.05))
    assert all(name.endswith("weight") for name in decayed)
    assert {name for name in names.values() if name.endswith(("dt_bias", "A_log", "bias"))} <= spared
    assert {name for name, p in model.named_parameters() if p.ndim == 1} <= spared


def test_mixup_soft_targets():
    torch.manual_seed(0)
    settings = ["augment.mixup=0.8", "augment.cutmix=1.0", "label_smoothing=0.1"]
    task = make_task(load_config("digits_nano", settings))
    data = task.train_data()
    images, labels = task.collate([data[index] for index in range(4)])
    seen = []

    def scores(mixed):
        seen.append(mixed)
        return torch.zeros(4, 10)

    loss = task.loss(scores, (images.clone(), labels))["cross_entropy"]
    assert loss.item() == pytest.approx(torch.tensor(10.0).log().item())  # targets sum to 1
    assert not torch.equal(seen[0], images)


def test_ema_initial_weights():
    task = make_task(load_config("digits_nano"))
    model = task.model()
    ema = make_ema(task.config, model)
    assert all(torch.equal(tensor, ema.module.state_dict()[name]) for name, tensor in model.state_dict().items())
