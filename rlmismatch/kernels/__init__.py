"""How, by us, in a fixed order: the deterministic operations that a pin puts in the place of an engine's own.

One package an operation: ``__init__`` is the API, ``reference`` is the specification (torch only, float64 inside), ``triton``
is the kernel (float32 accumulation, order of additions fixed). The caller names the implementation in every call; there is no
default and no fallback. Every function of a ``reference`` module takes ``out_dtype``; ``torch.float64`` returns the result
*unrounded*, without any rounding in between, which is what native operations are judged against.

A row's bits depend neither on the batch, the chunking or the padding around it, nor on the tensor-parallel size. For ``triton``
that holds by construction on one device type. For ``reference`` it holds as far as float64 noise (1e-16 relative) does not
straddle a rounding boundary of the output dtype: the order of additions inside a float64 matmul is the BLAS library's.

Forward only: no function is differentiable under ``triton``, and each refuses operands that require a gradient.

Shape suffixes: T tokens, M rows, N columns out, K columns in, H heads, D head dim, S sequences, V vocabulary, J vocabulary tiles.
"""
