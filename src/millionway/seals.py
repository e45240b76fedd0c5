"""What was written is what is read. A JSON file carries a checksum of its content; a folder, a list of all its files.

A seal finds damage and changes by hand. It is no signature: whoever makes a folder can seal it, so what is read is
checked for kind and range as well.
"""

import hashlib
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

from millionway.files import BadFile, read_regular, sync, write_whole

log = logging.getLogger("millionway")

SEAL = "seal"
MANIFEST = "manifest.json"
MAX_JSON_BYTES = 1 << 27


# --- JSON -------------------------------------------------------------------------------------------------------------


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """The content as JSON has it, and its seal."""
    plain = json.loads(json.dumps(content, default=str))
    return {**plain, SEAL: seal_of(plain)}


def seal_of(content: dict[str, Any]) -> str:
    """Of the content, not of how it is laid out. Content that came from JSON."""
    text = json.dumps({name: value for name, value in content.items() if name != SEAL}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def opened(path: Path, text: str | bytes, remedy: str = "") -> dict[str, Any]:
    """The content of sealed JSON, without its seal. What has none (older versions) is taken with a warning."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFile(path, f"it cannot be read as JSON ({str(error) or type(error).__name__})", remedy) from None
    if not isinstance(content, dict):
        raise BadFile(path, "not what was written there: no object with names", remedy)
    if SEAL not in content:
        log.warning("%s has no seal, so nobody can tell whether it was changed or damaged", path)
    elif content.pop(SEAL) != seal_of(content):
        raise BadFile(path, "it is not as it was written: its seal is broken", remedy)
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, json.dumps(sealed(content), indent=2) + "\n")


def read_json(path: Path, remedy: str = "") -> dict[str, Any]:
    return opened(path, read_regular(path, MAX_JSON_BYTES), remedy)


def check_fields(path: Path | str, content: dict[str, Any], **kinds: type | tuple[type, ...]) -> None:
    """Each name must be there, with a value of one of its kinds. Numbers must be finite; a bool is no number."""
    for name, kind in kinds.items():
        value, allowed = content.get(name), kind if isinstance(kind, tuple) else (kind,)
        fits = isinstance(value, allowed) and (not isinstance(value, bool) or bool in allowed)
        if not fits or (isinstance(value, float) and not math.isfinite(value)):
            wanted = " or ".join("nothing" if each is type(None) else each.__name__ for each in allowed)
            raise BadFile(path, f"{name} is {value!r:.60}, and should be {wanted}")


# --- folders ----------------------------------------------------------------------------------------------------------


def seal_folder(folder: Path) -> str:
    """Bring every file of a folder to the disk and list its size and checksum; returns the checksum of that list."""
    files = {}
    for path in sorted(folder.rglob("*")):
        sync(path)
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": checksum(path)}
    write_json(folder / MANIFEST, {"files": files})
    return checksum(folder / MANIFEST)


def find_damage(folder: Path, seal: str | None = None) -> str:
    """What is wrong with a sealed folder, or ''. seal: the checksum of its list, if it is known."""
    try:
        listed = read_json(folder / MANIFEST)
        if seal not in (None, checksum(folder / MANIFEST)):
            return f"{MANIFEST}: another one was written there"
        check_fields(MANIFEST, listed, files=dict)
        there = {Path(at, name).relative_to(folder).as_posix() for at, _, names in os.walk(folder) for name in names}
        unknown = sorted(there - {MANIFEST} - set(listed["files"]))
        if unknown:
            return f"{unknown[0]}: it does not belong here"
        for name, about in listed["files"].items():
            if name not in there:
                return f"{name}: it is gone"
            check_fields(MANIFEST, about if isinstance(about, dict) else {}, bytes=int, sha256=str)
            if (folder / name).lstat().st_size != about["bytes"] or checksum(folder / name) != about["sha256"]:
                return f"{name}: its content changed"
    except BadFile as error:
        return str(error)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


def checksum(path: Path) -> str:
    """As sha256sum prints it. Of a file, never of what a link points to."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
