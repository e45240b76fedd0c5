import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from millionway.files import BadFile, temporary_name
from millionway.model.classifier import InstanceClassifier
from millionway.model.encoder import EncoderSpec, build_encoder
from millionway.model.head import build_head
from millionway.model.network import Network
from millionway.reporting.metrics import read_metrics
from millionway.seals import seal_folder, write_json
from millionway.train import checkpoint
from millionway.train.metrics_file import Metrics
from millionway.train.state import State
from millionway.train.step import train_step

SPEC = EncoderSpec("narrow-resnet", "small", 16, (0.5,) * 3, (0.25,) * 3)


def new_state(seed: int = 0, rows_in: Path | str = "device") -> State:
    network = Network(build_encoder(SPEC, seed), build_head("mlp", 256, 16, seed))
    optimizer = torch.optim.SGD(network.parameters(), 0.1, 0.9)
    return State(
        network,
        optimizer,
        InstanceClassifier(30, 16, seed=seed, rows_in=rows_in),
        torch.zeros(30, 3, dtype=torch.int32),
        0,
    )


def advance(state: State) -> None:
    g = torch.Generator().manual_seed(state.step)
    views, ids = torch.rand(8, 3, 16, 16, generator=g), torch.randint(30, (8,), generator=g)
    options = {"alpha": 0.2, "lr": 0.1, "row_lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
    state.hardest = state.classifier.hardest(3)
    train_step(state.network, state.classifier, state.optimizer, views, ids, state.hardest, **options)
    state.step += 1


def everything(state: State) -> dict[str, torch.Tensor]:
    return {
        **state.model_tensors(),
        **{f"c.{k}": v for k, v in state.classifier_tensors().items()},
    }


def same(a: State, b: State) -> bool:
    ours, theirs = everything(a), everything(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_state_comes_back_and_goes_on_alike(tmp_path) -> None:
    state = new_state()
    for _ in range(3):
        advance(state)
    checkpoint.save(tmp_path, state, "f", keep=2)
    other = new_state(seed=9)
    assert checkpoint.load_newest(tmp_path, other, "f") and other.step == 3 and other.classifier.step == 3
    assert same(state, other)
    advance(state)
    advance(other)
    assert same(state, other)


def test_only_the_newest_stay_and_last_names_one(tmp_path) -> None:
    state = new_state()
    for _ in range(4):
        advance(state)
        checkpoint.save(tmp_path, state, "f", keep=2)
    assert sorted(os.listdir(tmp_path)) == ["last", "seals", "step_00000003", "step_00000004"]
    assert (tmp_path / "last").read_text() == "step_00000004\n"


def test_what_was_just_saved_is_never_removed(tmp_path) -> None:
    state = new_state()
    state.step = 8
    damaged = checkpoint.save(tmp_path, state, "f", keep=1)
    (damaged / "state.json").unlink()
    state.step = 4  # the run fell back behind it
    checkpoint.save(tmp_path, state, "f", keep=1)
    assert sorted(os.listdir(tmp_path)) == ["last", "seals", "step_00000004"]


def test_rows_that_are_not_finite_are_seen() -> None:
    state = new_state()
    assert state.all_finite()
    state.classifier.momentum[3, 2] = torch.inf
    assert not state.all_finite()


@pytest.mark.parametrize(
    "damage",
    [
        *("flip a bit", "cut a file", "remove a file", "remove the seals", "empty state", "half-written"),
        *("another step", "another step, sealed", "one file more", "a link", "swapped"),
    ],
)
def test_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, damage: str, caplog) -> None:
    state = new_state()
    advance(state)
    first = everything(state)
    first = {name: tensor.clone() for name, tensor in first.items()}
    checkpoint.save(tmp_path, state, "f", keep=2)
    advance(state)
    newest = checkpoint.save(tmp_path, state, "f", keep=2)
    shard = next((newest / "classifier").iterdir())
    if damage == "flip a bit":
        data = bytearray(shard.read_bytes())
        data[-5] ^= 1
        shard.write_bytes(data)
    elif damage == "cut a file":
        os.truncate(newest / "model.safetensors", 1000)
    elif damage == "remove a file":
        shard.unlink()
    elif damage.startswith("another step"):
        state_json = json.loads((newest / "state.json").read_text())
        (newest / "state.json").write_text(json.dumps({**state_json, "step": 7}))
        if damage.endswith("sealed"):
            (newest / "manifest.json").unlink()
            state_json.pop("seal")
            write_json(newest / "state.json", {**state_json, "fingerprint": "e"})
            seal_folder(newest)
    elif damage == "remove the seals":
        (newest / "manifest.json").unlink()
    elif damage == "one file more":
        (newest / "classifier" / "more.safetensors").write_bytes(shard.read_bytes())
    elif damage == "a link":
        shard.rename(tmp_path / "elsewhere")
        shard.symlink_to(tmp_path / "elsewhere")
    elif damage == "swapped":
        shutil.rmtree(newest)
        shutil.copytree(newest.with_name("step_00000001"), newest)
    elif damage == "empty state":
        (newest / "state.json").write_text("")
    else:
        (tmp_path / temporary_name("step_00000003")).mkdir()
        (newest / "state.json").unlink()
    other = new_state(seed=5)
    assert checkpoint.load_newest(tmp_path, other, "f") and other.step == 1
    assert all(torch.equal(first[name], tensor) for name, tensor in everything(other).items())
    assert "step_00000002 is damaged" in caplog.text


def test_no_checkpoint_and_other_images(tmp_path) -> None:
    assert not checkpoint.load_newest(tmp_path, new_state(), "f")
    state = new_state()
    checkpoint.save(tmp_path, state, "f", keep=1)
    with pytest.raises(ValueError, match="other images"):
        checkpoint.load_newest(tmp_path, state, "g")


def test_nothing_is_pickled(tmp_path) -> None:
    state = new_state()
    advance(state)
    folder = checkpoint.save(tmp_path, state, "f", keep=1)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    for path in files:
        head = path.read_bytes()[8:9] if path.suffix == ".safetensors" else path.read_bytes()[:1]
        assert head == b"{"


@pytest.mark.root
def test_full_disk_keeps_the_checkpoint_before(disk_of) -> None:
    """On a real file system of 8 MB: two checkpoints do not fit."""
    disk = disk_of("8m")
    state = new_state()
    checkpoint.save(disk / "checkpoints", state, "f", keep=2)
    advance(state)
    with pytest.raises(Exception, match="No space left") as caught:
        checkpoint.save(disk / "checkpoints", state, "f", keep=2)
    assert checkpoint.is_full_disk(caught.value)
    assert sorted(os.listdir(disk / "checkpoints")) == ["last", "seals", "step_00000000"]
    other = new_state(seed=3)
    assert checkpoint.load_newest(disk / "checkpoints", other, "f") and other.step == 0


def test_metrics_are_cut_back_on_resume(tmp_path) -> None:
    others = {"batch_top1": 0.0, "lr": 0.1, "images_per_second": 1.0}
    metrics = Metrics(tmp_path)
    for step in range(5):
        metrics.write("step", step, step / 2, loss=float(step), **others)
    metrics.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "st')  # a line torn by a crash
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5
    metrics = Metrics(tmp_path, resume_at=(2, 1.0))
    metrics.write("step", 3, 1.5, loss=-1.0, **others)
    metrics.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [0.0, 1.0, 2.0, -1.0]


def test_lost_or_damaged_seals_lose_no_checkpoint(tmp_path, caplog) -> None:
    state = new_state()
    advance(state)
    checkpoint.save(tmp_path, state, "f", keep=2)
    for content in (None, b"step_00000009\nseal 00\n", b"\xff\xfe"):
        (tmp_path / "seals").unlink(missing_ok=True)
        if content is not None:
            (tmp_path / "seals").write_bytes(content)
        other = new_state(seed=5)
        assert checkpoint.load_newest(tmp_path, other, "f") and same(state, other)
    assert "seals: its own seal is broken" in caplog.text


def test_a_checkpoint_of_an_older_version_is_not_passed_over(tmp_path) -> None:
    state = new_state()
    folder = checkpoint.save(tmp_path, state, "f", keep=2)
    (folder / "manifest.json").unlink()
    (folder / "state.json").write_text('{"version": 1, "step": 0, "fingerprint": "f", "files": {}}')
    with pytest.raises(BadFile, match=r"older version.* --init-from"):
        checkpoint.load_newest(tmp_path, new_state(), "f")


def test_a_checkpoint_of_another_model_is_named(tmp_path) -> None:
    state = new_state()
    folder = checkpoint.save(tmp_path, state, "f", keep=2)
    other = new_state()
    other.network.head[-1] = torch.nn.Linear(3, 5)
    with pytest.raises(BadFile, match=f"{folder / 'model.safetensors'}: it does not fit this run"):
        checkpoint.load_newest(tmp_path, other, "f")
    other = new_state()
    other.classifier = InstanceClassifier(31, 16)
    other.hardest = torch.zeros(31, 3, dtype=torch.int32)
    with pytest.raises(BadFile, match=f"{folder}: it does not fit this run"):
        checkpoint.load_newest(tmp_path, other, "f")
    state.hardest[2, 1] = 30  # there are 30
    state.step = 1
    checkpoint.save(tmp_path, state, "f", keep=2)
    with pytest.raises(BadFile, match="hardest classes"):
        checkpoint.load_newest(tmp_path, new_state(), "f")


def test_rows_in_a_file_are_saved_as_others_and_the_file_is_no_checkpoint(tmp_path) -> None:
    states = [new_state(), new_state(rows_in=tmp_path / "rows")]
    for name, state in zip(("memory", "file"), states):
        advance(state)
        assert state.all_finite()
        checkpoint.save(tmp_path / name, state, "f", keep=2)
    assert same(*states)
    shards = [sorted((tmp_path / name).rglob("shard-*")) for name in ("memory", "file")]
    assert [path.read_bytes() for path in shards[0]] == [path.read_bytes() for path in shards[1]]
    # As after a kill in mid-step: the file has rows of another step, and is used again.
    states[1].classifier.weight[5:] = 7.0
    states[1].classifier.momentum[:9] = torch.nan
    assert not states[1].all_finite()
    del states[1], state
    resumed = new_state(seed=9, rows_in=tmp_path / "rows")
    assert checkpoint.load_newest(tmp_path / "memory", resumed, "f")
    assert same(states[0], resumed)
    advance(states[0])
    advance(resumed)
    assert same(states[0], resumed)
