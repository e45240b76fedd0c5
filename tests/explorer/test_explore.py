"""From a run to answers, a table and a page, as a person would go."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import millionway
from millionway.cli import main
from millionway.evaluation.snapshots import read_snapshot, snapshot_epochs
from millionway.explorer.explore import open_explorer
from millionway.settings.collection import Collected


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLIONWAY_FEATURES", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def run(own_cache, tmp_path_factory: pytest.TempPathFactory, digit_folder: Path) -> Path:
    """Trained for two epochs on a copy of the digits, one of them there twice."""
    root = tmp_path_factory.mktemp("run")
    shutil.copytree(digit_folder, root / "photos")
    first = min((root / "photos" / "0").iterdir())
    shutil.copy(first, root / "photos" / "1" / "copy.png")
    how = {"epochs": 2, "eval_every": 1, "image_size": 16, "batch_size": 32, "threads": 1, "device": "cpu"}
    return millionway.pretrain(root / "photos", root / "out", **how)


def test_the_command_line_answers_and_writes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    photos = run.parent / "photos"
    assert main(["search", "--run", str(run), "--query", str(photos / "1" / "copy.png"), "7", "--top", "2"]) == 0
    assert "cosine" in capsys.readouterr().out
    twice, keep = tmp_path / "twice.csv", tmp_path / "keep.txt"
    assert main(["duplicates", "--run", str(run), "--out", str(twice), "--write-list", str(keep)]) == 0
    assert "copy.png" in twice.read_text()
    kept = keep.read_text().splitlines()
    assert len(kept) < 121
    assert str(photos / "1" / "copy.png") not in kept
    assert all(Path(line).is_file() for line in kept)
    assert main(["outliers", "--run", str(run), "--top", "3"]) == 0
    assert main(["map", "--run", str(run)]) == 0
    assert "collection.parquet" in capsys.readouterr().out
    assert pq.read_table(run / "collection.parquet").num_rows == 121
    assert main(["duplicates", "--run", str(run), "--threshold", "1.5"]) == 2
    assert "--threshold" in capsys.readouterr().err
    assert main(["duplicates", "--run", str(run), "--out", str(twice)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_the_kept_list_is_data_for_the_next_run(run: Path, tmp_path: Path):
    millionway.duplicates(run, write_list=tmp_path / "keep.txt")
    changes = millionway.index(tmp_path / "keep.txt", tmp_path / "manifest.arrow")
    assert changes.manifest.readable.all()


def test_python_returns_plain_tables(run: Path):
    found = millionway.search(run, query=("0/000.png",), top=3)
    assert found.column_names == ["query", "id", "path", "label", "cosine"]
    assert found["path"][0].as_py().endswith("copy.png")
    collection = millionway.open_collection(run)
    assert len(collection.outliers(5)) == 5
    assert "<img" in collection.search(3)._repr_html_()


def test_rows_answer_for_their_own_images(run: Path):
    rows = millionway.open_collection(run, vectors="rows")
    assert rows.vectors.unit.shape[0] == 121
    assert "rows of" in rows.vectors.what
    assert len(rows.search(3, k=4)) == 4
    with pytest.raises(ValueError, match="a new image has no vector"):
        rows.search(str(_new_picture(run)))
    shutil.move(run / "checkpoints", run / "elsewhere")
    try:
        with pytest.raises(ValueError, match="has no rows"):
            _ = millionway.open_collection(run, vectors="rows").vectors
    finally:
        shutil.move(run / "elsewhere", run / "checkpoints")


def _new_picture(run: Path) -> Path:
    path = run.parent / "new.png"
    shutil.copy(run.parent / "photos" / "1" / "copy.png", path)
    return path


def test_images_that_are_gone_are_left_out_and_said(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    moved = tmp_path / "photos"
    shutil.copytree(run.parent / "photos", moved)
    (moved / "1" / "copy.png").unlink()
    with caplog.at_level("WARNING", logger="millionway"):
        collection = millionway.open_collection(run, data=moved)
    assert "1 went" in caplog.text
    assert len(collection.ids) == 120
    assert len(collection.table()) == 120
    with pytest.raises(ValueError, match="no such folder"):
        millionway.open_collection(run, data=tmp_path / "nowhere")


def test_features_of_a_few_images_are_saved_at_each_evaluation(run: Path):
    assert snapshot_epochs(run) == [0, 1, 2]
    first, last = read_snapshot(run, 0), read_snapshot(run, 2)
    assert first.ids.tolist() == last.ids.tolist()
    assert not np.allclose(first.features, last.features)


def test_the_page_knows_the_run_and_its_epochs(run: Path):
    from millionway.collection.opening import open_collection

    explorer = open_explorer(open_collection(Collected(run)))
    assert explorer.report is not None and "<html" in explorer.report()
    assert explorer.epochs is not None and explorer.epochs.known() == [0, 1, 2]
    moved = explorer.epochs.get(2)
    assert moved is not None and len(moved) == 12 * 121
    assert explorer.epochs.get(7) is None
    assert explorer.search is not None


def test_the_page_can_be_written_as_files(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "page"
    assert main(["explore", "--run", str(run), "--export", str(folder)]) == 0
    assert "index.html" in capsys.readouterr().out
    about = json.loads((folder / "data" / "about.json").read_text())
    assert about["num"] == 121
    assert not about["can_search"]
    assert (folder / "data" / "image" / "5.jpg").is_file()
    assert (folder / "web" / "deck.js").stat().st_size > 1 << 20
    assert (folder / "report.html").is_file()
    assert (folder / "data" / "epoch" / "1.bin").is_file()
    assert main(["explore", "--run", str(run), "--export", str(folder)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["explore", "--run", str(run), "--port", "70000"]) == 2
