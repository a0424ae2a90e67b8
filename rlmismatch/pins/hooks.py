"""Reversible replacement of an engine's operations, and the records that the probes keep of them.

An adapter describes every operation it can hook as a `Patch`; `installed` puts a list of them in force and takes them out
again, also after an error. Inside a replacement, `OpSwitch.run` decides between the engine's own operation and the pin, and
lets the two probes look on: ``local`` judges native, pin and float64 on the same captured inputs, ``boundary`` keeps what the
native operation gives on pinned inputs.

Nothing here knows an engine. Patching is per object (or per module global), never per class: two engines of one class in a
process do not see each other's pins.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

from rlmismatch.pins.spec import LocalError

Probe = Literal["none", "local", "boundary"]
# How the TP ranks share an operation's output: whole on every rank, or disjoint columns (heads, features), or disjoint rows.
Split = Literal["whole", "columns", "rows"]
Value = TypeVar("Value")


def hook_probe(arm_probe: str) -> Probe:
    """The probe that hooks take part in under an arm's; other probes look at the engine from outside of them."""
    return "local" if arm_probe == "local" else "boundary" if arm_probe == "boundary" else "none"


_ABSENT = object()


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One place to hook: `target.<name>`, where target is an object or a Python module with a `__dict__`.

    make: the callable in force when the patch goes in -> its replacement. For an object it is the bound method, so the
    replacement takes no `self`. pins: the ids whose arithmetic the replacement can carry. label: for people, e.g. ``layers.0.qkv``.
    """

    target: object
    name: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    pins: tuple[str, ...]
    label: str = ""


class CallCounter:
    """How often each hook ran. A hook that an engine accepts and never calls (compiled code, a fused path) is found here.

    A hook may carry several pins, and under a probe it runs without any; how often a *pin* ran is `OpSwitch.calls`.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._patches = tuple(patches)
        self._calls = [0] * len(self._patches)

    def add(self, index: int) -> None:
        self._calls[index] += 1

    def silent(self) -> tuple[str, ...]:
        """Labels of the hooks that never ran."""
        return tuple(patch.label or patch.name for patch, n in zip(self._patches, self._calls, strict=True) if n == 0)

    def by_pin(self) -> dict[str, int]:
        """Pin -> calls of all hooks that can carry it."""
        out: Counter[str] = Counter()
        for patch, n in zip(self._patches, self._calls, strict=True):
            out.update(dict.fromkeys(patch.pins, n))
        return dict(out)


@contextlib.contextmanager
def installed(patches: Sequence[Patch]) -> Iterator[CallCounter]:
    """Put `patches` in force, yield their call counts, and restore what was there, in reverse order, also after an error.

    Nests: an inner patch of the same place sees the outer replacement as native, and gives it back on exit. Raises ValueError
    if one list names the same place twice, and TypeError for a target without a writable `__dict__` (a class).
    """
    places = [(id(p.target), p.name) for p in patches]
    doubled = next((p for p, place in zip(patches, places, strict=True) if places.count(place) > 1), None)
    if doubled is not None:
        raise ValueError(f"{doubled.label or doubled.name} is patched twice in one list")
    counter = CallCounter(patches)
    with contextlib.ExitStack() as stack:
        for index, patch in enumerate(patches):
            _install(stack, patch, counter, index)
        yield counter


def _install(stack: contextlib.ExitStack, patch: Patch, counter: CallCounter, index: int) -> None:
    # nn.Module and Python modules both look in the instance dictionary first; writing there bypasses nn.Module.__setattr__.
    space = vars(patch.target)
    if not isinstance(space, dict):
        raise TypeError(f"{patch.label or patch.name}: cannot patch a {type(patch.target).__name__} in place")
    replacement = patch.make(getattr(patch.target, patch.name))

    def counted(*args: Any, **kwargs: Any) -> Any:
        counter.add(index)
        return replacement(*args, **kwargs)

    before = space.get(patch.name, _ABSENT)
    space[patch.name] = counted

    def restore() -> None:
        if before is _ABSENT:
            del space[patch.name]
        else:
            space[patch.name] = before

    stack.callback(restore)


@dataclass(kw_only=True)
class _Sums:
    """Running sums of one (boundary, pin) on one rank. Means are formed after the ranks are merged."""

    rows: int = 0
    count: int = 0
    unequal: int = 0
    # native-pin, native-fp64, pin-fp64, |fp64|
    totals: list[float] = field(default_factory=lambda: [0.0] * 4)
    maxima: list[float] = field(default_factory=lambda: [0.0] * 3)
    beyond_one_ulp: int = 0
    ulp_max: float = 0.0
    split: Split = "whole"

    def add(self, native: torch.Tensor, pinned: torch.Tensor, fp64: torch.Tensor) -> None:
        n, p, x = native.double(), pinned.double(), fp64.double()
        errors = [(n - p).abs(), (n - x).abs(), (p - x).abs()]
        self.rows += native.shape[0]
        self.count += native.numel()
        self.unequal += int((native != pinned).sum())
        ulps = ulp_distance(native, fp64.to(native.dtype))
        self.beyond_one_ulp += int((ulps > 1).sum())
        sums = torch.stack([e.sum() for e in [*errors, x.abs()]]).tolist()
        self.totals = [a + b for a, b in zip(self.totals, sums, strict=True)]
        if native.numel():
            self.maxima = [_nan_max(a, float(e.max())) for a, e in zip(self.maxima, errors, strict=True)]
            self.ulp_max = max(self.ulp_max, float(ulps.max()))

    def merge(self, other: _Sums) -> None:
        """Add another rank's sums; an output that is whole on every rank counts once, as the worst rank has it."""
        self.maxima = [_nan_max(a, b) for a, b in zip(self.maxima, other.maxima, strict=True)]
        self.ulp_max = max(self.ulp_max, other.ulp_max)
        if self.split == "whole":
            self.unequal = max(self.unequal, other.unequal)
            self.beyond_one_ulp = max(self.beyond_one_ulp, other.beyond_one_ulp)
            self.totals = [_nan_max(a, b) for a, b in zip(self.totals, other.totals, strict=True)]
            return
        self.rows += other.rows if self.split == "rows" else 0
        self.count += other.count
        self.unequal += other.unequal
        self.beyond_one_ulp += other.beyond_one_ulp
        self.totals = [a + b for a, b in zip(self.totals, other.totals, strict=True)]


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """int64: how many representable values lie between `a` and `b`, element by element, plus one; equal dtypes, 0 for equal values."""
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]

    def ordered(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(width).long()
        # Sign and magnitude to one ascending line on which both zeros are one point.
        return torch.where(bits < 0, torch.iinfo(width).min - bits, bits)

    return (ordered(a) - ordered(b)).abs()


def _nan_max(a: float, b: float) -> float:
    """max that a NaN always wins: Python's own keeps whichever came first."""
    return a if a != a else b if b != b else max(a, b)


class Recorder:
    """What the probes saw on this rank."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], _Sums] = {}
        self._kept: dict[str, tuple[torch.Tensor, Split]] = {}

    def observe(self, boundary: str, pin: str, *, native: torch.Tensor, pinned: torch.Tensor, fp64: torch.Tensor, split: Split) -> None:
        """Add one comparison of equal shapes [rows, ...]; calls for one (boundary, pin) add up, e.g. over sequences.

        split says what this rank's tensor is of the whole output. Raises ValueError when shapes differ, or when native and pin
        have different dtypes.
        """
        if native.shape != pinned.shape or native.shape != fp64.shape or native.dtype != pinned.dtype:
            raise ValueError(
                f"{boundary}: native {tuple(native.shape)} {native.dtype}, pin {tuple(pinned.shape)} {pinned.dtype}, "
                f"float64 {tuple(fp64.shape)} cannot be compared element by element"
            )
        sums = self._sums.setdefault((boundary, pin), _Sums(split=split))
        sums.add(native, pinned, fp64)

    def keep(self, boundary: str, tensor: torch.Tensor, *, split: Split) -> None:
        """Keep a copy of this rank's part [rows, columns, ...] of a native output; a rank may hold 0 rows or columns.

        Raises ValueError if the boundary was kept before: one sequence only.
        """
        if boundary in self._kept:
            raise ValueError(f"boundary {boundary!r} was recorded twice")
        self._kept[boundary] = (tensor.detach().cpu().clone(), split)

    def boundaries(self, group: torch.distributed.ProcessGroup | None = None) -> dict[str, torch.Tensor]:
        """What was kept, joined over the ranks of `group` in rank order, on the CPU, in the order it was kept.

        Collective when a group is given; complete on the group's first rank, empty on the others.
        """
        if group is None:
            return {name: tensor for name, (tensor, _) in self._kept.items()}
        first = torch.distributed.get_rank(group) == 0
        ranks: list[Any] | None = [None] * torch.distributed.get_world_size(group) if first else None
        torch.distributed.gather_object(self._kept, ranks, dst=torch.distributed.get_global_rank(group, 0), group=group)
        if ranks is None:
            return {}
        return {name: _join([kept[name][0] for kept in ranks], split) for name, (_, split) in self._kept.items()}

    def local_errors(self, group: torch.distributed.ProcessGroup | None = None) -> list[LocalError]:
        """The comparisons in the order they were first seen, merged over the ranks of `group` (None: this rank alone).

        Collective when a group is given; every rank gets the same list. A comparison of no element has NaN means.
        """
        merged = self._sums
        if group is not None:
            ranks: list[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(ranks, self._sums, group=group)
            merged = ranks[0]
            for other in ranks[1:]:
                if other.keys() != merged.keys():
                    raise ValueError(f"ranks observed different operations: {sorted(other.keys() ^ merged.keys())[:3]}")
                for key, sums in other.items():
                    merged[key].merge(sums)
        return [_local_error(boundary, pin, sums) for (boundary, pin), sums in merged.items()]


def _join(parts: list[torch.Tensor], split: Split) -> torch.Tensor:
    return parts[0] if split == "whole" else torch.cat(parts, dim=0 if split == "rows" else 1)


def _local_error(boundary: str, pin: str, sums: _Sums) -> LocalError:
    means = [t / sums.count if sums.count else float("nan") for t in sums.totals]
    return LocalError(
        boundary=boundary,
        pin=pin,
        rows=sums.rows,
        count=sums.count,
        unequal=sums.unequal,
        native_vs_pin_max=sums.maxima[0],
        native_vs_pin_mean=means[0],
        native_vs_fp64_max=sums.maxima[1],
        native_vs_fp64_mean=means[1],
        pin_vs_fp64_max=sums.maxima[2],
        pin_vs_fp64_mean=means[2],
        fp64_scale=means[3],
        beyond_one_ulp=sums.beyond_one_ulp,
        ulp_max=sums.ulp_max,
    )


@dataclass(frozen=True, kw_only=True)
class OpSwitch:
    """Which arithmetic an arm asks for, and who looks on. Shared by all hooks of one arm."""

    active: frozenset[str]
    probe: Probe
    recorder: Recorder
    calls: Counter[str] = field(default_factory=Counter)  # pin -> how often its arithmetic was what the arm returned

    def hooks(self, patches: Sequence[Patch]) -> tuple[Patch, ...]:
        """The patches this arm needs: those that carry an active pin, or all of them under a probe."""
        return tuple(p for p in patches if self.probe != "none" or self.active.intersection(p.pins))

    def run(
        self,
        pin: str,
        *,
        native: Callable[[], Value],
        pinned: Callable[[], Value],
        exact: Callable[[], Value],
        parts: Callable[[Value], Mapping[str, torch.Tensor]],
        split: Split,
        chosen: Callable[[], Value] | None = None,
        also: tuple[str, ...] = (),
    ) -> Value:
        """What the arm says of one call of one operation.

        native, pinned, exact: the engine's own operation, the pin and the unrounded float64 reference on the same inputs; none
        may change its inputs. parts: a value -> boundary name -> this rank's tensor [rows, columns, ...], padding cut away.
        chosen: what the arm returns if that is neither wholly native nor wholly pinned; by default `pinned` if `pin` is active.
        also: further pins whose arithmetic `chosen` holds when they are active.
        """
        self.calls.update(p for p in (pin, *also) if p in self.active)
        pick = chosen or (pinned if pin in self.active else native)
        if self.probe == "none":
            return pick()
        values = {id(pick): pick()}

        def value_of(op: Callable[[], Value]) -> Value:
            if id(op) not in values:
                values[id(op)] = op()
            return values[id(op)]

        native_parts = parts(value_of(native))
        if self.probe == "boundary":
            for name, tensor in native_parts.items():
                self.recorder.keep(name, tensor, split=split)
            return value_of(pick)
        pinned_parts, exact_parts = parts(value_of(pinned)), parts(exact())
        for name, tensor in native_parts.items():
            self.recorder.observe(name, pin, native=tensor, pinned=pinned_parts[name], fp64=exact_parts[name], split=split)
        return value_of(pick)
