"""What a value may be. A check stands in the type of its field: `epochs: Positive[int] = 100`."""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

T = TypeVar("T")
Settings = TypeVar("Settings")


@dataclass(frozen=True)
class Check:
    holds: Callable[[Any], bool]
    words: str
    """what stands between the name and the refused value"""


Positive = Annotated[T, Check(lambda value: value > 0 and math.isfinite(value), "must be positive")]
NotNegative = Annotated[T, Check(lambda value: value >= 0 and math.isfinite(value), "must not be negative")]
Finite = Annotated[float, Check(math.isfinite, "must be finite")]
Share = Annotated[float, Check(lambda value: 0 <= value <= 1, "is a share from 0 to 1")]
ShareAboveZero = Annotated[float, Check(lambda value: 0 < value <= 1, "is a share above 0 and up to 1")]
BelowOne = Annotated[float, Check(lambda value: 0 <= value < 1, "must be at least 0 and below 1")]
# A setting that is chosen when data and device are known, unless it is given; the help does not show its None.
Chosen = Annotated[
    T | None, tyro.conf.arg(help_behavior_hint=lambda text: "" if "None" in text else f"(default: {text})")
]


def at_least(smallest: int, unit: str) -> Check:
    return Check(lambda value: value >= smallest, f"must be at least {smallest} {unit}")


def check_fields(settings: Any) -> None:
    """Refuse values that can never be right, naming the setting, the value and what it may be. Groups are entered."""
    hints = get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            check_fields(value)
        else:
            _check_value(field.name, value, hints[field.name])


def converted(settings: Settings) -> Settings:
    """A copy in which strings are paths where paths are declared, and so on: what people pass in Python."""
    hints = get_type_hints(type(settings), include_extras=True)
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}  # pyright: ignore[reportArgumentType]
    return dataclasses.replace(settings, **{name: convert(value, hints[name]) for name, value in given.items()})  # pyright: ignore[reportArgumentType]


def convert(value: Any, hint: Any) -> Any:
    """The value as the type says it, if that is another way to write it; else the value."""
    kinds = list(_kinds(hint))
    for kind in kinds:
        if isinstance(kind, Convert) and isinstance(value, str):
            return kind.function(value)
    if Path in kinds and isinstance(value, str):
        return Path(value)
    if str in kinds and Path not in kinds and isinstance(value, Path):
        return str(value)
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Convert:
    """Reads a value that is written as text."""

    function: Callable[[str], Any]


def _kinds(hint: Any) -> Iterable[Any]:
    """The types that a hint allows, and what is annotated to them."""
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        yield from [*_kinds(inner), *notes]
    elif get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from _kinds(part)
    else:
        yield hint


def _check_value(name: str, value: Any, hint: Any) -> None:
    parts = get_args(hint)
    if get_origin(hint) is Annotated:
        _check_value(name, value, parts[0])
        for note in parts[1:]:
            if isinstance(note, Check) and value is not None and not note.holds(value):
                raise ValueError(f"{flag(name)} {note.words}, not {value}")
    elif get_origin(hint) in (Union, UnionType):
        if value is not None or NoneType not in parts:
            _check_one_of(name, value, [part for part in parts if part is not NoneType])
    elif get_origin(hint) is Literal:
        if value not in parts:
            raise ValueError(f"{flag(name)} is one of {', '.join(map(str, parts))}, not {value}")
    elif get_origin(hint) is tuple:
        kinds = [parts[0]] * len(value) if parts[-1] is Ellipsis and isinstance(value, tuple) else list(parts)
        if not isinstance(value, tuple) or len(value) != len(kinds):
            raise ValueError(f"{flag(name)} cannot be {value!r}")
        for each, kind in zip(value, kinds):
            _check_value(name, each, kind)
    elif not _is_a(value, hint):
        raise ValueError(f"{flag(name)} cannot be {value!r}")


def _check_one_of(name: str, value: Any, hints: list[Any]) -> None:
    problems = []
    for hint in hints:
        try:
            return _check_value(name, value, hint)
        except ValueError as error:
            problems.append(error)
    raise problems[0]


def _is_a(value: Any, kind: Any) -> bool:
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return kind is Any or isinstance(value, get_origin(kind) or kind)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def suggest(name: str, known: Iterable[str], num: int = 1) -> str:
    """'Did you mean ...?', or the names there are."""
    known = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name.lower(), known, num, cutoff=0.5)
    if near:
        return f"Did you mean {' or '.join(repr(each) for each in near)}?"
    return f"There are: {', '.join(known[:20])}{', ...' if len(known) > 20 else ''}."
