"""Whole collections: real image files, a real encoder, real answers."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from millionway.collection import looks as looking
from millionway.collection import verbs
from millionway.collection.collection import Collection
from millionway.collection.opening import open_collection as open_asked
from millionway.settings.collection import Collected, Duplicates, Outliers

ENCODER = "torchvision/resnet18"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLIONWAY_FEATURES", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 photos of colored blobs in two folders; copies of some, and one that is black."""
    root, draw = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(40):
        folder = root / ("one" if number < 20 else "two")
        folder.mkdir(exist_ok=True)
        coarse = Image.fromarray(draw.integers(0, 256, (7, 7, 3), dtype=np.uint8))
        coarse.resize((48, 48), Image.Resampling.BICUBIC).save(folder / f"{number:02d}.png")
    shutil.copy(root / "one" / "03.png", root / "two" / "03-copy.png")
    Image.open(root / "one" / "05.png").resize((96, 96)).save(root / "two" / "05-large.png")
    Image.new("RGB", (48, 48)).save(root / "two" / "black.png")
    return root


def open_collection(**given: Any) -> Collection:
    return open_asked(Collected(**given))


def collection_of(data: Path | str) -> Collection:
    return open_collection(encoder=ENCODER, image_size=32, data=str(data), device="cpu", threads=1)


def names(paths: list[str]) -> list[str]:
    return [Path(path).name for path in paths]


def test_search_finds_what_looks_like_a_file_or_an_image_of_the_collection(photos: Path, tmp_path: Path):
    collection = collection_of(photos)
    shutil.copy(photos / "one" / "07.png", tmp_path / "new.png")
    found = collection.search(str(tmp_path / "new.png"), k=3).table
    assert names(found["path"].to_pylist())[0] == "07.png"
    assert found["cosine"][0].as_py() == pytest.approx(1, abs=1e-5)
    known = collection.search("one/03.png", 5, k=2).table
    assert names(known["path"].to_pylist())[0] == "03-copy.png"  # not itself
    assert known["query"].to_pylist() == ["one/03.png", "one/03.png", "5", "5"]
    assert known["label"][0].as_py() == "two"


def test_bad_queries_are_refused_by_name(photos: Path, tmp_path: Path):
    collection = collection_of(photos)
    (tmp_path / "note.txt").write_text("not an image")
    with pytest.raises(ValueError, match=r"note\.txt.*not a readable image"):
        collection.search(str(tmp_path / "note.txt"))
    with pytest.raises(ValueError, match=r"gone\.png.*no such file"):
        collection.search("gone.png")
    with pytest.raises(ValueError, match="no image with this id"):
        collection.search(1000)
    with pytest.raises(ValueError, match="--query is missing"):
        collection.search()


def test_duplicates_are_groups_with_one_to_keep(photos: Path):
    found = collection_of(photos).duplicates().table
    groups = {}
    for line in found.to_pylist():
        groups.setdefault(line["group"], []).append((Path(line["path"]).name, line["keep"], line["kind"]))
    assert sorted(map(sorted, groups.values())) == [
        [("03-copy.png", False, "copy"), ("03.png", True, "copy")],
        [("05-large.png", True, "near"), ("05.png", False, "near")],  # the larger one stays
    ]


def test_the_oldest_of_a_group_can_be_kept(photos: Path):
    found = collection_of(photos).duplicates(keep="oldest").table
    kept = {Path(line["path"]).name for line in found.to_pylist() if line["keep"]}
    assert kept == {"03.png", "05.png"}


def test_a_threshold_is_a_cosine(photos: Path):
    collection = collection_of(photos)
    for threshold in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="--threshold is a cosine"):
            collection.duplicates(threshold)
    only_copies = collection.duplicates(1.0).table
    assert set(only_copies["kind"].to_pylist()) == {"copy"}


def test_what_is_in_two_folders_is_found(photos: Path, tmp_path: Path):
    other = tmp_path / "test"
    other.mkdir()
    shutil.copy(photos / "one" / "01.png", other / "same.png")
    Image.open(photos / "two" / "25.png").resize((40, 40)).save(other / "smaller.png")
    Image.fromarray(np.random.default_rng(9).integers(0, 256, (48, 48, 3), dtype=np.uint8)).save(other / "noise.png")
    found = collection_of(photos).duplicates(against=collection_of(other)).table.to_pylist()
    pairs = {(Path(line["path"]).name, Path(line["against"]).name, line["kind"]) for line in found}
    assert pairs == {("01.png", "same.png", "copy"), ("25.png", "smaller.png", "near")}


def test_answers_are_shown_as_a_page(photos: Path, tmp_path: Path):
    asked = Duplicates(encoder=ENCODER, image_size=32, data=str(photos), device="cpu", threads=1)
    verbs.duplicates(replace(asked, out=tmp_path / "twice.html"))
    page = (tmp_path / "twice.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<img") == 4  # two groups of two
    assert page.count("<div>") == 2
    verbs.duplicates(replace(asked, data=str(photos / "one"), against=str(photos / "two"), out=tmp_path / "both.html"))
    page = (tmp_path / "both.html").read_text()
    assert page.count("<img") == 4  # two pairs, side by side
    with pytest.raises(ValueError, match=r"must end in \.csv, \.parquet or \.html"):
        verbs.outliers(Outliers(encoder=ENCODER, data=str(photos), out=tmp_path / "them.txt"))


def test_the_black_image_is_the_strangest(photos: Path):
    collection = collection_of(photos)
    first = collection.outliers(3).table.to_pylist()[0]
    assert Path(first["path"]).name == "black.png"
    assert "nearly uniform" in first["reason"]
    assert all(line["reason"] for line in collection.outliers(len(collection.ids)).to_pylist())


def test_the_table_has_a_line_for_every_image(photos: Path, tmp_path: Path):
    collection = collection_of(photos)
    path = collection.map(tmp_path / "collection.parquet")
    table = pq.read_table(path)
    assert table.num_rows == 43
    line = table.slice(3, 1).to_pylist()[0]
    assert line["path"].endswith("one/03.png")
    assert line["label"] == "one"
    copy = table["path"].to_pylist().index(str(photos / "two" / "03-copy.png"))
    assert line["neighbors"]["ids"][0] == copy  # lines of the file, as embedding-atlas counts them
    assert line["neighbors"]["distances"][0] == pytest.approx(0, abs=1e-5)
    assert len(line["neighbors"]["ids"]) == 20
    assert line["duplicate_group"] == table["duplicate_group"][copy].as_py()
    assert line["keep"] and not table["keep"][copy].as_py()
    assert line["thumbnail"]["bytes"].startswith(b"\x89PNG")
    assert table["duplicate_group"][0].as_py() is None
    assert collection_of(photos).read(path) is not None
    Image.new("RGB", (8, 8)).save(tmp_path / "one.png")
    assert collection_of(tmp_path).read(path) is None  # other images


def test_features_of_somebody_else_make_a_collection(photos: Path, tmp_path: Path):
    files = sorted(map(str, photos.rglob("*.png")))
    draw = np.random.default_rng(0)
    vectors = [draw.normal(size=8).astype(np.float32) for _ in files]
    vectors[4] = vectors[9]
    pq.write_table(pa.table({"id": range(len(files)), "path": files, "vector": vectors}), tmp_path / "own.parquet")
    collection = open_collection(features=tmp_path / "own.parquet", device="cpu", threads=1)
    assert collection.search(4, k=1).table["id"].to_pylist() == [9]
    with pytest.raises(ValueError, match="a new image has no vector"):
        shutil.copy(files[0], tmp_path / "new.png")
        collection.search(str(tmp_path / "new.png"))
    vectors[7] = vectors[7] * np.nan
    pq.write_table(pa.table({"path": files, "vector": vectors}), tmp_path / "nan.parquet")
    with pytest.raises(ValueError, match=r"1 of 43 vectors .* not finite.*image 7"):
        _ = open_collection(features=tmp_path / "nan.parquet", device="cpu", threads=1).vectors
    pq.write_table(pa.table({"path": files}), tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="no column of vectors"):
        _ = open_collection(features=tmp_path / "none.parquet", device="cpu", threads=1).vectors


@pytest.mark.parametrize("num", [1, 5])
def test_one_image_and_images_that_are_all_the_same(num: int, tmp_path: Path):
    (tmp_path / "images").mkdir()
    for number in range(num):
        Image.new("RGB", (16, 16), (200, 10, 10)).save(tmp_path / "images" / f"{number}.png")
    collection = collection_of(tmp_path / "images")
    assert pq.read_table(collection.map(tmp_path / "c.parquet")).num_rows == num
    assert len(collection.duplicates()) == (num if num > 1 else 0)
    assert len(collection.outliers()) == num
    assert len(collection.search(0)) == num - 1
    assert "<img" in collection.outliers()._repr_html_()
    assert "images" in collection._repr_html_()


def test_an_interrupted_look_goes_on_where_it_was(photos: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(looking, "IMAGES_PER_FILE", 10)
    collection = collection_of(photos)
    seen = 0

    def stop(items, total, what):
        nonlocal seen
        for item in items:
            seen += 1
            if what == "looking at images" and seen == 25:
                raise KeyboardInterrupt
            yield item

    collection.progress = stop
    with pytest.raises(KeyboardInterrupt):
        _ = collection.looks
    totals = []
    again = collection_of(photos)
    again.progress = lambda items, total, what: (totals.append((what, total)), items)[1]
    assert len(again.looks) == 43
    assert ("looking at images", 23) in totals  # 20 were kept


def test_what_does_not_fit_together_is_refused(photos: Path):
    for given, words in (
        ({}, "give --run"),
        ({"encoder": ENCODER}, "--data is missing"),
        ({"encoder": ENCODER, "data": str(photos), "vectors": "rows"}, "rows are those of a run"),
        ({"features": Path("gone.parquet")}, "no such file"),
    ):
        with pytest.raises(ValueError, match=words):
            open_collection(device="cpu", **given)


def test_vectors_do_not_depend_on_how_often_they_are_asked_for(photos: Path):
    first, again = collection_of(photos).vectors, collection_of(photos).vectors
    assert torch.equal(first.unit, again.unit)
    assert first.identity == again.identity
