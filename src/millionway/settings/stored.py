"""The settings of a run as config.json, and what a new start is laid over.

What is read is checked: a run folder may be damaged, or somebody else's.
"""

import dataclasses
import json
from pathlib import Path

from millionway.files import BadFile, remove
from millionway.seals import read_json, write_json
from millionway.settings.checks import flag
from millionway.settings.presets import preset as settings_of_preset
from millionway.settings.pretrain import FREE_ON_RESUME, GROUPS, Pretrain, check, flat, with_settings

CONFIG = "config.json"
STARTING = "starting.json"
"""what was asked for, until the run begins"""


def to_json(config: Pretrain) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2, default=str) + "\n"


def from_json(text: str) -> Pretrain:
    """The inverse of `to_json`."""
    stored = json.loads(text)
    for group in GROUPS:
        stored |= stored.pop(group)
    empty = Pretrain(data="", out=Path())
    return with_settings(empty, **{name: value for name, value in stored.items() if name in flat(empty)})


def has_begun(run: Path) -> bool:
    """Whether there is a run that can go on. Before that, a start is a start."""
    return (run / CONFIG).exists()


def run_settings(run: Path) -> Pretrain:
    """The settings of the run in a folder."""
    if not (run / CONFIG).is_file():
        raise ValueError(f"there is no run in {run} (no {CONFIG})")
    remedy = (
        "Put the file back as it was, for the run cannot go on without it. A new run can start from the encoder: "
        f"--init-from {run / 'encoder.safetensors'}"
    )
    config = _read(run / CONFIG, remedy)
    # What could not be chosen yet when it began was this.
    before = {"encoder_precision": "float32", "row_views": config.augmentation.views, "first_size": "full"}
    missing = {name: value for name, value in before.items() if flat(config)[name] is None}
    return with_settings(config, **missing)


def _settings_to_resume(run: Path) -> Pretrain:
    """The same; of a start that was killed, what was asked for."""
    if has_begun(run):
        return run_settings(run)
    if (run / STARTING).is_file():
        return _read(run / STARTING, f"Remove {run} and give the first command again")
    hint = "" if not (run / "train.log").exists() else ". It had not begun: give the first command again"
    raise ValueError(f"there is no run in {run} (no {CONFIG}){hint}")


def _read(path: Path, remedy: str) -> Pretrain:
    content = read_json(path, remedy)
    try:
        config = from_json(json.dumps(content))
        check(config)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise BadFile(path, f"it cannot be read ({type(error).__name__}: {error})", remedy) from None
    if not isinstance(config.data, str):
        raise BadFile(path, f"data is {config.data!r:.60}, and should be the place of images", remedy)
    return config


def write_start(run: Path, asked: Pretrain) -> None:
    write_json(run / STARTING, json.loads(to_json(asked)))


def write_settings(run: Path, config: Pretrain) -> None:
    """Where they stand, the run has begun."""
    write_json(run / CONFIG, json.loads(to_json(config)))
    remove(run / STARTING)


def first_settings(preset: str | None, resume_from: Path | None) -> Pretrain:
    """What the user's own settings are laid over: the run to go on with, a preset, or the defaults."""
    if resume_from is not None:
        return with_settings(_settings_to_resume(resume_from), resume=True, out=resume_from)
    return Pretrain(data="", out=Path()) if preset is None else settings_of_preset(preset)


def check_resume(stored: Pretrain, wanted: Pretrain) -> None:
    """A run goes on as it began: refuse changes of what is computed."""
    then, now = flat(stored), flat(wanted)
    changed = [name for name in then if then[name] != now[name] and name not in FREE_ON_RESUME]
    if changed:
        what = ", ".join(f"{flag(name)} was {then[name]}, now {now[name]}" for name in changed)
        raise ValueError(f"--resume goes on with the run's own settings: {what}. Leave them out, or start a new run.")
