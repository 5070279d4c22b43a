"""The words that options take are those that the library knows."""

import pytest
import torch

from ppma import masks
from ppma.engine.evaluation import AMP_DTYPES
from ppma.explore.paths import LINES
from ppma.layers import attention
from ppma.models import export
from ppma_cli import choices


def test_choices_match_library():
    assert tuple(masks.KINDS) == choices.MASKS
    assert tuple(attention.FORMULATIONS) == choices.FORMULATIONS
    assert attention.ATTENTION_KINDS == choices.ATTENTION_KINDS
    assert tuple(AMP_DTYPES) == choices.AMP
    assert tuple(LINES) == choices.PATHS
    assert export.OPSET == choices.OPSET


def test_choices_match_kernels():
    pytest.importorskip("triton")
    from ppma.bench.gpu.cases import CASES
    from ppma.bench.gpu.targets import TARGETS
    from ppma.ops.backends.triton import _DTYPES

    assert tuple(TARGETS) == choices.TARGETS
    assert tuple(dict.fromkeys(case.operator for case in CASES)) == choices.OPERATORS
    assert {getattr(torch, name) for name in choices.DTYPES} == set(_DTYPES)
