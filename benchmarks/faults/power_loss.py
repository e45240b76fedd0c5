"""The power fails, and what was not synced is lost: does the run go on from every folder that can be left?

All calls of a run that write are recorded. After each of them, names and contents that no fsync has brought to the disk
may be there or not: all lost, only contents lost, only names lost, the oldest or newest lost, a file cut within, any of
them. States that differ only in the log, in curves for TensorBoard or inside half-written files are one.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import preloaded
import scene

MUST = "every state: the same bits, by --resume or by the first command"
NOT_READ = re.compile(r"run/train\.log|run/tensorboard/.*|(.*/)?\..*\.tmp(/.*)?|run/report\.html")


@dataclass(frozen=True)
class Call:
    """keys: what must be synced for it to last, a file or the folders whose names it changes."""

    kind: str
    keys: tuple[int, ...]
    inode: int
    names: tuple[str, ...] = ()
    at: int = 0
    data: bytes = b""


@dataclass
class Disk:
    """Folders of names, and for each file which calls made its content."""

    names: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    written: dict[int, list[int]] = field(default_factory=dict)

    def do(self, number: int, call: Call) -> None:
        if call.kind in "WT":
            self.written.setdefault(call.inode, []).append(number)
        elif call.kind in "CD":
            self.names.setdefault(call.keys[0], {})[call.names[0]] = call.inode
        else:  # U, R
            self.names.setdefault(call.keys[0], {}).pop(call.names[0], None)
            if call.kind == "R":
                self.names.setdefault(call.keys[-1], {})[call.names[1]] = call.inode

    def files(self, folders: set[int], folder: int = 0, path: str = "") -> Iterator[tuple[str, list[int] | None]]:
        """(path, the calls that wrote it; None for a folder)."""
        for name, inode in sorted(self.names.get(folder, {}).items()):
            if inode in folders:
                yield path + name, None
                yield from self.files(folders, inode, f"{path}{name}/")
            else:
                yield path + name, self.written.get(inode, [])


def measure(folder: Path, short: bool) -> dict:
    library = preloaded.library()
    if library is None:
        return preloaded.NOT_RUN
    _, wanted, _ = scene.whole_run(folder)
    place, record = folder / "recorded", folder / "record"
    place.mkdir()

    def begin() -> None:
        library.fault_arm(str(place).encode(), -1, 0, 0)
        assert library.record_to(str(record).encode())
        scene.AT_END.append(library.record_end)

    child = scene.Child(scene.start(place / "run"), folder / "recorded.said", begin)
    assert child.wait() == 0, child.words
    calls = list(_read(record.read_bytes(), place.stat().st_ino))
    _check_complete(calls, place, folder / "replayed")
    states = _states(calls)
    order = random.Random(0).sample(sorted(states), len(states))
    num, num_from_start, wrong = 0, 0, []
    for signature in order[: 6 if short else None]:
        if scene.time_is_up():
            break
        number, dropped = states[signature]
        left = folder / "left"
        _build(_replay(calls, number, dropped), calls, left)
        num, num_from_start = num + 1, num_from_start + (not (left / "run" / "config.json").exists())
        is_lost = number >= _has_begun(calls) and not (left / "run" / "config.json").exists()
        problem = "the run is lost" if is_lost else scene.until_done(left / "run", folder, random.Random(num))
        if not problem and scene.bits(left / "run") != wanted:
            problem = "other bits"
        lost = ", ".join(f"{calls[each].kind} {' '.join(calls[each].names)}" for each in sorted(dropped)[:5])
        wrong += [f"after call {number} of {len(calls)} without {len(dropped)} ({lost}): {problem}"] if problem else []
        scene.remove(left)
    result = f"{num - len(wrong)} of {num} states ({len(states)} are possible after {len(calls)} calls)"
    result += f"; in {num_from_start} the run had not begun"
    numbers = {"calls": len(calls), "possible": len(states), "states": num}
    return {"result": result, "passed": not wrong, **numbers, "wrong": wrong}


def _read(record: bytes, root: int) -> Iterator[Call]:
    """Inode numbers are given again after a file is gone; here each file has its own."""
    known, place = {root: 0}, 0

    def new(inode: int) -> int:
        known[inode] = max(known.values()) + 1
        return known[inode]

    while place < len(record):
        end = record.index(b"\n", place)
        kind, _, rest = record[place:end].decode().partition(" ")
        place = end + 1
        if kind == "W":
            inode, at, size = map(int, rest.split())
            yield Call("W", (known[inode],), known[inode], at=at, data=record[place : place + size])
            place += size + 1
        elif kind in "TS":
            inode, at = (*map(int, rest.split()), 0)[:2]
            if inode in known:
                yield Call(kind, (known[inode],), known[inode], at=at)
        elif kind == "R":
            inode, parent, names = rest.split(" ", 2)
            name, _, other = names.partition("/")
            new_parent, new_name = other.split(" ", 1)
            parents = known[int(parent)], known[int(new_parent)]
            yield Call("R", parents, known[int(inode)], (name, new_name))
        else:
            inode, parent, name = rest.split(" ", 2)
            own = known[int(inode)] if kind == "U" else new(int(inode))
            yield Call(kind, (known[int(parent)],), own, (name,))


def _replay(calls: list[Call], number: int, dropped: frozenset[int] = frozenset()) -> Disk:
    disk = Disk()
    for each in range(number):
        if each not in dropped and calls[each].kind != "S":
            disk.do(each, calls[each])
    return disk


def _folders(calls: list[Call]) -> set[int]:
    return {call.inode for call in calls if call.kind == "D"}


def _has_begun(calls: list[Call]) -> int:
    """The number of calls after which config.json is on the disk: from there on the run must not be lost."""
    renamed = next(each for each, call in enumerate(calls) if call.kind == "R" and call.names[1] == "config.json")
    folder = calls[renamed].keys[1]
    return next(n for n, call in enumerate(calls) if n > renamed and call.kind == "S" and call.inode == folder) + 1


def _build(disk: Disk, calls: list[Call], folder: Path) -> None:
    folder.mkdir()
    for path, written in disk.files(_folders(calls)):
        if written is None:
            (folder / path).mkdir()
            continue
        content = bytearray()
        for call in (calls[each] for each in written):
            size = call.at + len(call.data)
            if call.kind == "T" and len(content) > call.at:
                del content[call.at :]
            content.extend(bytes(max(0, size - len(content))))
            if call.kind == "W":
                content[call.at : size] = call.data
        (folder / path).write_bytes(content)


def _check_complete(calls: list[Call], place: Path, replayed: Path) -> None:
    """All calls together give the folder as it is: no way to write was overlooked."""
    _build(_replay(calls, len(calls)), calls, replayed)
    for one, other in ((place, replayed), (replayed, place)):
        for path in one.rglob("*"):
            twin = other / path.relative_to(one)
            same = twin.is_dir() if path.is_dir() else twin.is_file() and twin.read_bytes() == path.read_bytes()
            assert same, f"the record does not explain {path}"


def _states(calls: list[Call]) -> dict[str, tuple[int, frozenset[int]]]:
    """{what is left: (after so many calls, without these)}."""
    states, folders = {}, _folders(calls)
    for number in range(len(calls) + 1):
        for dropped in _lost(calls, number):
            left = _replay(calls, number, dropped).files(folders)
            signature = repr([(path, "" if NOT_READ.fullmatch(path) else written) for path, written in left])
            states.setdefault(signature, (number, dropped))
    return states


def _lost(calls: list[Call], number: int) -> Iterator[frozenset[int]]:
    """What may be lost if the power fails after so many calls."""
    synced: dict[int, int] = {}
    for each in range(number):
        if calls[each].kind == "S":
            synced[calls[each].inode] = each
    pending = [
        each
        for each in range(number)
        if calls[each].kind != "S" and any(synced.get(key, -1) < each for key in calls[each].keys)
    ]
    contents = [each for each in pending if calls[each].kind in "WT"]
    chance = random.Random(number)
    for lost in (
        [],
        pending,
        contents,
        [each for each in pending if each not in contents],
        pending[:1],
        pending[-1:],
        contents[len(contents) // 2 :],
        [each for each in pending if chance.random() < 0.5],
        [each for each in pending if chance.random() < 0.5],
    ):
        yield frozenset(lost)
