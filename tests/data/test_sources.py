import gzip
import os
import shutil
import struct

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from millionway.data import images
from millionway.data.dataset import open_dataset
from millionway.data.kinds import folders, named_sets
from millionway.data.kinds.choose import has_test_split, open_source
from millionway.data.kinds.folders import FileSource
from millionway.data.source import Keys


def picture(path, value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 5), (value, 10, 20)).save(path)


def test_folder_is_searched_at_any_depth(tmp_path) -> None:
    for name in ("b.png", "a/z.JPG", "a/deep/er/x.jpeg", "ü ñ/with space.png", "new\nline.png"):
        picture(tmp_path / name)
    picture(tmp_path / ".hidden.png")
    (tmp_path / "notes.txt").write_text("no image")
    source = open_source(str(tmp_path))
    assert list(source.keys) == sorted(["b.png", "a/z.JPG", "a/deep/er/x.jpeg", "ü ñ/with space.png", "new\nline.png"])
    places = np.arange(len(source))
    assert [len(source.read(index)) for index in places] == source.statuses(places)[:, 0].tolist()


def test_many_files_are_asked_by_many_threads_in_order(tmp_path, monkeypatch) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.png").write_bytes(b"x" * number)
    source = open_source(str(tmp_path))
    (tmp_path / "07.png").unlink()
    monkeypatch.setattr(folders, "ASKED_AT_ONCE", 3)
    places = np.arange(39, -1, -1)
    found = source.statuses(places)
    assert found[:, 0].tolist() == [-1 if place == 7 else place for place in places]
    assert found[0, 1] == (tmp_path / "39.png").stat().st_mtime_ns
    assert source.statuses(places[:0]).shape == (0, 2)


def test_names_that_are_not_unicode(tmp_path) -> None:
    picture(tmp_path / "plain.png")
    os.rename(tmp_path / "plain.png", os.path.join(os.fsencode(tmp_path), b"caf\xe9.png"))
    source = open_source(str(tmp_path))
    assert list(source.keys) == ["caf\\xe9.png"]
    assert source.read(0)[:4] == b"\x89PNG"


def test_link_loops_end(tmp_path) -> None:
    picture(tmp_path / "a" / "x.png")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    assert len(open_source(str(tmp_path))) == 1


def test_labels_are_the_first_folders(tmp_path) -> None:
    for name in ("cat/1.png", "cat/more/2.png", "dog/3.png", "4.png"):
        picture(tmp_path / name)
    source = open_source(str(tmp_path))
    assert source.labels is not None and source.labels.names == ["cat", "dog"]
    named = dict(zip(source.keys, source.labels.ids.tolist()))
    assert named == {"4.png": -1, "cat/1.png": 0, "cat/more/2.png": 0, "dog/3.png": 1}


def test_train_and_test_folders_are_a_split(tmp_path) -> None:
    for name in ("train/cat/1.png", "train/dog/2.png", "val/cat/3.png", "val/dog/4.png"):
        picture(tmp_path / name)
    labels = open_source(str(tmp_path)).labels
    assert labels is not None and labels.names == ["cat", "dog"] and labels.is_test is not None
    assert labels.is_test.tolist() == [False, False, True, True]


def test_one_folder_is_no_label(tmp_path) -> None:
    picture(tmp_path / "all" / "1.png")
    picture(tmp_path / "all" / "2.png")
    assert open_source(str(tmp_path)).labels is None


def test_lists(tmp_path) -> None:
    for name in ("x.png", "sub/y.png"):
        picture(tmp_path / name)
    (tmp_path / "list.txt").write_text("sub/y.png\nx.png\n\n")
    source = open_source(str(tmp_path / "list.txt"))
    assert list(source.keys) == ["sub/y.png", "x.png"] and source.read(1)[:4] == b"\x89PNG"
    (tmp_path / "list.csv").write_text("\ufefflabel,path\ncat,x.png\ndog,sub/y.png\n")
    source = open_source(str(tmp_path / "list.csv"))
    assert source.labels is not None and source.labels.ids.tolist() == [0, 1]
    assert isinstance(source, FileSource)


def test_bad_data_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        open_source(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="Did you mean 'cifar10'"):
        open_source("cifar-10")
    with pytest.raises(ValueError, match="empty"):
        open_source(str(tmp_path))
    (tmp_path / "a.txt").write_text("x.png\nx.png\n")
    with pytest.raises(ValueError, match="listed twice"):
        open_source(str(tmp_path / "a.txt"))
    with pytest.raises(ValueError, match="1 files ignored"):
        open_source(str(tmp_path))
    (tmp_path / "a.csv").write_text("file\nx.png\n")
    with pytest.raises(ValueError, match="column `path`"):
        open_source(str(tmp_path / "a.csv"))
    (tmp_path / "short.csv").write_text("label,path\ncat\n")
    with pytest.raises(ValueError, match="line 2 has no path"):
        open_source(str(tmp_path / "short.csv"))
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a text file"):
        open_source(str(tmp_path / "b.txt"))
    (tmp_path / "c.txt").write_text("\n")
    with pytest.raises(ValueError, match="names no image"):
        open_source(str(tmp_path / "c.txt"))


def test_digits() -> None:
    source = open_source("digits")
    assert len(source) == 1797 and source.keys[3] == "digits/000003"
    image = source.read(0)
    assert isinstance(image, np.ndarray) and image.shape == (8, 8) and image.max() == 239
    assert not has_test_split("digits") and has_test_split("cifar10")


def test_named_set_that_cannot_be_had(tmp_path, monkeypatch) -> None:
    import torchvision.datasets

    def refuse(self) -> None:
        raise RuntimeError("no network")

    monkeypatch.setattr(torchvision.datasets.CIFAR10, "download", refuse)
    with pytest.raises(ValueError, match="--data-root"):
        open_source("cifar10", tmp_path)


def test_sets_from_their_own_files(tmp_path, monkeypatch) -> None:
    """MNIST in torchvision's layout and Fashion-MNIST in Debian's, in the real file format, with seven images."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 255, (7, 28, 28), dtype=np.uint8)
    for prefix in ("train", "t10k"):
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, 7, 28, 28) + images.tobytes())
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, 7) + bytes(range(7)))
    source = open_source("mnist", tmp_path)
    assert len(source) == 7 and (source.read(2) == images[2]).all()
    for path in raw.iterdir():
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    monkeypatch.setattr(named_sets, "DEBIAN_FASHION_MNIST", tmp_path)
    for test in (False, True):
        source = open_source("fashion-mnist", test=test)
        assert len(source) == 7 and (source.read(2) == images[2]).all()
        assert source.labels is not None and source.labels.names[9] == "Ankle boot"


def test_torchvisions_sets_of_files(tmp_path, digit_pixels) -> None:
    """In the layout that their archives unpack to."""

    def picture(*parts: str) -> None:
        path = tmp_path.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digit_pixels[0]).save(path)

    for name in ("banded/a.jpg", "dotted/b.jpg", "dotted/c.jpg"):
        picture("dtd", "dtd", "images", name)
    (tmp_path / "dtd" / "dtd" / "labels").mkdir()
    (tmp_path / "dtd" / "dtd" / "labels" / "train1.txt").write_text("dotted/b.jpg\nbanded/a.jpg\n")
    (tmp_path / "dtd" / "dtd" / "labels" / "test1.txt").write_text("dotted/c.jpg\nbanded/a.jpg\n")
    picture("SUN397", "a", "abbey", "sun_1.jpg")
    picture("SUN397", "b", "bar", "sun_2.jpg")
    (tmp_path / "SUN397" / "ClassName.txt").write_text("/a/abbey\n/b/bar\n")
    picture("2018", "Birds", "0", "x.jpg")
    picture("2018", "Fungi", "1", "y.jpg")
    train, test = (open_source("dtd", tmp_path, test) for test in (False, True))
    assert train.labels and train.labels.names == ["banded", "dotted"] and train.labels.ids.tolist() == [0, 1]
    assert [key.rsplit("/")[-1] for key in test.keys] == ["a.jpg", "c.jpg"]
    for name, names in (("sun397", ["abbey", "bar"]), ("inaturalist2018", ["Birds/0", "Fungi/1"])):
        source = open_source(name, tmp_path)
        assert source.labels and source.labels.names == names and source.labels.ids.tolist() == [0, 1]
        assert source.read(0) and not has_test_split(name)


def test_files_that_are_ignored_are_named(tmp_path, digit_folder, monkeypatch, caplog) -> None:
    """Also photos of phones, where the package for them is missing, and what is taken of an animation."""
    shutil.copytree(digit_folder, tmp_path / "photos")
    for name in ("a.heic", "b.HEIC", "c.nef", "d.mp4", "e.txt", "f", ".hidden"):
        (tmp_path / "photos" / name).write_bytes(b"x")
    red, blue = Image.new("RGB", (16, 16), "red"), Image.new("RGB", (16, 16), "blue")
    red.save(tmp_path / "photos" / "moves.gif", save_all=True, append_images=[blue])
    monkeypatch.setattr(images, "_formats", lambda: images.FORMATS)
    with caplog.at_level("INFO"):
        dataset = open_dataset(str(tmp_path / "photos"))
    assert len(dataset.instance_ids) == 121
    assert "6 files ignored: 2 .heic (pip install 'millionway[heic]' to read them)" in caplog.text
    assert "1 .nef (RAW photos" in caplog.text and "1 .mp4 (videos, of which no frame is taken)" in caplog.text
    assert ".txt" in caplog.text and "without an extension" in caplog.text
    assert "1 images have several frames or pages: the first one is taken" in caplog.text


def test_texts_are_taken_by_their_places() -> None:
    texts = [f"photos/{number}.jpg" for number in range(50)]
    keys = Keys(pa.chunked_array([texts[:7], [], texts[7:30], texts[30:]], pa.string()))
    for places in ([], [49, 0, 7, 6, 30, 29, 7], list(range(50)), list(range(49, -1, -1))):
        taken = keys.take(np.array(places, dtype=np.int64))
        assert list(taken) == [texts[place] for place in places]
        assert len(taken.arrow.combine_chunks()) == len(places)


def test_more_letters_than_2_gib_can_be_opened() -> None:
    """Nine times the same chunk: nothing of that size is in memory."""
    chunk = pa.array([chr(97 + number) * (1 << 24) for number in range(16)], pa.string())
    keys = Keys(pa.chunked_array([chunk] * 9))
    assert sum(part.nbytes for part in keys.arrow.chunks) > 1 << 31
    first, last = keys.take(np.array([143, 0]))
    assert (first[0], last[0], len(last)) == ("p", "a", 1 << 24)
