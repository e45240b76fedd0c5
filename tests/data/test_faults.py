"""Disks, networks and processes that fail."""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import millionway
from millionway.data import source as source_module
from millionway.data.images import UnreadableImage
from millionway.data.indexing import build_manifest
from millionway.data.kinds.choose import open_source
from millionway.train.stops import RunStopped

NO_SUCH_PAGE = "/proc/self/mem"  # a regular file whose first byte is an input/output error


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for index in range(8):
        Image.fromarray(rng.integers(0, 255, (20, 20, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    return folder


def test_what_may_not_be_read_is_named(photos: Path) -> None:
    """In a child process without root's rights."""
    closed = photos / "closed"
    closed.mkdir()
    (photos / "7.png").rename(closed / "7.png")
    assert len(build_manifest(open_source(str(photos)), 1).keys) == 8
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are for their owner alone
        open_to_all = Path(shutil.copytree(photos, Path(place) / "photos"))
        for path, rights in ((place, 0o755), (open_to_all / "2.png", 0), (open_to_all / "closed", 0)):
            os.chmod(path, rights)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            with os.fdopen(writing, "w") as told, contextlib.suppress(BaseException):
                if os.geteuid() == 0:
                    os.setuid(65534)
                logging.getLogger("millionway").addHandler(logging.StreamHandler(told))
                manifest = build_manifest(open_source(str(open_to_all)), 1)
                print(len(manifest.keys), manifest.problems, file=told)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as told:
            said = told.read()
        assert os.waitpid(child, 0)[1] == 0
        os.chmod(open_to_all / "closed", 0o755)
    assert f"passed over: {open_to_all / 'closed'}: Permission denied" in said
    assert "7 {'2.png': 'Permission denied'}" in said


@pytest.mark.skipif(not os.path.exists(NO_SUCH_PAGE), reason="needs Linux")
def test_a_disk_that_fails_once_is_asked_again(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (photos / "3.png").read_bytes()
    (photos / "3.png").unlink()
    (photos / "3.png").symlink_to(NO_SUCH_PAGE)
    source, waits = open_source(str(photos)), []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:  # the disk is well again
            (photos / "3.png").unlink()
            (photos / "3.png").write_bytes(whole)

    monkeypatch.setattr(source_module.time, "sleep", wait)
    assert source.read(3) == whole and waits == [1.0, 2.0]
    (photos / "3.png").unlink()
    (photos / "3.png").symlink_to(NO_SUCH_PAGE)
    waits[:] = [0.0, 0.0]  # now it stays ill
    with pytest.raises(UnreadableImage, match="Input/output error"):
        source.read(3)
    waits[:] = []
    with pytest.raises(UnreadableImage, match="No such file"):  # a file that is gone is not waited for
        (photos / "4.png").unlink()
        source.read(4)
    assert waits == []
    waits[:] = [0.0, 0.0]
    assert build_manifest(source, 1).problems["3.png"] == "Input/output error"


def test_a_killed_parent_leaves_no_worker_behind(photos: Path) -> None:
    code = (
        "import os, sys, time\n"
        "from millionway.data.readers import in_order\n"
        "def work(item):\n"
        "    os.write(1, f'{os.getpid()}\\n'.encode())\n"
        "    time.sleep(600)\n"
        "list(in_order(work, range(2), 2, 2, processes=True))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(parent.stdout.readline()) for _ in range(2)]
    with parent:
        parent.send_signal(signal.SIGKILL)
    while any(_is_running(worker) for worker in workers):  # each looks once a second
        time.sleep(0.05)


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_worker_is_told(photos: Path) -> None:
    code = (
        "import os, signal\n"
        "from millionway.data.readers import in_order\n"
        "list(in_order(lambda item: os.kill(os.getpid(), signal.SIGKILL), range(2), 2, 2, processes=True))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "was killed; is there enough memory?" in done.stderr.splitlines()[-1]


def test_missing_images_stop_a_run_with_their_list(photos: Path, tmp_path: Path) -> None:
    millionway.index(photos, tmp_path / "manifest.arrow")
    for number in range(3):
        (photos / f"{number}.png").unlink()
    with pytest.raises(ValueError, match=r"3 went \(0.png, 1.png, 2.png\)"):
        millionway.pretrain(photos, tmp_path / "run", manifest=tmp_path / "manifest.arrow", batch_size=4)


def test_many_failing_images_stop_a_run_that_can_go_on(photos: Path, tmp_path: Path) -> None:
    """They vanish in mid-training; all is saved, and when they are back the run goes on."""
    big = np.random.default_rng(1).integers(0, 255, (150, 140, 3), dtype=np.uint8)  # too large to live in memory
    for number in range(40):
        Image.fromarray(big + np.uint8(number)).save(photos / f"big-{number:02d}.png")
    out, hidden = tmp_path / "run", tmp_path / "hidden"
    settings = {"epochs": 6, "batch_size": 16, "image_size": 16, "threads": 1, "hardest": 2, "labels": "none"}
    hidden.mkdir()
    names = [f"big-{number:02d}.png" for number in range(5)]

    def hide(folder: Path, other: Path) -> None:
        for name in names:
            (folder / name).rename(other / name)

    from millionway.train.loop import Loop

    step = Loop._step

    def step_and_hide(self, *args):
        if self.state.step == 7:
            hide(photos, hidden)
        return step(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_step", step_and_hide)
        with pytest.raises(RunStopped, match=r"images failed since the start: .*No such file.*--resume"):
            millionway.pretrain(photos, out, **settings)
    last = sorted(path.name for path in (out / "checkpoints").glob("step_*"))[-1]
    assert int(last[5:]) > 7
    with pytest.raises(ValueError, match=r"5 went"):
        millionway.pretrain(out=out, resume=True)
    hide(hidden, photos)
    millionway.pretrain(out=out, resume=True)
