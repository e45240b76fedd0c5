"""The index: parallel, incremental, and what it says of copies and of images that show nothing."""

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import millionway
from millionway.data import indexing
from millionway.data.dataset import open_dataset
from millionway.data.indexing import build_manifest, update_manifest
from millionway.data.kinds.choose import open_source
from millionway.data.manifest import Manifest, difference
from millionway.data.source import Keys


@pytest.fixture
def photos(tmp_path: Path, digit_folder: Path) -> Path:
    return Path(shutil.copytree(digit_folder, tmp_path / "photos"))


@given(
    here=st.lists(st.text(st.characters(codec="utf-8"), max_size=5), max_size=20),
    there=st.lists(st.text(st.characters(codec="utf-8"), max_size=5), max_size=20),
    cut=st.integers(0, 20),
)
def test_keys_behave_as_a_list_of_texts(here: list[str], there: list[str], cut: int) -> None:
    keys = Keys(pa.chunked_array([pa.array(here[:cut], pa.string()), pa.array(here[cut:], pa.string())]))
    assert keys == here and list(keys) == here and len(keys) == len(here) and keys[1:3] == here[1:3]
    assert keys.places_of(Keys(there)).tolist() == [here.index(text) if text in here else -1 for text in there]
    assert set(keys.repeated()) == {text for text in here if here.count(text) > 1}
    backwards = np.arange(len(here))[::-1]
    assert keys.take(backwards) == Keys(here[::-1])


def test_processes_find_what_threads_find(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (photos / "3" / "broken.png").write_bytes(b"rubbish")
    by_threads = build_manifest(open_source(str(photos)), 2)
    monkeypatch.setattr("millionway.data.readers.MANY", 1)
    monkeypatch.setattr(indexing, "ROWS_PER_BATCH", 50)
    by_processes = build_manifest(open_source(str(photos)), 2)
    assert by_processes.table.equals(by_threads.table) and by_processes.table["key"].num_chunks == 3
    assert by_processes.fingerprint == by_threads.fingerprint
    assert by_processes.problems == {"3/broken.png": by_processes.problems["3/broken.png"]}
    assert "not an image in a format that is read" in by_processes.problems["3/broken.png"]


def test_size_mode_and_hash_are_recorded(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (20, 30, 4), dtype=np.uint8)
    for mode in ("L", "RGB", "RGBA", "P", "1"):
        Image.fromarray(noise).convert(mode).save(tmp_path / f"{mode}.png")
    Image.fromarray(noise[..., 0].astype(np.uint16) << 8).save(tmp_path / "deep.png")
    manifest = build_manifest(open_source(str(tmp_path)), 1)
    assert dict(zip(manifest.keys, manifest.table["mode"].to_pylist())) == {
        "1.png": "1",
        "L.png": "L",
        "P.png": "P",
        "RGB.png": "RGB",
        "RGBA.png": "RGBA",
        "deep.png": "I;16",
    }
    sizes = zip(manifest.column("width"), manifest.column("height"), manifest.column("num_bytes"))
    assert all((w, h, n) == (30, 20, (tmp_path / key).stat().st_size) for key, (w, h, n) in zip(manifest.keys, sizes))


def test_a_second_time_only_what_is_new_is_read(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "list" / "manifest.arrow"
    first = millionway.index(photos, out, threads=1)
    assert len(first.new_ids) == 120 and not out.with_name("manifest.arrow.partial").exists()
    read: list[int] = []
    look = indexing._examine
    monkeypatch.setattr(indexing, "_examine", lambda source, place: read.append(place) or look(source, place))
    assert str(millionway.index(photos, out, threads=1)) == "0 new or changed, 0 removed, 0 renamed" and read == []
    os.utime(photos / "0" / "000.png", ns=(1, 1))  # written again with the same bytes
    changed, gone = photos / "1" / "001.png", photos / "2" / "002.png"
    same_size = bytearray(changed.read_bytes())
    shutil.copy(gone, photos / "2" / "renamed.png")
    gone.unlink()
    Image.new("RGB", (16, 16), "red").save(photos / "7" / "new.png")
    same_size[-20] ^= 255  # as many bytes, another content
    changed.write_bytes(same_size)
    again = millionway.index(photos, out, threads=1)
    assert str(again).endswith("1 renamed") and len(read) == 4
    manifest = Manifest.load(out)
    assert manifest.fingerprint == again.manifest.fingerprint != first.manifest.fingerprint
    old = first.manifest.keys
    assert len(manifest) == 121 and manifest.keys[120] == "7/new.png"
    moved = [row for row in range(120) if manifest.keys[row] != old[row]]
    assert [old[row] for row in moved] == ["2/002.png"] and manifest.keys[moved[0]] == "2/renamed.png"
    (tmp_path / "other").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "other" / "x.png")
    with pytest.raises(ValueError, match="lists other images"):
        millionway.index(tmp_path / "other", out)


def test_an_interrupted_index_goes_on(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(indexing, "ROWS_PER_BATCH", 10)
    out, source = tmp_path / "manifest.arrow", open_source(str(photos))

    def interrupted(rows, num, words):
        for number, row in enumerate(rows):
            if number == 55:
                raise KeyboardInterrupt
            yield row

    with pytest.raises(KeyboardInterrupt):
        indexing.index(source, out, 1, interrupted)
    assert not out.exists()
    begun = out.with_name("manifest.arrow.partial")
    begun.write_bytes(begun.read_bytes()[:-100])  # and the last batch was cut off by a crash
    Image.new("RGB", (16, 16), "blue").save(photos / "0" / "000.png")  # examined before, and changed since
    seen = []
    caplog.set_level(logging.INFO)
    indexing.index(source, out, 1, lambda rows, num, words: seen.append(num) or rows)
    assert seen == [120 - 40 + 1] and "39 images were examined before" in caplog.text
    assert Manifest.load(out).table.equals(build_manifest(source, 1).table) and not begun.exists()


def test_copies_are_reported_kept_or_merged(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("copy-a.png", "copy-b.png"):
        shutil.copy(photos / "4" / "004.png", photos / "9" / name)
    source = open_source(str(photos))
    kept = open_dataset(str(photos), duplicates="report").manifest
    assert kept.num_duplicates == 2 and kept.readable.all() and "2 images are exact copies" in caplog.text
    caplog.clear()
    open_dataset(str(photos), duplicates="keep")
    assert "copies" not in caplog.text

    merged = open_dataset(str(photos), duplicates="merge")
    rows = [list(kept.keys).index(f"9/{name}") for name in ("copy-a.png", "copy-b.png")]
    assert np.flatnonzero(~merged.manifest.readable).tolist() == rows and merged.manifest.problems == {}
    assert merged.manifest.table["problem"][rows[0]].as_py() == "copy of 4/004.png"
    assert len(merged.instance_ids) == 120 and merged.manifest.fingerprint != kept.fingerprint

    # The picture itself goes: one of its copies takes over, with a row to be written; the other stays a copy.
    (photos / "4" / "004.png").unlink()
    later = update_manifest(merged.manifest, open_source(str(photos)), 1, duplicates="merge")
    assert later.new_ids.tolist() == [rows[0]] and later.num_removed == 1
    assert later.manifest.table["problem"][rows[1]].as_py() == "copy of 9/copy-a.png"
    # A copy that comes later does not take the row of who was there, even under a lower number.
    shutil.copy(photos / "9" / "copy-a.png", photos / "0" / "000-copy.png")
    last = update_manifest(later.manifest, open_source(str(photos)), 1, duplicates="merge")
    assert last.new_ids.tolist() == [] and last.manifest.readable[rows[0]]
    assert build_manifest(source, 1, duplicates="keep").num_duplicates == 1


def test_renamed_copies_keep_the_row_that_was_trained(photos: Path) -> None:
    shutil.copy(photos / "4" / "004.png", photos / "4" / "zz-copy.png")
    old = build_manifest(open_source(str(photos)), 1, duplicates="merge")
    shutil.move(photos / "4", photos / "renamed")
    changes = update_manifest(old, open_source(str(photos)), 1)  # what was merged stays merged
    num = len(list((photos / "renamed").iterdir()))
    assert str(changes) == f"0 new or changed, 0 removed, {num:,} renamed"
    assert (changes.manifest.readable == old.readable).all() and changes.manifest.copies.sum() == 1
    assert changes.manifest.keys[list(old.keys).index("4/004.png")] in ("renamed/004.png", "renamed/zz-copy.png")
    # Everything under another name is still the same images.
    shutil.move(photos, photos.with_name("inside"))
    photos.mkdir()
    shutil.move(photos.with_name("inside"), photos / "inside")
    moved = update_manifest(changes.manifest, open_source(str(photos)), 1)
    assert len(moved.new_ids) == 0 and moved.num_renamed == len(old) and not moved.nothing_stayed


@pytest.mark.parametrize("kind", ["npy", "parquet"])
def test_images_that_move_inside_a_file_keep_their_rows(tmp_path: Path, digit_pixels: np.ndarray, kind: str) -> None:
    """All are of one size, so only their content tells who is who."""

    def write(pixels: np.ndarray, time: int) -> Path:
        path = tmp_path / f"images.{kind}"
        if kind == "npy":
            np.save(path, pixels)
        else:
            columns = {"image": [b"P5 8 8 255 " + image.tobytes() for image in pixels]}
            pq.write_table(pa.table(columns), path)
        os.utime(path, ns=(time, time))
        return path

    path = write(digit_pixels[:20], 10**18)
    old = build_manifest(open_source(str(path)), 1)
    old.save(tmp_path / "manifest.arrow")
    write(digit_pixels[1:21], 2 * 10**18)  # the first one went, another came: as many as before
    source = open_source(str(path))
    assert "changed" in difference(old, source, source.keys.places_of(old.keys))
    with pytest.raises(ValueError, match="are not those of"):
        open_dataset(str(path), manifest_path=tmp_path / "manifest.arrow")
    changes = update_manifest(old, open_source(str(path)), 1)
    assert changes.new_ids.tolist() == [0] and changes.num_renamed == 19
    then, now = old.table["content_hash"].to_pylist(), changes.manifest.table["content_hash"].to_pylist()
    assert now[1:20] == then[1:20] and now[0] != then[0]


def test_a_list_with_copies_is_not_merged_in_silence(photos: Path, tmp_path: Path) -> None:
    shutil.copy(photos / "4" / "004.png", photos / "9" / "copy.png")
    millionway.index(photos, tmp_path / "m.arrow", duplicates="keep")
    with pytest.raises(ValueError, match="1 copies with rows of their own"):
        open_dataset(str(photos), manifest_path=tmp_path / "m.arrow", duplicates="merge")
    millionway.index(photos, tmp_path / "m.arrow", duplicates="merge")
    merged = open_dataset(str(photos), manifest_path=tmp_path / "m.arrow", duplicates="merge").manifest
    assert merged.readable.sum() == 120
    assert millionway.index(photos, tmp_path / "m.arrow").manifest.readable.sum() == 120


def test_a_run_gives_copies_one_row(photos: Path, tmp_path: Path) -> None:
    for number in range(30):
        shutil.copy(photos / "4" / "004.png", photos / "9" / f"copy-{number}.png")
    settings = {"epochs": 1, "batch_size": 32, "threads": 1, "labels": "none", "hardest": 2, "duplicates": "merge"}
    run = millionway.pretrain(photos, tmp_path / "run", **settings)
    assert Manifest.load(run / "manifest.arrow").readable.sum() == 120
    assert "30 images are exact copies" in (run / "train.log").read_text()


def test_images_that_show_nothing_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    Image.new("RGB", (90, 70), "gray").save(tmp_path / "flat.png")
    Image.fromarray(rng.integers(100, 103, (70, 90, 3), dtype=np.uint8)).save(tmp_path / "lens-cap.png")
    drawing = np.full((70, 90, 3), 255, dtype=np.uint8)
    drawing[30:40, 30:60] = 0
    Image.fromarray(drawing).save(tmp_path / "drawing.png")
    Image.linear_gradient("L").save(tmp_path / "gradient.png")
    open_dataset(str(tmp_path), duplicates="report")
    assert "2 images show almost nothing: flat.png, lens-cap.png" in caplog.text


def test_the_fingerprint_does_not_depend_on_chunks(photos: Path, tmp_path: Path) -> None:
    manifest = build_manifest(open_source(str(photos)), 1)
    table = manifest.table
    pieces = [table.slice(start, 7) for start in range(0, len(table), 7)]
    again = Manifest(pa.concat_tables(pieces))
    assert again.table["key"].num_chunks > 1 and again.fingerprint == manifest.fingerprint
    moved = table.take([1, 0, *range(2, len(table))])
    assert Manifest(moved).fingerprint != manifest.fingerprint
    manifest.save(tmp_path / "m.arrow")
    assert Manifest.load(tmp_path / "m.arrow").fingerprint == manifest.fingerprint
