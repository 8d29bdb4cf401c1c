"""Activations of gates. `ACCURACY` says which instructions compute them.

| ACCURACY  | error                                                                  | used by                   |
| --------- | ---------------------------------------------------------------------- | ------------------------- |
| "precise" | that of float32, for the tanh of small arguments too                   | products in full float32  |
| "plain"   | as "precise", but absolute near zero in tanh                           | TF32 and 16-bit operands  |
| "fast"    | that of the GPU's exponential and reciprocal, each accurate to 1-2 ulp | loops in Gluon with TF32  |
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x, ACCURACY: tl.constexpr):
    if ACCURACY == "fast":
        y = _fast_sigmoid(x)
    else:
        y = 1.0 / (1.0 + tl.exp(-x))
    return y


@triton.jit
def tanh(x, ACCURACY: tl.constexpr):
    if ACCURACY == "fast":
        y = 2.0 * _fast_sigmoid(2.0 * x) - 1.0
    else:
        y = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
    if ACCURACY == "precise":
        # near zero the difference above cancels; an odd polynomial keeps the relative error at the level of float32
        x2 = x * x
        p = x2 * (x2 * (x2 * (x2 * (62.0 / 2835.0) - 17.0 / 315.0) + 2.0 / 15.0) - 1.0 / 3.0)
        y = tl.where(x2 < 0.0225, x + x * p, y)
    return y


@triton.jit
def _fast_sigmoid(x):
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 e;
        mul.f32 e, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 e, e;
        add.f32 e, e, 0f3F800000;
        rcp.approx.ftz.f32 $0, e;
        }""",
        "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip
