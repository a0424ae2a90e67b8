"""What a side's own products and sums make of the operands that it really had: the capture that the GEMM measures start from.

Both adapters describe their live products as `Product`s and their sums as functions; what is run on them is the same for both. Everything
lands in an arm's tensors as the facts of gemm_facts.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

import torch

from rlmismatch.engines import gemm_flips
from rlmismatch.engines.gemm_facts import AloneFacts, Facts, FlagFacts, ReplayFacts, SumFacts, joined, packed
from rlmismatch.kernels import gemm, reduce
from rlmismatch.kernels.gemm import reference as gemm_fp64
from rlmismatch.kernels.reduce import reference as reduce_fp64
from rlmismatch.pins.collectives import TpGroup

ROWS: Final = (1, 8, 64, 512)
MAX_ROWS: Final = 1024  # of one product
_INTERPRETED_ROWS: Final = 16  # Triton's interpreter takes a second for a small product
_ALONE: Final = 16  # rows that are each run alone
_ELEMENTS: Final = 2**26  # of one output: a head over 151936 columns gets 441 rows


@dataclass(kw_only=True)
class Seen:
    """Rows [M, K] that each product of this rank read, by the product's name, in the order of the calls; at most `MAX_ROWS`."""

    rows: dict[str, list[torch.Tensor]] = dataclasses.field(default_factory=dict)
    enough: bool = False  # set once the forwards that are to be looked at are through

    def add(self, name: str, x_MK: torch.Tensor) -> None:
        if self.enough:
            return
        kept = self.rows.setdefault(name, [])
        room = MAX_ROWS - sum(len(x) for x in kept)
        if room > 0:
            kept.append(x_MK[:room].detach().clone())

    def joined(self, name: str) -> torch.Tensor:
        """[M, K]. Raises RuntimeError for a product that was never called: an engine that bypasses the hook has shown nothing."""
        if name not in self.rows:
            raise RuntimeError(f"the product {name} was hooked and never called")
        return torch.cat(self.rows[name])


@dataclass(frozen=True, kw_only=True)
class Product:
    """One live GEMM on this rank: captured inputs [M, K], weight [N, K], and the engine's own product, before any sum over ranks.

    columns: logical name -> this rank's columns; none of them where another rank speaks for the same. partial: a sum over ranks follows.
    """

    name: str
    x_MK: torch.Tensor
    weight_NK: torch.Tensor
    native: Callable[[torch.Tensor], torch.Tensor]
    columns: Mapping[str, slice | torch.Tensor]
    bias_N: torch.Tensor | None = None
    partial: bool = False


Sum = Callable[[torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True, kw_only=True)
class SumSite:
    """A side's ways to sum [M, N] partials over its ranks, whole on every rank. Each is collective; None: it does not take the tensor."""

    tp: TpGroup
    ways: Mapping[str, Sum]
    backends: Mapping[str, Sum]
    decode_rows: int  # of one decode step


def tensors(
    products: Iterable[Product], sums: SumSite, *, impl: gemm.Impl, interpreted: bool, flags: Seq[gemm_flips.Flag] = ()
) -> dict[str, torch.Tensor]:
    """Every ``replay``, ``sum``, ``backend`` and ``flag`` fact of `products`, over all ranks. Collective; complete on every rank.

    flags: those of the process that are flipped in turn.
    """
    facts: dict[str, torch.Tensor] = {}
    device = torch.device("cpu")
    for product in products:
        device = product.weight_NK.device
        rows = min(_INTERPRETED_ROWS if interpreted else MAX_ROWS, max(1, _ELEMENTS // max(1, product.weight_NK.shape[0])))
        x_MK = product.x_MK[:rows].contiguous()
        with torch.inference_mode():
            exact_MN = gemm_fp64.linear(x_MK, product.weight_NK, product.bias_N, out_dtype=torch.float64)
            full_MN = product.native(x_MK).clone()
            facts |= _replay(product, x_MK, full_MN, exact_MN, impl)
            facts |= gemm_flips.facts(product.name, product.native, x_MK, exact_MN, flags)
            if product.partial and sums.tp.size > 1:
                for name, fact in _sums(full_MN, exact_MN, sums, impl).items():
                    facts[name] = joined([facts[name], fact], SumFacts) if name in facts else fact
    return _over_ranks(facts, sums.tp, device)


def _replay(
    product: Product, x_MK: torch.Tensor, full_MN: torch.Tensor, exact_MN: torch.Tensor, impl: gemm.Impl
) -> dict[str, torch.Tensor]:
    # The pin's bits do not depend on M (tests/kernels/test_kernel_gemm.py), so it is run once.
    pin_MN = gemm.linear(x_MK, product.weight_NK, product.bias_N, impl=impl)
    full = x_MK.shape[0]
    natives = {"full": product.native(x_MK)}
    natives |= {str(m): product.native(x_MK[:m].contiguous()) for m in ROWS if 1 < m < full}
    if full > 1:
        natives["1"] = torch.cat([product.native(x_MK[t : t + 1].contiguous()) for t in range(min(_ALONE, full))])
    out = {}
    for rows, native_MN in natives.items():
        m = native_MN.shape[0]
        for name, columns in product.columns.items():
            n, p, f, e = (t[:m, columns].double() for t in (native_MN, pin_MN, full_MN, exact_MN))
            fact = ReplayFacts(
                count=n.numel(),
                unequal_pin=_unequal(n, p),
                unequal_full=_unequal(n, f),
                native_error=_total(n - e),
                pin_error=_total(p - e),
                scale=_total(e),
                largest_full=_largest(n - f),
                largest_pin=_largest(n - p),
            )
            out[f"replay/{name}/{rows}"] = packed(fact)
    return out


def _sums(native_MN: torch.Tensor, exact_MN: torch.Tensor, site: SumSite, impl: gemm.Impl) -> dict[str, torch.Tensor]:
    """Facts of one row-parallel layer's partials. The float32 payload is this rank's exact share, so it holds the sum's doing alone."""
    out = {}
    model_dtype = native_MN.dtype
    payloads = {str(model_dtype).removeprefix("torch."): native_MN}
    if model_dtype != torch.float32:
        payloads["float32"] = exact_MN.float()
    for rows in dict.fromkeys((min(site.decode_rows, native_MN.shape[0]), native_MN.shape[0])):
        product_MN = reduce_fp64.fold(site.tp.gathered(exact_MN[:rows]), out_dtype=torch.float64)
        for payload, part_MN in payloads.items():
            parts = site.tp.gathered(part_MN[:rows].contiguous())
            sent_MN = reduce_fp64.fold(parts, out_dtype=torch.float64)
            ordered_MN = reduce.fold(parts, impl=impl, out_dtype=part_MN.dtype)
            ways: dict[str, Sum] = {f"sum/{way}/{payload}": sum_ for way, sum_ in site.ways.items()}
            if part_MN is native_MN:
                ways |= {f"backend/{name}": sum_ for name, sum_ in site.backends.items()}
            for name, sum_ in ways.items():
                summed_MN = sum_(part_MN[:rows].clone())
                if summed_MN is None:
                    continue
                fact = SumFacts(
                    count=summed_MN.numel(),
                    unequal=_unequal(summed_MN, ordered_MN),
                    unequal_rounded=_unequal(summed_MN.to(model_dtype), ordered_MN.to(model_dtype)),
                    sum_error=_total(summed_MN.double() - sent_MN),
                    error=_total(summed_MN.double() - product_MN),
                    scale=_total(product_MN),
                    largest=_largest(summed_MN.double() - sent_MN),
                )
                out[f"{name}/{rows}"] = packed(fact)
    return out


def alone(pairs: Mapping[str, Seq[tuple[torch.Tensor, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """``alone/WHAT`` facts: pairs of log-probs [T] of the same tokens, among fewer rows and among more."""
    out = {}
    for what, scored in pairs.items():
        if scored:
            few, many = (torch.cat([pair[i].double().cpu() for pair in scored]) for i in (0, 1))
            fact = AloneFacts(tokens=few.numel(), unequal=_unequal(few, many), largest=_largest(few - many))
            out[f"alone/{what}"] = packed(fact)
    return out


# A product's columns are shared out over the ranks; a sum is whole on every rank, and the worst rank's stands.
_WHOLE: Final = ("sum", "backend")
_SHARED_OUT: Final[Mapping[str, type[Facts]]] = {"replay": ReplayFacts, "flag": FlagFacts}


def _over_ranks(facts: dict[str, torch.Tensor], tp: TpGroup, device: torch.device) -> dict[str, torch.Tensor]:
    """`facts` with those of the products joined over the ranks, and of the sums the largest of each over the ranks. On the CPU."""
    out = dict(facts)
    for prefix in (*_SHARED_OUT, *_WHOLE):
        names = [name for name in facts if name.startswith(f"{prefix}/")]
        if tp.size > 1 and names:
            ranks = [rank.cpu() for rank in tp.gathered(torch.stack([facts[name] for name in names]).to(device))]
            if prefix in _WHOLE:  # amax: a NaN on any rank stays one
                out |= dict(zip(names, torch.stack(ranks).amax(dim=0), strict=True))
            else:
                out |= {name: joined([rank[i] for rank in ranks], _SHARED_OUT[prefix]) for i, name in enumerate(names)}
    return out


def _unequal(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a != b).sum())


def _total(x: torch.Tensor) -> float:
    return float(x.abs().sum())


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
