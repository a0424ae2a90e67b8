"""The rollout's KV cache, read back to logical order: which token's K and V a kernel finds behind the block table it is called with, and
whose weights wrote them.

The table is the one that the kernel gets, not the one that the scheduler keeps; what it leads to is compared with what the layer wrote,
row by row and bit for bit. Shapes: T tokens of one request, B tokens a page, Hkv heads of this rank, D head dim.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from rlmismatch.engines import vllm_kernel_calls
from rlmismatch.engines.vllm_plants_attention import older_weights
from rlmismatch.engines.vllm_scoring import Scorer
from rlmismatch.errors import EnvironmentUnfitError
from rlmismatch.pins.hooks import Patch, installed
from rlmismatch.pins.vllm_attention import PagedCache
from rlmismatch.pins.vllm_live import LiveModel

_NULL_PAGE: Final = 0  # vLLM's, which no request gets
_PAGES: Final = 3  # of the trial's request, the last one not full


@dataclass(frozen=True, kw_only=True)
class CacheTrial:
    """What the live cache was found to hold, on this rank.

    order: ``ascending``, what else it is, or None where it cannot be read, and `why`. survived: tokens that a request read from the
    cache behind a weight update without a reset; after_reset: the same behind what this tool does at an update. stale_pages: pages
    among those that hold other K and V than the loaded weights write. pages: the physical pages of the trial's request,
    in order; shuffled: those of the same request where pages are handed out in another order.
    """

    order: str | None
    why: str = ""
    survived: int = 0
    after_reset: int = 0
    stale_pages: int = 0
    pages: tuple[int, ...] = ()
    shuffled: tuple[int, ...] = ()
    digest: str = ""  # of K and V of the first layer in logical order


@dataclass
class _Seen:
    """Of one request, the first layer's: K and V as written [T, Hkv, D], and as read through the table of the last call."""

    written: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    tables: list[torch.Tensor] = field(default_factory=list)
    kv_cache: torch.Tensor | None = None


def ask(live: LiveModel, scorer: Scorer, *, longest: int, caching: bool) -> CacheTrial:
    """Run the trial. longest: tokens that a sequence can have; caching: whether the engine keeps a prefix cache."""
    size = scorer.block_size
    tokens = min((_PAGES - 1) * size + 3, longest - 1)
    if tokens < size + 2:
        return CacheTrial(order="ascending", why=f"a page of {size} holds every sequence of at most {longest} tokens")
    ids = [1 + i % 7 for i in range(tokens)]
    attn = live.layers[0].self_attn.attn
    cache = PagedCache()
    with installed(cache.write_hook(attn, pins=(), label="trial: packed cache")):
        try:
            k, v, pages, seen = _read_back(attn, cache, scorer, ids)
        except EnvironmentUnfitError as error:
            return CacheTrial(order=None, why=error.what)
        fresh = tuple(torch.cat([w[i] for w in seen.written])[: len(k)] for i in (0, 1))
        order = _order((k, v), fresh, pages, size)
        with scorer.pages_shuffled():
            k, v, shuffled, _ = _read_back(attn, cache, scorer, ids)
        elsewhere = _order((k, v), fresh, shuffled, size)
        found = CacheTrial(
            order=order if order == elsewhere else f"{order}, on shuffled pages {elsewhere}",
            pages=pages,
            shuffled=shuffled,
            digest=_digest(*fresh),
        )
        if not caching:
            return found
        survived, _ = _after_update(live, attn, cache, scorer, ids, fresh, reset=False)
        after, stale = _after_update(live, attn, cache, scorer, ids, fresh, reset=scorer.older_weights is None)
    return dataclasses.replace(found, survived=survived, after_reset=after, stale_pages=stale)


def _read_back(attn: Any, cache: PagedCache, scorer: Scorer, ids: list[int], **request: Any) -> tuple[Any, ...]:
    """(K, V) [T, Hkv, D] through the table of the last kernel call, the pages, and what was seen. Raises where no kernel was seen."""
    seen = _Seen()
    with installed(_hooks(attn, seen)):
        scorer.request(ids, new_tokens=2, **request)
    if not seen.tables or seen.kv_cache is None:
        raise EnvironmentUnfitError("kernel-call-unseen", "no kernel call that is known here passed a block table", where="rollout")
    k_NBHD, v_NBHD = cache.views(attn, seen.kv_cache)
    position = torch.arange(len(ids), device=k_NBHD.device)
    page = seen.tables[-1][0].to(k_NBHD.device)[position // scorer.block_size].long()
    rows = (x[page, position % scorer.block_size].clone() for x in (k_NBHD, v_NBHD))
    return (*rows, tuple(page[:: scorer.block_size].tolist()), seen)


def _hooks(attn: Any, seen: _Seen) -> list[Patch]:
    def update(native: Callable[..., Any]) -> Callable[..., Any]:
        def do_kv_cache_update(layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, *rest: Any) -> Any:
            shape = (len(key), layer.num_kv_heads, layer.head_size)
            seen.written.append((key.view(shape).clone(), value.view(shape).clone()))
            seen.kv_cache = kv_cache
            return native(layer, key, value, kv_cache, *rest)

        return do_kv_cache_update

    def called(name: str, kwargs: dict[str, Any], _: Callable[..., Any]) -> None:
        if kwargs.get("block_table") is not None:
            seen.tables.append(kwargs["block_table"].clone())

    update_hook = Patch(target=attn.impl, name="do_kv_cache_update", make=update, pins=(), label="trial: cache writes")
    return [update_hook, *vllm_kernel_calls.hooks(attn.impl, called)]


def _order(found: tuple[torch.Tensor, ...], written: tuple[torch.Tensor, ...], pages: tuple[int, ...], size: int) -> str:
    """Which written page each page of the table holds."""
    tokens = len(found[0])
    spans = [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]

    def holds(span: slice, other: slice) -> bool:
        rows = min(span.stop - span.start, other.stop - other.start)
        return all(
            torch.equal(f[span.start : span.start + rows], w[other.start : other.start + rows]) for f, w in zip(found, written, strict=True)
        )

    # A page behind a sliding window is given back: the table then holds the null page, which nothing reads.
    read = [i for i, page in enumerate(pages) if page != _NULL_PAGE]
    order = [next((j for j, other in enumerate(spans) if holds(spans[i], other)), None) for i in read]
    if order == read:
        return "ascending"
    return f"pages {order}" if None not in order else "K and V that this request did not write"


def _after_update(
    live: LiveModel, attn: Any, cache: PagedCache, scorer: Scorer, ids: list[int], fresh: tuple[torch.Tensor, ...], *, reset: bool
) -> tuple[int, int]:
    """(tokens read from the cache, pages among them that the loaded weights did not write) behind a weight update."""
    with older_weights(live):
        scorer.request(ids, new_tokens=1, forget="before")
    hits = scorer.request(ids, new_tokens=1, forget="both" if reset else "after", hits=True)
    if not hits:
        return 0, 0
    with older_weights(live):
        scorer.request(ids, new_tokens=1, forget="before")
    k, v, _, _ = _read_back(attn, cache, scorer, ids, forget="after", hits=True)
    size = scorer.block_size
    stale = sum(
        not all(torch.equal(x[start : start + size], w[start : start + size]) for x, w in zip((k, v), fresh, strict=True))
        for start in range(0, hits, size)
    )
    return hits, stale


def _digest(*tensors: torch.Tensor) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return sha.hexdigest()[:12]
