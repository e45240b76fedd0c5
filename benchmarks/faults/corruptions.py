"""A run folder damaged in one place, and then each verb: fine, or one clear line?

A bit is flipped, a file is cut, removed, or swapped with another, in every file of the folder. Silent is: a verb that
says nothing about it and gives other results than on the whole folder.
"""

import hashlib
import json
import random
import shutil
from pathlib import Path

import scene

MUST = "0 tracebacks, 0 silent"
NUM = 1000
TOLD = ("damaged", "seal", "no complete checkpoint", "is not there", "missing")  # words of a warning


def measure(folder: Path, short: bool) -> dict:
    whole, _, _ = scene.whole_run(folder)
    run, out = folder / "damaged", folder / "out"
    shutil.copytree(whole, run)
    expected = {name: _answer(name, args, out, run) for name, args in scene.verbs(out, run).items()}
    counts, wrong = {"damages": 0, "fine": 0, "one line": 0}, []
    for number in range(12 if short else NUM):
        if scene.time_is_up():
            break
        scene.remove(run)
        shutil.copytree(whole, run)
        what = _damage(run, random.Random(number))
        counts["damages"] += 1
        for name, args in scene.verbs(out, run).items():
            told, answer = _answer(name, args, out, run)
            silent = told == "fine" and answer != expected[name][1]
            if told == "traceback" or silent:
                wrong.append(f"{what}, {name}: {'silent: ' if silent else ''}{answer}")
            else:
                counts["fine" if told == "fine" else "one line"] += 1
    asked = f"{counts['damages']} damages x {len(expected)} verbs"
    result = f"{asked}: {counts['fine']} as if nothing were, {counts['one line']} in one line, {len(wrong)} wrong"
    return {"result": result, "passed": not wrong, **counts, "wrong": wrong}


def _answer(name: str, args: list[str], out: Path, run: Path) -> tuple[str, str]:
    """(fine, told or traceback; what came out of it)."""
    scene.remove(out)
    out.mkdir()
    child = scene.Child(args, out.with_suffix(".said"))
    child.wait()
    words = child.words
    if "Traceback" in words or (child.code and not scene.is_clear(child)):
        return "traceback", f"exit code {child.code}: {words[-800:]}"
    if child.code or any(word in words for word in TOLD):
        return "told", ""
    if name in ("resume", "report"):
        text = (run / "report.html").read_text()
        return "fine", hashlib.sha256(text.encode()).hexdigest() + (scene.bits(run) if name == "resume" else "")
    return "fine", str([_content(path) for path in sorted(out.iterdir()) if path.suffix != ".html"])


def _content(path: Path) -> str:
    """Of an answer, without what differs from time to time."""
    if path.suffix == ".json":
        content = json.loads(path.read_text())
        return str(content["numbers"] if isinstance(content, dict) else content)  # not the seconds it took
    if path.suffix == ".safetensors":  # its header lists notes in any order
        from safetensors.torch import load_file

        return str({name: tensor.double().sum().item() for name, tensor in sorted(load_file(path).items())})
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _damage(run: Path, chance: random.Random) -> str:
    files = sorted(path for path in run.rglob("*") if path.is_file())
    path, kind = chance.choice(files), chance.choice(["flip", "cut", "remove", "swap"])
    name = path.relative_to(run).as_posix()
    data = path.read_bytes()
    if kind == "flip" and data:
        place = chance.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :])
    elif kind == "cut":
        path.write_bytes(data[: chance.randrange(len(data) + 1)])
    elif kind == "remove":
        path.unlink()
    else:
        other = chance.choice(files)
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
        name += f" with {other.relative_to(run).as_posix()}"
    return f"{kind} {name}"
