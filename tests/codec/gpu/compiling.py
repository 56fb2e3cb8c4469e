"""Compile every kernel for a GPU that need not be here. Run by a test as a process of its own: no interpreter.

Prints a line for each: its name, the multiply-adds that round once in it, and the bytes of its machine code.
"""

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvabr.codec.gpu import analysis_kernels, encoder, kernels, writer, writer_kernels
from kvabr.codec.gpu.decoder import _COMPONENTS, _OUTPUTS, _PAIRS, _ROWS, _TOKENS, _WARPS

TYPES = {
    "*i8": "below_live live keep_of marks wrong delta mantissa high low matrix_high matrix_low",
    "*u8": "gain lane_of",
    "*i16": "data index y below words escapes",
    "*i32": "tokens_of coding_order chances entries bucket refers listed status places token_of radius_of states",
    "*i64": "parts outs offset_of rows_of ends totals matrix_totals",
    "*bf16": "group",
    "*fp32": "scale mean cos sin channels power source scales columns units largest factors across out steps",
}
TYPE_OF = {name: kind for kind, names in TYPES.items() for name in names.split()}
TILES = {"TOKENS": _TOKENS, "COMPONENTS": _COMPONENTS}
PAIRS = {"PAIRS": _PAIRS, **TILES}
WIDE = {"TOKENS": encoder._TOKENS}
NARROW = {"TOKENS": encoder._FEW_TOKENS}
DEEP = {"COMPONENTS": encoder._COMPONENTS}
MODULES = kernels, analysis_kernels, writer_kernels
VARIANTS = (
    ("read_rows", {"REFINES": True, "NEAR": True}, 1),
    ("read_rows", {"REFINES": False, "NEAR": False}, 1),
    ("triple", {"ROWS": _ROWS}, 4),
    ("unstack", {"OUTPUTS": _OUTPUTS, **TILES}, _WARPS),
    # Arguments that are 1 are constants to Triton.
    ("finish", {"KIND": 1, "BLOCKS": False, "INTERLEAVED": True, "dim": 1, "heads": 1, **PAIRS}, _WARPS),
    ("finish", {"KIND": 2, "BLOCKS": True, "INTERLEAVED": False, "stride_dim": 1, **PAIRS}, _WARPS),
    (
        "centre",
        {"HALVES": 2, "INTERLEAVED": False, "stride_dim": 1, "CHANNELS": encoder._CHANNELS, **WIDE},
        encoder._WARPS,
    ),
    ("powers", {"HALVES": 2, **NARROW}, 1),
    ("to_words", {"SCALES": True, **DEEP, **NARROW}, 4),
    ("to_words", {"SCALES": False, **DEEP, **NARROW}, 4),
    ("quantise", {"REFINES": True, "ROWS": writer._ROWS}, 4),
    ("write_rows", {"REFINES": True, "NEAR": True}, 1),
    ("write_rows", {"REFINES": False, "NEAR": False}, 1),
    ("product", {"OUTPUTS": encoder._OUTPUTS, **DEEP, **WIDE}, encoder._WARPS),
)

for name, constants, warps in VARIANTS:
    (kernel,) = (getattr(module, name) for module in MODULES if hasattr(module, name))
    kinds = {arg: "constexpr" if arg in constants else TYPE_OF.get(arg, "i32") for arg in kernel.arg_names}
    made = triton.compile(
        ASTSource(kernel, kinds, constants),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "enable_fp_fusion": False},
    )
    print(name, len(re.findall(r"fma\.rn(\.ftz)?\.f32", made.asm["ptx"])), len(made.asm["cubin"]))
