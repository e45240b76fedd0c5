"""What can be set for a study."""

import json
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import tyro

from millionway.settings.checks import Chosen, Positive, flag


def _assignments(words: list[str]) -> dict[str, Any]:
    """{"lr": 0.06} of ["lr=0.06"]."""
    found = {}
    for text in words:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text}: write NAME=VALUE, such as lr=0.06")
        try:
            found[name.replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            found[name.replace("-", "_")] = value
    return found


Assignments = Annotated[
    dict[str, Any],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[NAME=VALUE ...]",
        instance_from_str=_assignments,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [f"{name}={json.dumps(each)}" for name, each in value.items()],
    ),
]


@dataclass(frozen=True)
class Study:
    """Run one of the paper's ablations on your data: components, initialization, sampling, smoothing, views,
    prior-similarity, instance-vs-semantic. Start it again to go on: finished runs are kept."""

    name: tyro.conf.Positional[str]
    """the study"""
    _: KW_ONLY
    out: Path
    """folder of the study; several studies may share it, and their runs"""
    data: Chosen[str] = None
    """labeled images; by default the preset's"""
    preset: Chosen[str] = None
    """what all runs have in common; `millionway presets` lists them"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """each setting is run with each of them"""
    epochs: tuple[Positive[int], ...] = (10,)
    """of a run; several for the initialization study, the others take the largest"""
    jobs: Positive[int] = 1
    """runs at a time; the cores are divided among them"""
    cells: tuple[str, ...] = ()
    """only these rows of the study's table, by name"""
    test_data: Chosen[str] = None
    """other labeled images as queries; by default the data's test split, or a held-out fifth"""
    max_images: Chosen[Positive[int]] = None
    """train on at most so many of the images, always the same ones; by default all"""
    set: Assignments = field(default_factory=dict)
    """other settings of pretrain for all runs, such as lr=0.06 row_lr=20"""

    @property
    def changes(self) -> dict[str, Any]:
        """All that is given for the runs, as settings of pretrain."""
        given = {name: getattr(self, name) for name in ("data", "preset", "test_data", "max_images")}
        given = {name: value for name, value in given.items() if value is not None}
        for name in self.set:
            if name in {each.name for each in fields(self)}:
                raise ValueError(f"--set {name}: use {flag(name)}")
        return {**given, **self.set}
