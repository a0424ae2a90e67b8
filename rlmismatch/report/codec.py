"""Frozen dataclasses to JSON and back, by their type hints. Strict: a key that the dataclass does not have is an error.

JSON has no infinities, so a float that is not finite travels as the string ``"inf"``, ``"-inf"`` or ``"nan"``.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

T = TypeVar("T")
_NOT_FINITE = ("inf", "-inf", "nan")


class DecodeError(ValueError):
    """The JSON does not fit the dataclass; the message says where (``ratios[0].drift.tokens``) and what was expected."""


def encode(value: Any) -> Any:
    """`value` as JSON: dataclasses and mappings become objects, tuples become lists, enums their values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form")


def decode(kind: type[T], data: Any, *, where: str = "report") -> T:
    """`data` as an instance of the dataclass `kind`. Raises DecodeError."""
    return typing.cast(T, _decode(kind, data, where))


def schema(kind: type[Any]) -> dict[str, dict[str, str]]:
    """Every object in the JSON of `kind`, itself first: class name -> key -> type in words, ``{"Report": {"axes": "list of AxisRow"..``."""
    found: dict[str, dict[str, str]] = {}
    waiting: list[Any] = [kind]
    while waiting:
        current = waiting.pop(0)
        if dataclasses.is_dataclass(current) and isinstance(current, type):
            if current.__name__ not in found:
                hints = typing.get_type_hints(current)
                found[current.__name__] = {f.name: _type_name(hints[f.name]) for f in dataclasses.fields(current)}
                waiting += hints.values()
        else:
            waiting += [k for k in get_args(current) if k is not type(None) and get_origin(current) is not Literal]
    return found


def _decode(kind: Any, data: Any, where: str) -> Any:
    origin = get_origin(kind)
    if kind is Any:
        return data
    if origin in (Union, types.UnionType):
        inner = [k for k in get_args(kind) if k is not type(None)]
        return None if data is None else _decode(inner[0], data, where)
    if origin is Literal:
        return _require(data in get_args(kind), data, where, f"one of {list(get_args(kind))}")
    if origin is tuple:
        _require(isinstance(data, list), data, where, "a list")
        return tuple(_decode(get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is not None and issubclass(origin, Mapping):
        _require(isinstance(data, dict), data, where, "an object")
        return {k: _decode(get_args(kind)[1], v, f"{where}.{k}") for k, v in data.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast(type[Any], kind), data, where)
    if issubclass(kind, Enum):
        return kind(_require(data in [m.value for m in kind], data, where, f"one of {[m.value for m in kind]}"))
    if kind is float:
        fits = data in _NOT_FINITE if isinstance(data, str) else isinstance(data, (int, float)) and not isinstance(data, bool)
        return float(_require(fits, data, where, "a number"))
    return _require(isinstance(data, kind) and (kind is bool or not isinstance(data, bool)), data, where, kind.__name__)


def _decode_dataclass(kind: type[Any], data: Any, where: str) -> Any:
    _require(isinstance(data, dict), data, where, "an object")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    surplus = sorted(set(data) - set(fields))
    if surplus:
        raise DecodeError(f"{where}: unknown keys {surplus}")
    optional = (dataclasses.MISSING, dataclasses.MISSING)
    missing = [n for n, f in fields.items() if n not in data and (f.default, f.default_factory) == optional]
    if missing:
        raise DecodeError(f"{where}: missing keys {missing}")
    hints = typing.get_type_hints(kind)
    return kind(**{name: _decode(hints[name], value, f"{where}.{name}") for name, value in data.items()})


def _require(fits: bool, data: Any, where: str, expected: str) -> Any:
    if not fits:
        raise DecodeError(f"{where}: expected {expected}, got {data!r}")
    return data


def _type_name(kind: Any) -> str:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if k is type(None) else _type_name(k) for k in get_args(kind))
    if origin is tuple:
        return f"list of {_type_name(get_args(kind)[0])}"
    if origin is Literal:
        return " / ".join(f'"{v}"' for v in get_args(kind))
    if origin is not None:
        return f"object of {_type_name(get_args(kind)[1])}"
    if kind is Any:
        return "any"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " / ".join(f'"{m.value}"' for m in kind)
    return {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}.get(str(kind.__name__), str(kind.__name__))
