"""A settings class as the parameters of a function: each is declared once, in the class."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import ParamSpec, TypeVar

from millionway.settings.checks import check_fields, converted
from millionway.settings.pretrain import GROUPS, HINTS, Pretrain

P = ParamSpec("P")
Settings = TypeVar("Settings")
Result = TypeVar("Result")


def taking(settings: Callable[P, Settings]) -> Callable[[Callable[[Settings], Result]], Callable[P, Result]]:
    """A decorator: a function of one settings object becomes a function of its fields.

    @taking(Embed)
    def embed(asked: Embed) -> Path: ...

    embed("runs/photos", "photos", "features.npy", device="cpu")
    """

    def decorate(function: Callable[[Settings], Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def with_fields(*args: P.args, **given: P.kwargs) -> Result:
            asked = converted(settings(*args, **given))
            check_fields(asked)
            return function(asked)

        declared = inspect.signature(settings)
        returned = inspect.signature(function).return_annotation
        setattr(with_fields, "__signature__", declared.replace(return_annotation=returned))  # noqa: B010
        with_fields.__annotations__ = {name: each.annotation for name, each in declared.parameters.items()}
        return with_fields

    return decorate


def with_all_settings(function: Callable[P, Result]) -> Callable[P, Result]:
    """A decorator: the signature of a function of **settings names every setting of a run, with its default."""
    own = inspect.signature(function).parameters
    parameters = [each for each in own.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    for part in (Pretrain, *GROUPS.values()):
        for field in fields(part):
            if field.name not in own and field.name not in GROUPS:
                default = inspect.Parameter.empty if field.default is MISSING else field.default
                kind = inspect.Parameter.KEYWORD_ONLY
                parameters.append(inspect.Parameter(field.name, kind, default=default, annotation=HINTS[field.name]))
    setattr(function, "__signature__", inspect.signature(function).replace(parameters=parameters))  # noqa: B010
    return function
