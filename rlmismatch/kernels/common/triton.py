"""Float32 building blocks of the Triton kernels, each correct to the last place or nearly so, on the GPU and in the interpreter.

Every kernel is launched with `enable_fp_fusion` stated: whether a * b + c is one rounding or two must not follow a compiler's default.

Triton's own exp is the hardware's approximation of 2^x behind a rounded product with log2(e); libdevice's is not.

The interpreter (TRITON_INTERPRET=1) multiplies the bit patterns of bfloat16 operands in `tl.dot` and truncates where it should round to
bfloat16. So there the host hands kernels float32 copies (`widen`), and float32 results (`storage`) are rounded by torch.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import driver

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@functools.cache
def is_hopper() -> bool:
    """Whether kernels are compiled for sm_90: warp group products and the tensor memory accelerator."""
    if INTERPRETED.value:
        return False
    target = driver.active.get_current_target()
    return target.backend == "cuda" and target.arch == 90


def widen(x: torch.Tensor) -> torch.Tensor:
    """`x`, or its exact float32 copy in the interpreter."""
    return x.float() if INTERPRETED.value else x


def storage(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a kernel stores what is to become `dtype`."""
    return torch.float32 if INTERPRETED.value else dtype


@triton.jit
def exp(x):
    """e^x within 1 ulp."""
    return tl.exp(x) if INTERPRETED else libdevice.exp(x)


@triton.jit
def exp_below(x):
    """e^x of x <= 0 within 2^-22 + |x| * 2^-24 of itself: the hardware's 2^x behind one rounded product. What it is less exact in is as
    small as e^x itself, so that a sum whose largest term is 1 keeps its last place; and it costs a quarter of `exp`."""
    return tl.exp(x)


@triton.jit
def log(x):
    """Natural logarithm within 1 ulp."""
    return tl.log(x) if INTERPRETED else libdevice.log(x)


@triton.jit
def cos(x):
    """Cosine within 2 ulp, also of angles of many turns."""
    return tl.cos(x) if INTERPRETED else libdevice.cos(x)


@triton.jit
def sin(x):
    """Sine within 2 ulp, also of angles of many turns."""
    return tl.sin(x) if INTERPRETED else libdevice.sin(x)


@triton.jit
def tanh(x):
    """Hyperbolic tangent within 4 ulp (libdevice's divides approximately)."""
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    small = exp(-2.0 * tl.abs(x))
    far = tl.where(x < 0, -1.0, 1.0) * tl.div_rn(1.0 - small, 1.0 + small)
    return tl.where(tl.abs(x) < 0.2, near, far)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Float32 `x` rounded to nearest even to `dtype`, as float32."""
    if dtype == tl.float32:
        y = x
    elif dtype == tl.bfloat16 and INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        y = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        y = x.to(dtype).to(tl.float32)
    return y
