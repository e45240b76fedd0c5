"""Numbers as people write them: 14.2M images, 32GB of memory."""

import math
from typing import Annotated

import tyro

from millionway.settings.checks import Check, Convert

UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def number(text: str) -> int:
    """ "14.2M" is 14,200,000; "32GB" and "32G" are 32e9, "32GiB" is 32 x 2^30."""
    plain = text.strip().upper().removesuffix("B").replace(",", "").replace("_", "")
    unit = next((unit for unit in sorted(UNITS, key=len, reverse=True) if plain.endswith(unit)), "")
    try:
        value = float(plain.removesuffix(unit)) * UNITS.get(unit, 1)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{text!r} is not a number such as 1281167, 14.2M or 32GB")
    return round(value)


Quantity = Annotated[
    int,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="NUMBER",
        instance_from_str=lambda words: number(words[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    ),
    Convert(number),
    Check(lambda value: value > 0, "must be positive"),
]
