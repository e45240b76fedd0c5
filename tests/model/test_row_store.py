"""Rows in a file, and in host memory: the same numbers, and what happens when the disk fails."""

import errno
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from classifiers import blocks_of, run_steps
from safetensors.torch import load_file

from millionway.files import BadFile
from millionway.model import row_store
from millionway.model.classifier import InstanceClassifier
from millionway.model.row_store import FileStore, HostStore


def small_chunks():
    return mock.patch.object(row_store, "CHUNK_BYTES", 5000)


def in_file(path: Path, num: int = 700, dim: int = 16, **options) -> InstanceClassifier:
    return InstanceClassifier(num, dim, rows_in=path, **options)


def in_streamed_memory(num: int, dim: int, **options) -> InstanceClassifier:
    """As in host memory beside a GPU, but computed on the CPU."""
    classifier = InstanceClassifier(num, dim, **options)
    store = HostStore(num, dim, classifier.weight.dtype, pinned=False)
    store.weight.copy_(classifier.weight)
    classifier.store, classifier.weight, classifier.momentum = store, store.weight, store.velocity
    return classifier


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.02}, {"classes_per_step": 50}, {"keep_bytes": 30000}])
def test_the_same_bits_wherever_rows_live(tmp_path: Path, storage: torch.dtype, options: dict) -> None:
    options = {"storage": storage, "keep_bytes": 0, **options}
    results = []
    with small_chunks(), blocks_of(64):
        for make in (InstanceClassifier, in_streamed_memory, lambda *args, **o: in_file(tmp_path / "rows", *args, **o)):
            classifier = make(700, 16, **options)
            classifier.alive[[3, 650]] = False
            table = classifier.hardest(5) if "classes_per_step" not in options else None
            g = torch.Generator().manual_seed(1)
            classifier.set_rows(torch.arange(0, 700, 9), torch.randn(78, 16, generator=g))
            losses = []
            for step in range(4):
                ids = torch.tensor([5 + step, 699, 5 + step, 300])
                x = torch.randn(4, 16, generator=g).to(classifier.compute_dtype).requires_grad_()
                loss = classifier(x, ids, table, 0.2 if table is not None else 0.0)
                loss.backward()
                classifier.update(0.5)
                losses += [loss.detach(), x.grad]
            compared = classifier.compare(x.detach(), ids)
            results.append([*losses, classifier.weight, classifier.momentum, compared.num_ahead, compared.own])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_next_blocks_are_on_their_way_while_the_present_one_is_worked_on(tmp_path: Path) -> None:
    events, third_read, second_written = [], threading.Event(), threading.Event()
    read, write = FileStore.read, FileStore.write

    def note_read(store, first, out, velocity=False):
        read(store, first, out, velocity)
        if first == 128:
            third_read.set()

    def note_write(store, first, rows, velocity=False):
        write(store, first, rows, velocity)
        if first == 64:
            second_written.set()

    with (
        blocks_of(64),
        mock.patch.multiple(row_store, CHUNK_BYTES=1),
        mock.patch.multiple(FileStore, read=note_read, write=note_write),
    ):
        classifier = in_file(tmp_path / "rows")
        rows = classifier._rows(8)
        second_written.clear()
        for block in rows.stream(rows.blocks(), writing=True):
            if block.number == 1:
                assert third_read.wait(60)  # a limit far beyond, so that a failure does not hang
                events.append("read ahead")
            if block.number == 3:
                assert second_written.wait(60)
                events.append("written behind")
    assert events == ["read ahead", "written behind"]


def test_the_file_is_an_ordinary_one(tmp_path: Path) -> None:
    classifier = in_file(tmp_path / "rows", storage=torch.bfloat16)
    run_steps(classifier, 2)
    loaded = load_file(tmp_path / "rows")
    assert torch.equal(loaded["rows"], classifier.weight) and torch.equal(loaded["momentum"], classifier.momentum)
    assert isinstance(classifier.store, FileStore) and classifier.store.num_bytes["written"] > 0


def test_a_file_is_used_again_from_the_start(tmp_path: Path) -> None:
    first = in_file(tmp_path / "rows")
    losses = run_steps(first, 3)
    del first
    assert run_steps(in_file(tmp_path / "rows"), 3) == losses


@pytest.mark.parametrize(
    "other", [{"num": 701}, {"dim": 17}, {"storage": torch.bfloat16}, {"num": 1400, "storage": torch.bfloat16}]
)
def test_a_file_of_other_rows_is_refused(tmp_path: Path, other: dict) -> None:
    in_file(tmp_path / "rows")
    before = (tmp_path / "rows").read_bytes()
    with pytest.raises(BadFile, match=r"rows: it is not a file for these rows: expected .* bytes"):
        in_file(tmp_path / "rows", **other)
    assert (tmp_path / "rows").read_bytes() == before


def test_a_strangers_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear Anna")
    (tmp_path / "link").symlink_to(tmp_path / "letter.txt")
    for name in ("letter.txt", "link", "."):
        with pytest.raises(BadFile):
            in_file(tmp_path / name)
    with pytest.raises(BadFile, match="No such file"):
        in_file(tmp_path / "nowhere" / "rows")
    assert (tmp_path / "letter.txt").read_text() == "Dear Anna"


def test_too_small_a_disk_is_said_before_anything_is_written(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    num = free.f_bavail * free.f_frsize // 1024 + 1000
    with pytest.raises(BadFile, match=r"[\d,]+ bytes are needed there, and [\d,]+ are free"):
        FileStore(tmp_path / "rows", num, 128, torch.float32, (0, num))
    assert not (tmp_path / "rows").exists()


def test_a_file_system_without_mapping_is_named(tmp_path: Path) -> None:
    refused = OSError(errno.ENODEV, os.strerror(errno.ENODEV))
    with mock.patch.object(mmap, "mmap", side_effect=refused), pytest.raises(BadFile, match="cannot be mapped"):
        in_file(tmp_path / "rows")


def test_another_process_keeps_its_rows(tmp_path: Path) -> None:
    program = (
        "import sys, torch; from pathlib import Path; from millionway.model.row_store import FileStore\n"
        "store = FileStore(Path(sys.argv[1]), 700, 16, torch.float32, (0, 700)); print('open', flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "rows")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "open\n"
        with pytest.raises(BadFile, match="another process has its rows there"):
            in_file(tmp_path / "rows")
        other.communicate()
    in_file(tmp_path / "rows")


def failing(call: str, code: int, after: int):
    """The n-th call of os.preadv or os.pwritev from now on, and all later ones, fail."""
    real, num_calls = getattr(os, call), 0

    def fail(*args):
        nonlocal num_calls
        num_calls += 1
        if num_calls > after:
            raise OSError(code, os.strerror(code))
        return real(*args)

    return mock.patch.object(os, call, fail)


def test_a_read_error_names_the_file_and_nothing_is_lost(tmp_path: Path) -> None:
    classifier = in_file(tmp_path / "rows")
    run_steps(classifier, 1)
    before = classifier.weight.clone()
    x, ids = torch.randn(4, 16, requires_grad=True), torch.arange(4)
    with small_chunks(), blocks_of(64):
        with failing("preadv", errno.EIO, after=3), pytest.raises(OSError, match=r"Input/output error.*rows") as caught:
            classifier(x, ids)
        assert caught.value.errno == errno.EIO
        assert torch.equal(before, classifier.weight)
        loss = classifier(x, ids)  # it was a passing fault
        with failing("preadv", errno.EIO, after=3), pytest.raises(OSError, match="Input/output error"):
            classifier.update(0.1)
        with pytest.raises(RuntimeError, match="half-way"):
            classifier(x, ids)
    assert torch.isfinite(loss)


def test_a_full_disk_while_streaming_is_named(tmp_path: Path) -> None:
    classifier = in_file(tmp_path / "rows")
    with small_chunks(), blocks_of(64):
        classifier(torch.randn(4, 16, requires_grad=True), torch.arange(4))
        with failing("pwritev", errno.ENOSPC, after=2), pytest.raises(OSError, match=r"No space left.*rows"):
            classifier.update(0.1)


def test_a_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    classifier = in_file(tmp_path / "rows", num=70000)
    os.truncate(tmp_path / "rows", 100_000)
    with pytest.raises(BadFile, match="cut short"):
        classifier(torch.randn(4, 16), torch.arange(4))
