"""Compile every kernel for a GPU that need not be here. Run by a test as a process of its own: no interpreter.

Prints a line for each: its name, the multiply-adds that round once in it, and the shared memory of a program.

    python -m tests.codec.gpu.compiling [CAPABILITY]        80, 90 (the default) or 100
"""

import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvabr.codec.gpu import analysis_kernels, encoder, kernels, level_kernels, levels, writer, writer_kernels
from kvabr.codec.gpu.decoder import _FINISH, _PREPARE, _UNSTACK, DEPTHS, _tokens
from kvabr.codec.gpu.tables import COMPONENTS

TYPES = {
    "*i8": "level keep_of marks wrong delta mantissa high low matrix_high matrix_low planes",
    "*u8": "gain lane_of",
    "*i16": "data index y below words escapes out",
    "*i32": "tokens_of coding_order chances entries coarse bucket refers listed status places token_of radius_of "
    "states track_of depth_of mean_of position_of",
    "*i64": "parts outs offset_of rows_of ends begins totals matrix_totals tiles",
    "*bf16": "group",
    "*fp32": "scale mean cos sin channels power source scales columns units largest factors across steps",
    "i64": "plane",
}
TYPE_OF = {name: kind for kind, names in TYPES.items() for name in names.split()}
OWN = {"collect": {"places": "*i64", "heads": "*u8"}, "product": {"out": "*fp32"}, "expand": {"data": "*u8"}}
PAIRS = {"PAIRS": _FINISH.rows, "RUN": 8, "TOKENS": _FINISH.tokens, "COMPONENTS": COMPONENTS}
ONES, USUAL, PRODUCT = {"dim": 1, "heads": 1}, {"stride_dim": 1, "HALVES": 2}, {"COMPONENTS": COMPONENTS}
BLOCKS = {"BLOCKS": True, "WHOLE": True, "INTERLEAVED": False}
WIDE = {"TOKENS": encoder._TOKENS}
NARROW = {"TOKENS": encoder._FEW_TOKENS}
DEEP = {"COMPONENTS": encoder._COMPONENTS}
CAPABILITY = int(sys.argv[1]) if len(sys.argv) > 1 else 90
FEW = 32
WGMMA = CAPABILITY == 90
WRAP = {"WRAPS": WGMMA}
MODULES = kernels, analysis_kernels, level_kernels, writer_kernels
ROWS = {"VOTES": True, "COARSE": 0}
VARIANTS = (
    *(("read_rows", {"REFINES": above, "NEAR": near} | ROWS, 1) for above, near in ((True, True), (True, False))),
    ("read_rows", {"REFINES": False, "NEAR": False} | ROWS, 1),
    ("prepare", {"ROWS": _PREPARE.rows, "TOKENS": _PREPARE.tokens, "RUN": 4, "WHOLE": True, "DEPTHS": DEPTHS},
     _PREPARE.warps),
    ("unstack", {**PRODUCT, **WRAP, "OUTPUTS": _UNSTACK.rows, "TOKENS": _tokens(_UNSTACK, wraps=WGMMA), "RUN": 4},
     _UNSTACK.warps),
    # Arguments that are 1 are constants to Triton.
    ("finish", {"KIND": 1, "BLOCKS": False, "WHOLE": False, "INTERLEAVED": True, **ONES, **PAIRS, **WRAP},
     _FINISH.warps),
    ("finish", {"KIND": 2, **BLOCKS, **USUAL, **PAIRS, **WRAP, "TOKENS": _tokens(_FINISH, wraps=WGMMA)}, _FINISH.warps),
    ("finish", {"KIND": 2, **BLOCKS, **USUAL, **PAIRS, "PAIRS": FEW, "WRAPS": False,
                "TOKENS": _tokens(_FINISH, wraps=False)}, _FINISH.warps),
    ("centre", {"HALVES": 2, "INTERLEAVED": False, "stride_dim": 1, "CHANNELS": encoder._CHANNELS, **WIDE},
     encoder._WARPS),
    ("powers", {"HALVES": 2, **NARROW}, 1),
    *(("to_words", {"SCALES": scales, **DEEP, **NARROW}, 4) for scales in (True, False)),
    *(("expand", {"LEVEL": level, "HALVES": 2, "KIND": 2, "PARTS": 2, "TOKENS": levels._TOKENS, "DIMS": 128, "RUN": 8,
                  "WHOLE": True, "stride_dim": 1}, levels._WARPS) for level in levels.LEVELS.values()),
    ("quantise", {"REFINES": True, "ROWS": writer._ROWS}, 4),
    *(("write_rows", {"REFINES": refines, "NEAR": refines, "VOTES": True}, 1) for refines in (True, False)),
    ("collect", {"CHUNKS": writer._CHUNKS, "HEAD": 512}, 4),
    ("product", {"OUTPUTS": encoder._OUTPUTS, **DEEP, **WIDE}, encoder._WARPS),
)  # fmt: skip


SIXTEENS = {"stride", "width", "plane", "padded", "first_place", "stride_head", "most", "own", "rows"}
"""Numbers that are multiples of 16, as all addresses are, which the compiler is told."""


for name, constants, warps in VARIANTS:
    (kernel,) = (getattr(module, name) for module in MODULES if hasattr(module, name))
    types = {**TYPE_OF, **OWN.get(name, {})}
    kinds = {arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in kernel.arg_names}
    whole = [at for at, (arg, kind) in enumerate(kinds.items()) if kind[0] == "*" or arg in SIXTEENS]
    made = triton.compile(
        ASTSource(kernel, kinds, constants, {(at,): [["tt.divisibility", 16]] for at in whole}),
        target=GPUTarget("cuda", CAPABILITY, 32),
        options={"num_warps": warps, "enable_fp_fusion": False},
    )
    if constants.get("WRAPS"):
        assert "satfinite" not in made.asm["ptx"], f"{name}: its sums saturate"
    fused = len(re.findall(r"fma\.rn(\.ftz)?\.f32", made.asm["ptx"]))
    few = "-few" if constants.get("PAIRS") == FEW else ""
    print(name + few, fused, made.metadata.shared)
