"""A fault at every call that writes to the run folder: a clear end, and then the same bits?

The N-th write, sync, rename, opening for writing, mkdir or read fails, for every N up to the number of such calls. Then
somebody goes on with the run.
"""

import ctypes
import errno
import json
import random
from collections.abc import Callable
from pathlib import Path

import preloaded
import scene

MUST = "every N: a clear end, then the same bits"
KINDS = ("write", "fsync", "rename", "open for writing", "mkdir", "read")
ERRORS = {"write": errno.ENOSPC, "fsync": errno.EIO, "rename": errno.EIO, "open for writing": errno.ENOSPC}
ERRORS |= {"mkdir": errno.ENOSPC, "read": errno.EIO}


def measure(folder: Path, short: bool) -> dict:
    library = preloaded.library()
    if library is None:
        return preloaded.NOT_RUN
    _, wanted, _ = scene.whole_run(folder)
    totals, num, num_without, wrong, chance = _totals(folder, library), 0, 0, [], random.Random(0)
    cases = [(kind, place) for kind, total in totals.items() for place in range(1, total + 1)]
    chance.shuffle(cases)  # so that those done before time is up are of all kinds
    for kind, place in cases[: 8 if short else None]:
        if scene.time_is_up():
            break
        run = folder / "faulty"
        child = scene.Child(scene.start(run), folder / "faulty.said", _arm(library, run, kind, place))
        child.wait()
        num, num_without = num + 1, num_without + (child.code == 0)
        problem = "" if child.code == 0 or scene.is_clear(child) else f"code {child.code}: {child.words[-1500:]}"
        problem = problem or scene.until_done(run, folder, chance)
        if not problem and scene.bits(run) != wanted:
            problem = "other bits"
        wrong += [f"{kind} {place} of {totals[kind]}: {problem}"] if problem else []
        scene.remove(run)
    calls = ", ".join(f"{total} {kind}" for kind, total in totals.items())
    result = f"{num - len(wrong)} of {num} faults (a run makes {calls}); {num_without} did the run no harm"
    return {"result": result, "passed": not wrong, "calls": totals, "faults": num, "wrong": wrong}


def _arm(library: ctypes.CDLL, run: Path, kind: str, place: int) -> Callable[[], object]:
    return lambda: library.fault_arm(str(run).encode(), KINDS.index(kind), ctypes.c_long(place), ERRORS[kind])


def _totals(folder: Path, library: ctypes.CDLL) -> dict[str, int]:
    """How many calls of each kind a run makes, told by the process itself at its end."""
    run, told = folder / "counted", folder / "counted.json"

    def arm() -> None:
        library.fault_arm(str(run).encode(), -1, ctypes.c_long(0), 0)
        scene.AT_END.append(lambda: told.write_text(json.dumps([library.fault_count(n) for n in range(len(KINDS))])))

    child = scene.Child(scene.start(run), folder / "counted.said", arm)
    assert child.wait() == 0, child.words
    return dict(zip(KINDS, json.loads(told.read_text())))
