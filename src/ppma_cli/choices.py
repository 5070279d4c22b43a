"""Choices of options, copied from the library because importing it imports torch; a test compares the two."""

MASKS = ("none", "rmt", "cross", "hilbert", "v2h", "2d", "shared")
FORMULATIONS = ("paper", "release")
ATTENTION_KINDS = ("full", "criss_cross", "linear", "decomposed")
AMP = ("none", "bf16", "fp16")
PATHS = ("v2h", "h2v")
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942")
OPERATORS = (
    "polyline_scan", "criss_cross_attention", "polyline_attention", "linear_attention", "rotary_split", "decay_head",
    "depthwise_conv",
)  # fmt: skip
DTYPES = ("float16", "bfloat16", "float32")
OPSET = 20
