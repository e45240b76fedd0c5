"""A run folder damaged in one place, and then each verb: fine, or one clear line?

A bit is flipped, a file is cut, removed, or swapped with another, in every file of the folder. Silent is: a verb that
says nothing about it and gives other results than on the whole folder.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import scene

MUST = "0 tracebacks, 0 silent"
NUM = 1000
# Nobody reads these: a log for people, the page itself, and curves for TensorBoard.
NOT_READ = ("train.log", "report.html", "tensorboard/")


def measure(folder: Path, short: bool) -> dict:
    whole, _, _ = scene.whole_run(folder)
    verbs = _verbs(folder)
    expected = {name: _result(name, shutil.copytree(whole, folder / "expected"), folder, verbs, True) for name in verbs}
    chance, num = random.Random(0), 24 if short else NUM
    counts, wrong = {"fine": 0, "one line": 0}, []
    for number in range(num):
        run = folder / "damaged"
        scene.remove(run)
        shutil.copytree(whole, run)
        what = _damage(run, chance)
        name = list(verbs)[number % len(verbs)]
        told, result = _result(name, run, folder, verbs)
        if told == "traceback" or told.startswith("signal"):
            wrong.append(f"{what}, {name}: {result}")
        elif told == "fine" and result != expected[name][1] and not what.endswith(NOT_READ_NOTE):
            wrong.append(f"{what}, {name}: silent, {result} instead of {expected[name][1]}")
        else:
            counts["fine" if told == "fine" else "one line"] += 1
    words = ", ".join(f"{count} {name}" for name, count in counts.items())
    return {"result": f"{num} damages: {words}, {len(wrong)} wrong", "passed": not wrong, **counts, "wrong": wrong}


NOT_READ_NOTE = "(not read)"


def _verbs(folder: Path) -> dict[str, Callable[[Path], list[str]]]:
    return {
        "resume": scene.resume,
        "knn": lambda run: ["evaluate", "knn", "--run", str(run), "--out", str(folder / "scores")],
        "export": lambda run: ["export", "--run", str(run), "--out", str(folder / "weights.safetensors")],
        "report": lambda run: ["report", "--run", str(run)],
    }


def _result(name: str, run: Path, folder: Path, verbs: dict, clean: bool = False) -> tuple[str, str]:
    """(fine, told, traceback or signal; what came out of it)."""
    for left in ("scores", "weights.safetensors"):
        scene.remove(folder / left)
        (folder / left).unlink(missing_ok=True)
    child = scene.Child(verbs[name](run), folder / "verb.said")
    child.wait()
    if child.code is None or child.code < 0:
        return f"signal {child.code}", child.words[-800:]
    if "Traceback" in child.words or child.code not in (0, *scene.CLEAR):
        return "traceback", child.words[-800:]
    if child.code:
        return ("told" if scene.is_clear(child) else "traceback"), child.words[-800:]
    if not clean and any(word in child.words for word in ("damaged", "seal", "no complete checkpoint")):
        return "told", ""
    out = {"resume": lambda: scene.bits(run), "report": lambda: _page(run)}
    out |= {"knn": lambda: str(json.loads((folder / "scores" / "knn.json").read_text())["numbers"])}
    out |= {"export": lambda: _tensors(folder / "weights.safetensors")}
    result = out[name]()
    if clean:
        scene.remove(run)
    return "fine", result


def _tensors(path: Path) -> str:
    from safetensors.torch import load_file

    return str({name: tensor.double().sum().item() for name, tensor in load_file(path).items()})


def _page(run: Path) -> str:
    text = (run / "report.html").read_text().replace(run.name, "RUN")
    return str(hash(text))


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
    return f"{kind} {name} {NOT_READ_NOTE if name.startswith(NOT_READ) else ''}".strip()
