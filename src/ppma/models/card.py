"""The model card that `save_pretrained` and `push_to_hub` write."""

from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ppma.models.config import CONFIGS, BackboneConfig

_TEMPLATE = """---
{{ card_data }}
---

# {{ name }}

A vision backbone with attention masked along the polyline paths between tokens: {{ config.formulation }} formulation,
mask `{{ config.mask }}`, {{ "{:,}".format(parameters) }} parameters
{%- if config.num_classes %}, {{ config.num_classes }} classes{% endif %}. Images may have any height and width.
{% if trained %}
{{ trained }}
{% endif %}
```python
from ppma.models import PolylineBackbone

model = PolylineBackbone.from_pretrained(repository)   # of the Hub, or a folder; in evaluation mode
output = model(images)                                 # (B, {{ config.in_chans }}, height, width)
```

| stage | channels | blocks | attention |
| --- | ---: | ---: | --- |
{% for dim, depth, kind in stages -%}
| {{ loop.index }} | {{ dim }} | {{ depth }} | {{ kind }} |
{% endfor %}
Method: Zhao et al., NeurIPS 2025,
[Polyline Path Masked Attention for Vision Transformer](https://arxiv.org/abs/2506.15940).
"""


def make_card(config: BackboneConfig, parameters: int, *, trained: str = "", **metadata: Any) -> ModelCard:
    """Describe a model of this configuration.

    Args:
        config: of the model.
        parameters: how many it has.
        trained: a paragraph on data, training and results.
        metadata: fields of `huggingface_hub.ModelCardData`: license, datasets, ...
    """
    sizes = (config.dims, config.depths)
    variant = next((name for name, known in CONFIGS.items() if (known.dims, known.depths) == sizes), "PolylineBackbone")
    task = "image-classification" if config.num_classes else "image-feature-extraction"
    known = {"library_name": "ppma", "pipeline_tag": task, "tags": ["timm", "arxiv:2506.15940"]}
    return ModelCard.from_template(
        ModelCardData(**{**known, **metadata}),
        template_str=_TEMPLATE,
        name=variant,
        config=config,
        parameters=parameters,
        trained=trained,
        stages=list(zip(config.dims, config.depths, config.kinds, strict=True)),
    )
