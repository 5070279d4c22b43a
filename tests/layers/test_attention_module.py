import pytest
import torch

from ppma import masks
from ppma.layers import PolylineAttention, rotary_table
from ppma.ops import reference
from ppma.ops.projection_formula import rotate

CPU = torch.device("cpu")
COMBINE = {"paper": "hadamard", "release": "logit"}
PATHS = {"none": "h2v", "rmt": "h2v", "v2h": "v2h", "2d": "2d", "shared": "2d"}


def module(**options):
    torch.manual_seed(0)
    attention = PolylineAttention(12, 2, **options).double()
    if attention.decay is not None:
        torch.nn.init.normal_(attention.decay.weight)
    return attention


def heads(attention, x):
    """q, k and v (B, heads, ..., d) of tokens x (B, ..., dim), before any rotation."""
    qkv = attention.qkv(x).unflatten(-1, (3, 2, 6))
    return [qkv[..., which, :, :].movedim(-2, 1) for which in range(3)]


def log_decays(attention, x):
    if attention.mask == "none":
        return [torch.zeros(x.shape[0], 2, *x.shape[1:3], dtype=torch.float64)] * 2
    if attention.mask == "rmt":
        fixed = masks.rmt_log_decay(2, attention.fixed_decay_span).double()
        return [fixed[:, None, None].expand(x.shape[0], 2, *x.shape[1:3])] * 2
    return attention.decay(x)


def merge(out):
    return out.movedim(1, -2).flatten(-2)


@pytest.mark.parametrize("grid", [(3, 4), (1, 5), (4, 1)])
@pytest.mark.parametrize("formulation", COMBINE)
@pytest.mark.parametrize("kind", ["full", "criss_cross"])
@pytest.mark.parametrize("mask", PATHS)
def test_forward_reference(mask, kind, formulation, grid):
    attention = module(mask=mask, kind=kind, formulation=formulation, rope=True, local_kernel=3)
    x = torch.randn(2, *grid, 12, dtype=torch.float64)
    q, k, v = heads(attention, x)
    cos, sin = (table.view(*grid, 3) for table in rotary_table(*grid, 6, CPU))
    function = reference.polyline_attention if kind == "full" else reference.criss_cross_attention
    out = function(
        rotate(q, cos, sin),
        rotate(k, cos, sin),
        v,
        *log_decays(attention, x),
        combine=COMBINE[formulation],
        paths=PATHS[mask],
        scale=6**-0.5,
    )
    values = merge(v).permute(0, 3, 1, 2)
    local = torch.nn.functional.conv2d(values, attention.local.weight, attention.local.bias, padding=1, groups=12)
    expected = attention.proj(merge(out) + local.permute(0, 2, 3, 1))
    torch.testing.assert_close(attention(x), expected)


def factors(kind, q, k):
    """S1 (N x d) and S2 (d x N), written out."""
    q, k = q.flatten(2, 3), k.flatten(2, 3)
    if kind == "decomposed":
        return q.softmax(-1), k.softmax(-2).mT
    phi_q, phi_k = (torch.where(t > 0, t + 1, t.exp()) for t in (q, k))
    return phi_q / (phi_q @ phi_k.mT).sum(-1, keepdim=True), phi_k.mT


@pytest.mark.parametrize("grid", [(3, 4), (1, 5), (4, 1)])
@pytest.mark.parametrize("formulation", COMBINE)
@pytest.mark.parametrize("kind", ["linear", "decomposed"])
@pytest.mark.parametrize("mask", PATHS)
def test_forward_low_rank(mask, kind, formulation, grid):
    """`((S1 S2) * L) v` of the paper's appendix; in the release's formulation each path's weights sum to 1."""
    attention = module(mask=mask, kind=kind, formulation=formulation, rope=True)
    x = torch.randn(2, *grid, 12, dtype=torch.float64)
    q, k, v = heads(attention, x)
    cos, sin = (table.view(*grid, 3) for table in rotary_table(*grid, 6, CPU))
    s1, s2 = factors(kind, rotate(q, cos, sin), rotate(k, cos, sin))
    paths = ["v2h", "h2v"] if PATHS[mask] == "2d" else [PATHS[mask]]
    maps = [(s1 @ s2) * reference.polyline_mask(*log_decays(attention, x), paths=path) for path in paths]
    if formulation == "release":
        maps = [weights / weights.sum(-1, keepdim=True) / len(paths) for weights in maps]
    out = (sum(maps) @ v.flatten(2, 3)).unflatten(2, grid)
    torch.testing.assert_close(attention(x), attention.proj(merge(out)))


@pytest.mark.parametrize("formulation", COMBINE)
@pytest.mark.parametrize("kind", ["full", "linear", "decomposed"])
@pytest.mark.parametrize("prefix", [0, 2])
def test_forward_valid(prefix, kind, formulation):
    """What invalid tokens hold is never read; a valid mask of all tokens changes nothing."""
    attention = module(kind=kind, formulation=formulation, local_kernel=3)
    x = torch.randn(2, prefix + 12, 12, dtype=torch.float64)
    valid = torch.ones(2, 3, 4, dtype=torch.bool)
    torch.testing.assert_close(attention(x, grid=(3, 4), valid=valid), attention(x, grid=(3, 4)))
    valid[0, 1:, 2:] = False
    valid[1] = False
    hidden = torch.nn.functional.pad(~valid.flatten(1), (prefix, 0))
    other = torch.where(hidden[..., None], torch.randn_like(x), x)
    # Decays of invalid tokens still lie on paths: none, so that nothing but keys and values is left of them.
    attention.decay.weight.data.zero_()
    outs = [attention(tokens, grid=(3, 4), valid=valid)[~hidden] for tokens in (x, other)]
    torch.testing.assert_close(*outs)
    assert torch.isfinite(attention(x, grid=(3, 4), valid=valid)).all()


@pytest.mark.parametrize("formulation", COMBINE)
@pytest.mark.parametrize("kind", ["full", "criss_cross", "linear", "decomposed"])
def test_forward_valid_compile_autocast_and_empty(kind, formulation):
    attention = module(kind=kind, formulation=formulation, rope=True, local_kernel=3).float()
    x, valid = torch.randn(2, 3, 4, 12, requires_grad=True), torch.rand(2, 3, 4) < 0.5
    valid[0] = False
    expected = attention(x, valid=valid)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, valid=valid), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(x, valid=valid)
    out.float().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert attention(x[:0], valid=valid[:0]).shape == (0, 3, 4, 12)


def test_forward_wrong_valid():
    with pytest.raises(ValueError, match=r"^valid: expected torch.bool of shape \(2, 3, 4\)"):
        module()(torch.randn(2, 3, 4, 12, dtype=torch.float64), valid=torch.ones(2, 4, 3, dtype=torch.bool))


@pytest.mark.parametrize("formulation", COMBINE)
@pytest.mark.parametrize("kind", ["full", "criss_cross"])
@pytest.mark.parametrize("mask", ["cross", "hilbert"])
def test_forward_scan_masks(mask, kind, formulation):
    attention = module(mask=mask, kind=kind, formulation=formulation)
    x = torch.randn(1, 3, 4, 12, dtype=torch.float64)
    structured = masks.KINDS[mask].build(*attention.decay(x))
    attend = structured.attention if kind == "full" else structured.criss_cross
    expected = attention.proj(merge(attend(*heads(attention, x), combine=COMBINE[formulation])))
    torch.testing.assert_close(attention(x), expected)


@pytest.mark.parametrize("kind", ["full", "criss_cross"])
def test_forward_sequence(kind):
    attention = module(kind=kind, rope=True, local_kernel=3)
    x = torch.randn(2, 3, 4, 12, dtype=torch.float64)
    torch.testing.assert_close(attention(x.flatten(1, 2), grid=(3, 4)), attention(x).flatten(1, 2))


@pytest.mark.parametrize("formulation", COMBINE)
@pytest.mark.parametrize("mask", [*PATHS, "hilbert"])
def test_prefix_mask_is_1(mask, formulation):
    prefix, grid = 2, (2, 3)
    attention = module(mask=mask, formulation=formulation)
    x = torch.randn(2, prefix + 6, 12, dtype=torch.float64)
    q, k, v = heads(attention, x)
    scores = q @ k.mT * 6**-0.5
    path_outputs = []
    on_grid = attention.structured_mask(x[:, prefix:].unflatten(1, grid)).dense()
    for log_path in on_grid:
        log_mask = torch.zeros(2, 2, 8, 8, dtype=torch.float64)
        log_mask[..., prefix:, prefix:] = log_path
        if formulation == "paper":
            path_outputs.append((scores.softmax(-1) * log_mask.exp()) @ v)
        else:
            path_outputs.append((scores + log_mask).softmax(-1) @ v / len(on_grid))
    expected = attention.proj(merge(sum(path_outputs)))
    torch.testing.assert_close(attention(x, grid=grid), expected)


def test_prefix_not_rotated_nor_convolved():
    attention = module(mask="none", rope=True, local_kernel=3)
    x = torch.randn(1, 1 + 6, 12, dtype=torch.float64)
    q, k, v = heads(attention, x)
    table = rotary_table(2, 3, 6, CPU)
    q, k = (torch.cat((t[:, :, :1], rotate(t[:, :, 1:], *table)), 2) for t in (q, k))
    out = merge((q @ k.mT * 6**-0.5).softmax(-1) @ v)
    local = attention.local(merge(v)[:, 1:].unflatten(1, (2, 3))).flatten(1, 2)
    out = torch.cat((out[:, :1], out[:, 1:] + local), 1)
    torch.testing.assert_close(attention(x, grid=(2, 3)), attention.proj(out))


@pytest.mark.parametrize("formulation", COMBINE)
@pytest.mark.parametrize(("kind", "tokens"), [("full", 6), ("full", 7), ("criss_cross", 6)])
def test_gradients(kind, tokens, formulation):
    attention = module(kind=kind, formulation=formulation, rope=True, local_kernel=3)
    x = torch.randn(1, tokens, 12, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*attention.named_parameters(), strict=True)

    def function(x, *values):
        return torch.func.functional_call(attention, dict(zip(names, values, strict=True)), (x, (2, 3)))

    assert torch.autograd.gradcheck(function, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("kind", ["criss_cross", "linear", "decomposed"])
def test_forward_autocast_and_half(kind):
    torch.manual_seed(0)
    attention = PolylineAttention(64, 4, kind=kind, rope=True, local_kernel=5)
    x = torch.randn(2, 6, 5, 64)
    exact = attention(x)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            out = attention(x)
        assert out.dtype == dtype
        # one rounding of every operand of a few chained products of O(1) numbers
        bound = 8 * torch.finfo(dtype).eps * exact.abs().max()
        assert (out - exact).abs().max() < bound
        cast = PolylineAttention(64, 4, kind=kind, rope=True, local_kernel=5)
        cast.load_state_dict(attention.state_dict())
        assert (cast.to(dtype)(x.to(dtype)) - exact).abs().max() < 2 * bound


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, r"heads: expected a divisor of dim=12, got 5"),
        ({"heads": 4, "rope": True}, r"even quotient"),
        ({"kind": "cross"}, r"kind: expected one of .* did you mean 'criss_cross'"),
        ({"mask": "2D"}, r"did you mean '2d'"),
        ({"formulation": "code"}, r"formulation: expected one of 'paper', 'release', got 'code'"),
        ({"local_kernel": 4}, r"local_kernel: expected an odd number or 0, got 4"),
    ],
)
def test_init_wrong_option(options, message):
    with pytest.raises(ValueError, match=message):
        PolylineAttention(12, **{"heads": 2, **options})


@pytest.mark.parametrize(
    ("shape", "grid", "message"),
    [
        ((1, 6, 12), None, r"expected shape \(B, H, W, 12\), or \(B, N, 12\) with grid"),
        ((1, 2, 3, 8), None, r"got \(1, 2, 3, 8\)"),
        ((1, 5, 12), (2, 3), r"N >= 2\*3 for grid=\(2, 3\), got \(1, 5, 12\)"),
        ((1, 7, 12), (2, 3), r"takes no prefix tokens, expected N = 2\*3"),
    ],
)
def test_forward_wrong_shape(shape, grid, message):
    attention = PolylineAttention(12, 2, kind="criss_cross")
    with pytest.raises(ValueError, match=message):
        attention(torch.zeros(shape), grid=grid)
