"""Every kind of data gives the same images, keys that stay, and labels where there are any."""

import io
import json
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import millionway
from millionway.data.dataset import open_dataset
from millionway.data.images import UnreadableImage, decode
from millionway.data.kinds import tar_shards
from millionway.data.kinds.choose import open_source
from millionway.data.kinds.tar_shards import ShardSource, expand
from millionway.data.source import Source


@pytest.fixture(autouse=True)
def own_index(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("MILLIONWAY_INDEX", str(tmp_path / "index"))
    return tmp_path / "index"


def encoded(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def shards(folder: Path, digit_pixels: np.ndarray, num: int = 3, each: int = 10) -> Path:
    folder.mkdir()
    for shard in range(num):
        with tarfile.open(folder / f"train-{shard:03d}.tar", "w") as archive:
            for place in range(each):
                number = shard * each + place
                for name, data in (
                    (f"{number:05d}.png", encoded(digit_pixels[number])),
                    (f"{number:05d}.cls", b"%d" % (number % 12)),
                ):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(data)
                    archive.addfile(entry, io.BytesIO(data))
    return folder


def hugging_face(path: Path, digit_pixels: np.ndarray, num: int = 30) -> Path:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": encoded(digit_pixels[n]), "path": f"{n}.png"} for n in range(num)]
    names = [f"digit {n}" for n in range(10)]
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    schema = pa.schema([("image", kind), ("label", pa.int64())], metadata=metadata)
    pq.write_table(pa.table({"image": rows, "label": [n % 10 for n in range(num)]}, schema), path, row_group_size=7)
    return path


def assert_images(source: Source, digit_pixels: np.ndarray, num: int = 30) -> None:
    assert len(source) == len(source.keys) == len(set(source.keys)) == num
    for index in (0, 1, num // 2, num - 1):
        assert (np.asarray(decode(source.read(index)))[..., 0] == digit_pixels[index]).all()
        assert source.statuses(np.array([index]))[0, 0] > 0


def test_tar_shards(tmp_path: Path, digit_pixels: np.ndarray, own_index: Path) -> None:
    folder = shards(tmp_path / "shards", digit_pixels)
    for data in (folder, folder / "train-{000..002}.tar"):
        source = open_source(str(data))
        assert_images(source, digit_pixels)
        assert source.keys[11] == "train-001.tar/00011.png"
        assert source.labels and source.labels.names[:3] == ["0", "1", "2"]
        assert source.labels.ids.tolist() == [n % 12 for n in range(30)]
    kept = {path: path.stat().st_mtime_ns for path in own_index.iterdir()}
    assert len(kept) == 3  # each was walked through once
    open_source(str(folder))
    assert {path: path.stat().st_mtime_ns for path in own_index.iterdir()} == kept
    assert len(open_source(str(folder / "train-001.tar"))) == 10
    assert expand("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]


def test_a_shard_is_asked_once_for_all_its_images(
    tmp_path: Path, digit_pixels: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(str(shards(tmp_path / "shards", digit_pixels)))
    asked, status_of = [], tar_shards.status_of
    monkeypatch.setattr(tar_shards, "status_of", lambda path: (asked.append(path), status_of(path))[1])
    found = source.statuses(np.arange(29, 4, -1))
    assert len(asked) == len(set(asked)) == 3
    assert found[:, 0].tolist() == [len(source.read(place)) for place in range(29, 4, -1)]
    assert found[0, 1] == (tmp_path / "shards" / "train-002.tar").stat().st_mtime_ns


def test_a_truncated_shard_gives_what_it_has(tmp_path: Path, digit_pixels: np.ndarray) -> None:
    folder = shards(tmp_path / "shards", digit_pixels)
    whole = open_source(str(folder))
    assert isinstance(whole, ShardSource)
    path = folder / "train-002.tar"
    content = path.read_bytes()
    path.write_bytes(content[: whole.offsets[25] + 10])
    cut = open_source(str(folder))
    assert 24 <= len(cut) <= 26 and list(cut.keys) == list(whole.keys)[: len(cut)]
    assert whole.statuses(np.array([29]))[0, 0] == -1 and whole.statuses(np.array([3]))[0, 0] > 0
    with pytest.raises(UnreadableImage, match=r"train-002\.tar ends before it"):
        whole.read(29)
    if len(cut) == 26:
        with pytest.raises(UnreadableImage):
            cut.read(25)


def test_bad_shards_are_named(tmp_path: Path, digit_pixels: np.ndarray) -> None:
    folder = shards(tmp_path / "shards", digit_pixels)
    with pytest.raises(ValueError, match="2 shards are missing"):
        open_source(str(folder / "train-{001..004}.tar"))
    (folder / "again.tar").symlink_to(folder / "train-000.tar")
    with pytest.raises(ValueError, match="listed twice"):
        open_source(str(folder))
    (folder / "again.tar").unlink()
    (folder / "rubbish.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(ValueError, match=r"rubbish\.tar: not a tar file"):
        open_source(str(folder))
    with tarfile.open(folder / "rubbish.tar", "w") as archive:
        for _ in range(2):
            entry = tarfile.TarInfo("same.png")
            archive.addfile(entry, io.BytesIO())
    with pytest.raises(ValueError, match="1 names occur twice"):
        open_source(str(folder))


def test_parquet_as_hugging_face_writes_it(tmp_path: Path, digit_pixels: np.ndarray) -> None:
    source = open_source(str(hugging_face(tmp_path / "train.parquet", digit_pixels)))
    assert_images(source, digit_pixels)
    assert source.labels and source.labels.names[3] == "digit 3" and source.labels.ids[13] == 3
    assert source.keys[4] == "train.parquet/00000004/4.png"
    parts = tmp_path / "parts"
    parts.mkdir()
    for number in range(2):
        hugging_face(parts / f"part-{number}.parquet", digit_pixels, 15)
    assert len(open_source(str(parts))) == 30


def test_arrow_files_and_plain_bytes(tmp_path: Path, digit_pixels: np.ndarray) -> None:
    table = pa.table({"image": [encoded(digit_pixels[n]) for n in range(30)], "label": ["a", "b", None] * 10})
    with pa.ipc.new_file(str(tmp_path / "file.arrow"), table.schema) as out:
        out.write_table(table)
    with pa.ipc.new_stream(str(tmp_path / "stream.arrow"), table.schema) as out:
        out.write_table(table)
    for name in ("file.arrow", "stream.arrow"):
        source = open_source(str(tmp_path / name))
        assert_images(source, digit_pixels)
        assert source.labels and source.labels.names == ["a", "b"] and source.labels.ids.tolist()[:3] == [0, 1, -1]


def test_a_table_of_paths_is_a_list(tmp_path: Path, digit_folder: Path) -> None:
    paths = [str(path) for path in sorted(digit_folder.rglob("*.png"))]
    pq.write_table(pa.table({"path": paths, "label": [Path(p).parent.name for p in paths]}), tmp_path / "list.parquet")
    source = open_source(str(tmp_path / "list.parquet"))
    assert len(source) == 120 and source.labels and len(source.labels.names) == 10 and source.read(5)
    pq.write_table(pa.table({"path": [*paths, paths[0]]}), tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match="1 images are listed twice"):
        open_source(str(tmp_path / "twice.parquet"))
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "text.parquet")
    with pytest.raises(ValueError, match="no image column"):
        open_source(str(tmp_path / "text.parquet"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 rubbish")
    with pytest.raises(ValueError, match="not a readable table"):
        open_source(str(tmp_path / "bad.parquet"))


def test_numpy_arrays(tmp_path: Path, digit_pixels: np.ndarray) -> None:
    labels = np.arange(30) % 5
    np.savez(tmp_path / "both.npz", x_train=digit_pixels[:30], y_train=labels)
    np.save(tmp_path / "pixels.npy", np.repeat(digit_pixels[:30, None], 3, axis=1))  # channels first
    both, pixels = open_source(str(tmp_path / "both.npz")), open_source(str(tmp_path / "pixels.npy"))
    assert_images(both, digit_pixels)
    assert_images(pixels, digit_pixels)
    assert both.labels and both.labels.ids.tolist() == labels.tolist() and pixels.labels is None
    for content, message in (
        ({"other": labels}, "no array called"),
        ({"images": digit_pixels.astype(np.float32)}, "not float32"),
        ({"images": digit_pixels[:30], "labels": labels[:29]}, "30 images and 29 labels"),
        ({"images": np.array([{}])}, "not a numpy file"),
    ):
        np.savez(tmp_path / "bad.npz", **content)
        with pytest.raises(ValueError, match=message):
            open_source(str(tmp_path / "bad.npz"))


def test_addresses_through_fsspec(digit_folder: Path, monkeypatch) -> None:
    files = fsspec.filesystem("memory")
    for path in sorted(digit_folder.rglob("*.png"))[:40]:
        files.pipe(f"/bucket/{path.relative_to(digit_folder)}", path.read_bytes())
    try:
        source = open_source("memory://bucket")
        local = open_source(str(digit_folder))
        assert len(source) == 40 and list(source.keys) == list(local.keys)[:40]
        assert source.read(7) == local.read(7) and source.labels is not None
        failures = iter([OSError("Input/output error"), None])
        whole = files.cat_file

        def fails_once(path: str) -> bytes:
            error = next(failures)
            if error:
                raise error
            return whole(path)

        monkeypatch.setattr("millionway.data.source.WAIT_SECONDS", 0.0)
        monkeypatch.setattr(files, "cat_file", fails_once)
        assert source.read(3) == local.read(3)
        monkeypatch.undo()
        files.rm(f"/bucket/{source.keys[5]}")
        with pytest.raises(UnreadableImage, match="no longer there"):
            source.read(5)
    finally:
        files.rm("/bucket", recursive=True)
    with pytest.raises(ValueError, match=r"cannot be listed|no image found"):
        open_source("memory://nothing")
    with pytest.raises(ValueError, match="cannot be listed"):
        open_source("nosuchscheme://nothing")


def test_a_run_on_shards_resumes(tmp_path: Path, digit_pixels: np.ndarray) -> None:
    folder = shards(tmp_path / "shards", digit_pixels)
    run = millionway.pretrain(folder, tmp_path / "run", epochs=1, batch_size=8, image_size=16, threads=1)
    millionway.pretrain(out=run, resume=True)
    dataset = open_dataset(str(folder), manifest_path=run / "manifest.arrow")
    assert len(dataset.instance_ids) == 30
