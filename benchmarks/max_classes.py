"""How many instances fit into a given memory, and how long does a step take where it is tight?

    python benchmarks/max_classes.py search --limit-gib 1.5     # the largest N within a limit, ours and plain PyTorch
    python benchmarks/max_classes.py step --instances 14200000 --smoothed
    python benchmarks/max_classes.py step --instances 30000000 --storage bfloat16
    python benchmarks/max_classes.py step --instances 100000000 --storage bfloat16 --rows-in FILE
    python benchmarks/max_classes.py file --instances 1281167 --rows-in FILE     # against the same in memory
    python benchmarks/max_classes.py disk --instances 4000000 --rows-in FILE     # against the disk itself
    python benchmarks/max_classes.py table

Every trial is a process of its own that takes real steps: loss, embedding gradient, update of the rows, at a batch of
512 and 128 dimensions. In a search it runs under the operating system's limit on data (RLIMIT_DATA), so what does not
fit fails. Exponentials are computed again, not kept.
"""

import argparse
import ctypes
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from classifier import BATCH, DIM, RESULTS, Autograd, K, batch_of, memory_status, table_of  # beside this file
from presets import write_between_marks
from timing import alternate

from millionway.machine import describe_environment
from millionway.model.classifier import InstanceClassifier
from millionway.model.row_store import FileStore

GIB = 1 << 30
CACHESTAT = 451  # a system call of Linux 6.5
SIDES = {
    "ours, bfloat16": ["--storage", "bfloat16"],
    "ours, float32": [],
    "ours, float32, smoothed": ["--smoothed"],
    "plain PyTorch": ["--plain"],
}


def steps(num: int, storage: torch.dtype, smoothed: bool, is_plain: bool, num_steps: int, rows_in: str) -> dict:
    """Seconds of each step and the peak of resident memory, from the start of the process; what a file took."""
    store = None
    if is_plain:
        step = Autograd(num).plain
    else:
        classifier = InstanceClassifier(num, DIM, storage=storage, keep_bytes=0, rows_in=rows_in)
        store = classifier.store
        table = table_of(num) if smoothed else None
        x, ids = batch_of(num)

        def step() -> None:
            leaf = x.clone().requires_grad_()
            classifier(leaf, ids, table, 0.2 if smoothed else 0.0).backward()
            classifier.update(0.01)

    seconds, cpu_seconds, streamed = [], [], []
    for _ in range(num_steps):
        if isinstance(store, FileStore):
            store.num_bytes, store.seconds_waited = {"read": 0, "written": 0}, 0.0
        started, cpu = time.perf_counter(), time.process_time()
        step()
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu)
        if isinstance(store, FileStore):
            waited = store.seconds_waited / torch.get_num_threads() / seconds[-1]
            used = {"cpu_seconds": cpu_seconds[-1], "waited": waited}
            streamed.append({**{f"{name}_bytes": value for name, value in store.num_bytes.items()}, **used})
            print(f"a step: {seconds[-1]:.0f} s, {streamed[-1]}", file=sys.stderr, flush=True)
    result = {"num_instances": num, "seconds": seconds, "cpu_seconds": cpu_seconds}
    result["peak_rss_bytes"] = memory_status("VmHWM")
    return result if store is None else {**result, "streamed": streamed}


def in_file_and_memory(num: int, storage: torch.dtype, path: str, turns: int) -> dict:
    """Steps on rows in a file, whose pages the system may keep in memory, and on rows in memory, in turns."""
    x, ids = batch_of(num)
    classifiers = {
        "memory": InstanceClassifier(num, DIM, storage=storage, keep_bytes=0),
        "file": InstanceClassifier(num, DIM, storage=storage, keep_bytes=0, rows_in=path),
    }

    def step(classifier: InstanceClassifier) -> None:
        leaf = x.clone().requires_grad_()
        classifier(leaf, ids).backward()
        classifier.update(0.01)

    cpu: dict[str, list[float]] = {name: [] for name in classifiers}

    def counted(name: str) -> None:
        started = time.process_time()
        step(classifiers[name])
        cpu[name].append(time.process_time() - started)

    seconds = alternate({name: functools.partial(counted, name) for name in classifiers}, turns)
    assert torch.equal(classifiers["memory"].weight, classifiers["file"].weight)
    ratios = {
        f"file / memory, {what}": statistics.median(values["file"]) / statistics.median(values["memory"])
        for what, values in (("seconds", seconds), ("CPU seconds", {name: part[1:] for name, part in cpu.items()}))
    }
    return {"num_instances": num, "seconds": seconds, "cpu_seconds": cpu, **ratios}


def from_disk(num: int, storage: torch.dtype, path: str, turns: int) -> dict:
    """Steps on rows in a file whose pages are put out of memory all the time, and dd on the same disk, in turns.

    A batch of 64: the disk is to be the limit, not the products.
    """
    classifier = InstanceClassifier(num, DIM, storage=storage, keep_bytes=0, rows_in=path)
    x, ids = (each[:64] for each in batch_of(num))
    store, ended, cached = classifier.store, threading.Event(), []
    assert isinstance(store, FileStore)

    def put_out() -> None:
        while not ended.wait(0.02):
            os.posix_fadvise(store.file, 0, 0, os.POSIX_FADV_DONTNEED)
            cached.append(cached_bytes(store.file))

    def step() -> None:
        store.num_bytes, store.seconds_waited = {"read": 0, "written": 0}, 0.0
        classifier(x.clone().requires_grad_(), ids).backward()
        classifier.update(0.01)
        os.fdatasync(store.file)

    def disk() -> None:
        for way, num_bytes in (("read", store.num_bytes["read"]), ("written", store.num_bytes["written"])):
            rates[way].append(dd(path + ".dd", way, num_bytes))

    rates: dict[str, list[float]] = {"read": [], "written": []}
    step()
    dd(path + ".dd", "written", max(store.num_bytes.values()))
    thread = threading.Thread(target=put_out)
    thread.start()
    try:
        seconds = alternate({"step": step, "dd": disk}, turns)
    finally:
        ended.set()
        thread.join()
        Path(path + ".dd").unlink(missing_ok=True)
    read, written = (store.num_bytes[way] / statistics.median(rates[way]) for way in ("read", "written"))
    return {
        "num_instances": num,
        "seconds": seconds["step"],
        "bytes": store.num_bytes,
        "dd_bytes_per_second": rates,
        "largest share of the file in memory": max(cached) / Path(path).stat().st_size,
        "speed of the disk that is used": (read + written) / statistics.median(seconds["step"]),
    }


def dd(path: str, way: str, num_bytes: int) -> float:
    """Bytes per second of the disk alone, one after the other, past the pages in memory."""
    ends = {"read": [f"if={path}", "of=/dev/null", "iflag=direct"]}.get(
        way, ["if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc"]
    )
    num = max(1, num_bytes >> 22)
    started = time.perf_counter()
    subprocess.run(["dd", *ends, "bs=4M", f"count={num}"], check=True, capture_output=True)
    return (num << 22) / (time.perf_counter() - started)


def cached_bytes(file: int) -> int:
    """Of a file, in memory: Linux's cachestat."""
    everything, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(CACHESTAT, file, ctypes.byref(everything), ctypes.byref(found), 0):
        raise OSError(ctypes.get_errno(), "cachestat")
    return found[0] * resource.getpagesize()


def run_within(limit: int | None, command: list[str]) -> str | None:
    """What the command prints, or None if it did not fit into the limit on data."""

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    run = subprocess.run(command, preexec_fn=limited, capture_output=True, text=True)
    if run.returncode == 0:
        return run.stdout
    # It must have been the limit that ended it, and not a mistake. A library's own thread without memory just crashes.
    words = ("memory", "thread creation failed", "bad_alloc", "sigsegv")
    assert limit is not None and any(word in run.stderr.lower() for word in words), run.stderr[-3000:]
    return None


def largest(result_of: Callable[[int], dict | None], first: int) -> tuple[int, dict]:
    """The largest number that fits, and its result: by doubling and halving, to 5 %."""
    low, high, num = 0, 0, first
    best: dict = {}
    while not high or high - low > 0.05 * high:
        result = result_of(num)
        print(f"  {num:>12,} {'does not fit' if result is None else 'fits'}", file=sys.stderr, flush=True)
        if result is None:
            high = num
        else:
            low, best = num, result
        num = (low + high) // 2 if high else 2 * num
    return low, best


def trial(num: int, limit: int, flags: list[str]) -> dict | None:
    command = [sys.executable, __file__, "trial", "--instances", str(num), "--steps", "1", *flags]
    printed = run_within(limit, command)
    return None if printed is None else json.loads(printed)


def table() -> str:
    lines = []
    searches = sorted(RESULTS.glob("max_classes_within_*.json"))
    for path in searches:
        result = json.loads(path.read_text())
        base = result["sides"]["plain PyTorch"]["num_instances"]
        lines += [f"Largest N within {result['limit_gib']:g} GiB of data (whole process):", ""]
        lines += ["| | N | times plain PyTorch | seconds a step |", "|---|---|---|---|"]
        for name, side in result["sides"].items():
            num = side["num_instances"]
            lines.append(f"| {name} | {num:,} | {num / base:.1f} | {side['seconds'][-1]:.1f} |")
        lines.append("")
    lines += ["Single steps:", "", "| N | rows | peak RSS, GiB | seconds a step |", "|---|---|---|---|"]
    for path in sorted(RESULTS.glob("max_classes_step_*.json")):
        result = json.loads(path.read_text())
        rows = result["storage"] + (f", smoothed, K = {K}" if result["smoothed"] else "")
        if "streamed" in result:
            last = result["streamed"][-1]
            sizes = " and ".join(f"{last[f'{way}_bytes'] / 1e9:.1f} GB {way}" for way in ("read", "written"))
            rows += f", in a file: {sizes} a step, {last['cpu_seconds']:.0f} s of processor time, "
            rows += f"{last['waited']:.1%} of the time waiting for it"
        seconds = ", ".join(f"{value:.0f}" for value in result["seconds"])
        lines.append(f"| {result['num_instances']:,} | {rows} | {result['peak_rss_bytes'] / GIB:.1f} | {seconds} |")
    lines += ["", per_row()]
    for path in sorted(RESULTS.glob("max_classes_file_*.json")):
        result = json.loads(path.read_text())
        what = f"a step on {result['num_instances']:,} rows in a file whose pages are in memory takes"
        ratios = [f"{value:.2f} ({name.split(', ')[1]})" for name, value in result.items() if " / " in name]
        lines += ["", f"With {result['storage']}, {what} {' and '.join(ratios)} times that on rows in memory."]
    for path in sorted(RESULTS.glob("max_classes_disk_*.json")):
        result = json.loads(path.read_text())
        share, used = result["largest share of the file in memory"], result["speed of the disk that is used"]
        what = (
            f"{result['num_instances']:,} rows in {result['storage']} and at most {share:.0%} of their file in memory"
        )
        lines += [
            "",
            f"With {what}, a step of 64 views reads and writes at {used:.2f} of the speed of `dd` on the same disk.",
        ]
    return "\n".join(lines)


def per_row() -> str:
    """The same bytes in memory as twice as many rows."""
    few, many = (
        json.loads((RESULTS / f"max_classes_step_{name}.json").read_text())
        for name in ("14200000_float32", "30000000_bfloat16")
    )
    times = many["num_instances"] / few["num_instances"]
    ratios = [
        f"{statistics.median(many[what]) / statistics.median(few[what]) / times:.2f}"
        for what in ("seconds", "cpu_seconds")
    ]
    return (
        f"A row of {many['num_instances']:,} in {many['storage']} takes {' (seconds) and '.join(ratios)} (CPU seconds) "
        f"times as long as one of {few['num_instances']:,} in {few['storage']} (with smoothed labels); commits "
        f"{few['environment']['commit']} and {many['environment']['commit']}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("search", "step", "file", "disk", "trial", "table"))
    parser.add_argument("--limit-gib", type=float, default=1.5)
    parser.add_argument("--instances", type=int, default=1 << 17)
    parser.add_argument("--storage", default="float32")
    parser.add_argument("--smoothed", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rows-in", default="device", help="a file is removed at the end")
    chosen = parser.parse_args()
    about = {"batch": BATCH, "dim": DIM, "environment": json.loads(describe_environment(torch.device("cpu")))}
    storage, in_file = getattr(torch, chosen.storage), chosen.rows_in not in ("device", "host")
    if chosen.part in ("file", "disk"):
        measure = {"file": in_file_and_memory, "disk": from_disk}[chosen.part]
        try:
            result = measure(chosen.instances, storage, chosen.rows_in, chosen.steps)
        finally:
            Path(chosen.rows_in).unlink(missing_ok=True)
        path = RESULTS / f"max_classes_{chosen.part}_{chosen.instances}_{chosen.storage}.json"
        path.write_text(json.dumps(about | {"storage": chosen.storage} | result, indent=2) + "\n")
    elif chosen.part in ("step", "trial"):
        try:
            result = steps(chosen.instances, storage, chosen.smoothed, chosen.plain, chosen.steps, chosen.rows_in)
        finally:
            if in_file:
                Path(chosen.rows_in).unlink(missing_ok=True)
        if chosen.part == "trial":
            print(json.dumps(result))
            return
        about |= {"storage": chosen.storage, "smoothed": chosen.smoothed} | result
        name = f"max_classes_step_{chosen.instances}_{chosen.storage}{'_in_file' if in_file else ''}.json"
        (RESULTS / name).write_text(json.dumps(about, indent=2) + "\n")
    elif chosen.part == "search":
        sides = {}
        for name, flags in SIDES.items():
            print(name, file=sys.stderr)
            limit = int(chosen.limit_gib * GIB)
            _, sides[name] = largest(functools.partial(trial, limit=limit, flags=flags), 1 << 16)
        about |= {"limit_gib": chosen.limit_gib, "sides": sides}
        path = RESULTS / f"max_classes_within_{chosen.limit_gib:g}_gib.json"
        path.write_text(json.dumps(about, indent=2) + "\n")
    write_between_marks(Path(__file__).parent.parent / "docs" / "experiments.md", "max classes", table())
    print(table())


if __name__ == "__main__":
    main()
