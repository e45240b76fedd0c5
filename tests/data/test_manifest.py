import numpy as np
import pytest
from PIL import Image

from millionway.data.dataset import open_dataset
from millionway.data.indexing import build_manifest
from millionway.data.kinds.choose import open_source
from millionway.data.manifest import Manifest, difference


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    root = tmp_path / "photos"
    root.mkdir()
    for index in range(12):
        pixels = rng.integers(0, 255, (20 + index, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"{index:02d}.jpg")
    return root


def test_rows_are_numbered_in_order_and_survive_the_disk(folder, tmp_path) -> None:
    source = open_source(str(folder))
    manifest = build_manifest(source, 2)
    manifest.save(tmp_path / "manifest.arrow")
    again = Manifest.load(tmp_path / "manifest.arrow")
    assert again.keys == list(source.keys) and again.column("instance_id").tolist() == list(range(12))
    assert again.column("height").tolist() == [20 + index for index in range(12)]
    assert again.fingerprint == manifest.fingerprint and again.readable.all() and again.labels is None
    assert len(set(again.column("content_hash"))) == 12


def test_unreadable_images_keep_their_number(folder) -> None:
    (folder / "03.jpg").write_bytes(b"")
    (folder / "05.jpg").write_bytes((folder / "04.jpg").read_bytes()[:200])
    manifest = build_manifest(open_source(str(folder)), 2)
    assert np.flatnonzero(~manifest.readable).tolist() == [3, 5]
    assert manifest.problems["03.jpg"] == "empty file" and len(manifest) == 12
    with pytest.raises(ValueError, match=r"2 of 12 images cannot be read.*--max-unreadable 0.17"):
        open_dataset(str(folder))
    assert open_dataset(str(folder), max_unreadable=0.2).instance_ids.tolist() == [
        0,
        1,
        2,
        4,
        6,
        7,
        8,
        9,
        10,
        11,
    ]


def test_no_readable_image_is_refused(tmp_path) -> None:
    (tmp_path / "a.png").write_bytes(b"rubbish")
    with pytest.raises(ValueError, match="none of its 1 images"):
        open_dataset(str(tmp_path), max_unreadable=1.0)


def test_difference_says_what_came_and_went(folder) -> None:
    manifest = build_manifest(open_source(str(folder)), 2)
    source = open_source(str(folder))
    assert difference(manifest, source, source.keys.places_of(manifest.keys)) == ""
    (folder / "02.jpg").unlink()
    Image.new("RGB", (9, 9)).save(folder / "new.png")
    (folder / "07.jpg").write_bytes(b"other")
    source = open_source(str(folder))
    words = difference(manifest, source, source.keys.places_of(manifest.keys))
    assert "1 came (new.png)" in words and "1 went (02.jpg)" in words and "1 changed (07.jpg)" in words


def test_a_manifest_of_the_same_images_in_another_order(folder, tmp_path) -> None:
    names = [f"photos/{index:02d}.jpg" for index in (5, 3, 8)]
    (tmp_path / "list.txt").write_text("\n".join(names))
    build_manifest(open_source(str(tmp_path / "list.txt")), 2).save(tmp_path / "manifest.arrow")
    (tmp_path / "list.txt").write_text("\n".join(reversed(names)))
    dataset = open_dataset(str(tmp_path / "list.txt"), manifest_path=tmp_path / "manifest.arrow")
    assert dataset.manifest.keys == names and dataset.store.heights.tolist() == [25, 23, 28]
    assert dataset.source.read(0) == (folder / "05.jpg").read_bytes()


def test_what_is_no_manifest_is_refused(tmp_path) -> None:
    (tmp_path / "x.arrow").write_bytes(b"rubbish")
    with pytest.raises(ValueError, match="not a manifest"):
        Manifest.load(tmp_path / "x.arrow")
    with pytest.raises(ValueError, match="not a manifest"):
        Manifest.load(tmp_path / "missing.arrow")
