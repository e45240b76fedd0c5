"""From the words of a command to its settings."""

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import tyro

from millionway.settings import pretrain as run_settings
from millionway.settings.checks import flag, suggest
from millionway.settings.pretrain import HINTS, Pretrain
from millionway.settings.stored import first_settings

Settings = TypeVar("Settings")
CONF = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)


@dataclass(frozen=True)
class MainSettings(Pretrain):
    """Pretrain an encoder on the images of a folder, without labels. --help-all shows the other settings too."""

    classifier: tyro.conf.Suppress[run_settings.Classifier] = field(default_factory=run_settings.Classifier)
    augmentation: tyro.conf.Suppress[run_settings.Augmentation] = field(default_factory=run_settings.Augmentation)
    images: tyro.conf.Suppress[run_settings.Images] = field(default_factory=run_settings.Images)
    running: tyro.conf.Suppress[run_settings.Running] = field(default_factory=run_settings.Running)


def pretrain_settings(args: list[str]) -> Pretrain:
    """What is given, over what a preset or the run to go on with says."""
    resume_from = value_of("--out", args) if "--resume" in args else None
    if "--resume" in args and resume_from is None and "--help" not in args:
        raise ValueError("--resume needs --out, the run folder to go on with")
    preset = None if resume_from else value_of("--preset", args)
    first = first_settings(preset, Path(resume_from) if resume_from else None)
    default = replace(first, resume=False)  # so that --resume is a flag, and not --no-resume
    if not first.data:
        default = replace(default, data=tyro.MISSING, out=tyro.MISSING)
    return parse(Pretrain, args, "pretrain", default)


def value_of(name: str, args: list[str]) -> str | None:
    """The value of a flag that is needed before the others can be read."""
    for place, arg in enumerate(args):
        if arg == name and place + 1 < len(args):
            return args[place + 1]
        if arg.startswith(name + "="):
            return arg[len(name) + 1 :]
    return None


def parse(kind: type[Settings], args: list[str], verb: str, default: Settings | None = None) -> Settings:
    _check_names(kind, args, verb)
    options: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(kind, args=args, prog=f"millionway {verb}", config=CONF, **options)


def _check_names(kind: type[Any], args: list[str], verb: str) -> None:
    """Every option that does not exist is named, each with what may have been meant."""
    known = ["--help", *map(flag, HINTS if issubclass(kind, Pretrain) else (field.name for field in fields(kind)))]
    given = (arg.partition("=")[0] for arg in args if arg.startswith("--") and arg != "--")
    wrong = [name for name in given if "--" + re.sub("^no-", "", name[2:].replace("_", "-")) not in known]
    if wrong:
        problems = (f"{name}: no such option. {suggest(name, known)}" for name in wrong)
        raise ValueError(f"{' '.join(problems)} millionway {verb} --help lists them.")
