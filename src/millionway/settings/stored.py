"""The settings of a run as config.json, and what a new start is laid over."""

import dataclasses
import json
from pathlib import Path

from millionway.settings.checks import flag
from millionway.settings.presets import preset as settings_of_preset
from millionway.settings.pretrain import FREE_ON_RESUME, GROUPS, Pretrain, flat, with_settings


def to_json(config: Pretrain) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2, default=str) + "\n"


def from_json(text: str) -> Pretrain:
    """The inverse of `to_json`."""
    stored = json.loads(text)
    for group in GROUPS:
        stored |= stored.pop(group)
    empty = Pretrain(data="", out=Path())
    return with_settings(empty, **{name: value for name, value in stored.items() if name in flat(empty)})


def run_settings(run: Path) -> Pretrain:
    """The settings of the run in a folder."""
    path = run / "config.json"
    if not path.is_file():
        raise ValueError(f"there is no run in {run} (no config.json)")
    try:
        return from_json(path.read_text())
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}), so the run cannot go on. A new run can start from its encoder: "
            f"--init-from {run / 'encoder.safetensors'}"
        ) from None


def first_settings(preset: str | None, resume_from: Path | None) -> Pretrain:
    """What the user's own settings are laid over: the run to go on with, a preset, or the defaults."""
    if resume_from is not None:
        return with_settings(run_settings(resume_from), resume=True, out=resume_from)
    return Pretrain(data="", out=Path()) if preset is None else settings_of_preset(preset)


def check_resume(stored: Pretrain, wanted: Pretrain) -> None:
    """A run goes on as it began: refuse changes of what is computed."""
    then, now = flat(stored), flat(wanted)
    changed = [name for name in then if then[name] != now[name] and name not in FREE_ON_RESUME]
    if changed:
        what = ", ".join(f"{flag(name)} was {then[name]}, now {now[name]}" for name in changed)
        raise ValueError(f"--resume goes on with the run's own settings: {what}. Leave them out, or start a new run.")
