"""Images, archives, arrays and tables made by somebody who means harm: refused by name, and nothing else happens."""

import io
import json
import os
import resource
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

import millionway
from millionway.cli import main


@pytest.fixture(autouse=True)
def own_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLIONWAY_INDEX", str(tmp_path / "index"))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(4):
        Image.fromarray(rng.integers(0, 255, (20, 20, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return folder


def index(data: Path, out: Path) -> dict[str, str]:
    """What is wrong with which image."""
    return millionway.index(data, out, threads=1).manifest.problems


def refused(capsys: pytest.CaptureFixture, data: Path) -> str:
    """The one line with which the data is refused."""
    assert main(["index", str(data), "--out", str(data.parent / "list.arrow")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(data) in line
    return line


def test_a_picture_starts_no_program(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would give PostScript to Ghostscript, whatever the file is called."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path / 'started'}\n")
    (programs / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (photos / "9.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n")
    problems = index(photos, tmp_path / "list.arrow")
    assert not (tmp_path / "started").exists()
    assert list(problems) == ["9.jpg"] and "not an image in a format that is read" in problems["9.jpg"]


def test_two_files_have_two_keys(photos: Path, tmp_path: Path) -> None:
    picture = (photos / "0.png").read_bytes()
    for name in (b"a\xff.png", rb"a\xff.png", rb"a\\xff.png"):
        with open(os.path.join(os.fsencode(photos), name), "wb") as file:
            file.write(picture)
    manifest = millionway.index(photos, tmp_path / "list.arrow", threads=1).manifest
    assert len(manifest) == 7 and not manifest.problems
    assert len(set(manifest.keys)) == 7


def test_an_image_of_too_many_pixels_costs_no_memory(photos: Path, tmp_path: Path) -> None:
    Image.new("I;16", (13_300, 13_300)).save(photos / "large.png", compress_level=1)
    with open("/proc/self/status") as status:
        before = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    problems = index(photos, tmp_path / "list.arrow")
    assert list(problems) == ["large.png"] and "too many pixels" in problems["large.png"]
    assert "--max-pixels" in problems["large.png"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak - before < 200_000  # KiB; decoded it has 700,000


def test_a_file_of_many_bytes_is_not_read(photos: Path, tmp_path: Path) -> None:
    with open(photos / "large.png", "wb") as file:
        file.truncate(1 << 40)
    problems = index(photos, tmp_path / "list.arrow")
    assert list(problems) == ["large.png"] and "--max-image-bytes" in problems["large.png"]


def test_an_empty_member_of_a_shard_is_empty(tmp_path: Path, photos: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("empty.png"), io.BytesIO())
        for path in sorted(photos.iterdir()):
            archive.add(path, path.name)
    problems = index(tmp_path / "a.tar", tmp_path / "list.arrow")
    assert problems == {"a.tar/empty.png": "empty file"}


def _npz(path: Path, photos: Path) -> bytes:
    pixels = np.stack([np.asarray(Image.open(each)) for each in sorted(photos.iterdir())])
    np.savez_compressed(path, images=pixels, labels=np.arange(len(pixels)))
    return path.read_bytes()


@pytest.mark.parametrize("damage", ["cut", "flip", "flip the header", "empty", "text", "objects"])
def test_a_damaged_npz_is_one_clear_line(tmp_path: Path, photos: Path, damage: str, capsys) -> None:
    path = tmp_path / "images.npz"
    data = bytearray(_npz(path, photos))
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "flip":
        data[len(data) // 2] ^= 4
    elif damage == "flip the header":
        data[60] ^= 4
    elif damage == "empty":
        data = bytearray()
    elif damage == "text":
        data = bytearray(b"PK, but not really")
    path.write_bytes(data)
    if damage == "objects":
        np.savez(path, images=np.array([{}]))
    assert "not a numpy file of images" in refused(capsys, path)


@pytest.mark.parametrize("claim", ["a header of 200 GB", "a member of 4 GB"])
def test_an_npz_may_not_claim_what_it_has_not(tmp_path: Path, photos: Path, claim: str, capsys) -> None:
    path = tmp_path / "images.npz"
    header, shape = io.BytesIO(), (1 << 20, 447, 447) if "header" in claim else (65_535, 256, 256)
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", header.getvalue() + bytes(100))
    if "member" in claim:
        data = bytearray(path.read_bytes())
        place = data.rindex(b"PK\x01\x02")
        data[place + 24 : place + 28] = struct.pack("<I", 0xFFFFFFFE)  # the size of what is unpacked
        path.write_bytes(data)
    assert "not a numpy file of images" in refused(capsys, path)


def _with_bad_offset(path: Path, column: pa.Array, name: str) -> None:
    """An Arrow file in which one text or picture begins far outside of the file."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, pa.schema([(name, column.type)])) as writer:
        writer.write_table(pa.table({name: column}))
    data = bytearray(path.read_bytes())
    offsets = bytes(column.buffers()[1])[: 4 * (len(column) + 1)]
    place = data.index(offsets)
    data[place + 8 : place + 12] = struct.pack("<i", 0x7FFFFFF0)
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["image", "path"])
def test_an_offset_out_of_an_arrow_file_is_found(tmp_path: Path, name: str) -> None:
    """In a process of its own: it used to end by a signal."""
    column = pa.array([b"x" * 50] * 20, pa.binary()) if name == "image" else pa.array(["y" * 50] * 20)
    _with_bad_offset(tmp_path / "table.arrow", column, name)
    command = [sys.executable, "-m", "millionway", "index", str(tmp_path / "table.arrow")]
    done = subprocess.run([*command, "--out", str(tmp_path / "list.arrow")], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "table.arrow: not a readable table" in done.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"width": float("inf")},
        {"height": float("nan")},
        {"width": "wide"},
        {"file_name": 3},
        {"file_name": ["0.png"]},
        {"file_name": "0\0.png"},
        {"id": {}},
    ],
)
def test_a_coco_file_of_anything_is_one_clear_line(photos: Path, change: dict, capsys) -> None:
    """Python's JSON knows Infinity and NaN."""
    image = {"id": 1, "file_name": "0.png", "width": 20, "height": 20}
    box = {"image_id": 1, "category_id": 1, "bbox": [1, 1, 5, 5]}
    content = {"images": [image | change], "annotations": [box], "categories": [{"id": 1, "name": "cell"}]}
    (photos / "boxes.json").write_text(json.dumps(content))
    boxes, encoder = str(photos / "boxes.json"), ["--encoder", "narrow-resnet", "--weights", "random"]
    assert main(["evaluate", "detect", "--data", boxes, "--test-data", boxes, *encoder]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("millionway: ") and "boxes.json: not in COCO's form" in line


def test_names_are_spelled_out_in_log_and_terminal(photos: Path, tmp_path: Path, capsys) -> None:
    (photos / "a\nimport os\x1b[2J.png").write_bytes(b"nothing")
    assert main(["index", str(photos), "--out", str(tmp_path / "list.arrow")]) == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err and "\nimport os" not in said.out
    assert r"a\nimport os\x1b[2J.png" in said.out
    options = ["--epochs", "1", "--batch-size", "2", "--image-size", "16", "--max-unreadable", "0.5", "--threads", "1"]
    assert main(["pretrain", "--data", str(photos), "--out", str(tmp_path / "run"), *options]) == 0
    for text in (capsys.readouterr().err, (tmp_path / "run" / "train.log").read_text()):
        assert r"a\nimport os\x1b[2J.png" in text and "\nimport os" not in text and "\x1b" not in text
