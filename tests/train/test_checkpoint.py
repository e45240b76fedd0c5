import json
import os

import pytest
import torch

from millionway.model.classifier import InstanceClassifier
from millionway.model.encoder import EncoderSpec, build_encoder
from millionway.model.head import build_head
from millionway.model.network import Network
from millionway.reporting.metrics import read_metrics
from millionway.train import checkpoint
from millionway.train.metrics import Metrics
from millionway.train.state import State
from millionway.train.step import train_step

SPEC = EncoderSpec("narrow-resnet", "small", 16, (0.5,) * 3, (0.25,) * 3)


def new_state(seed: int = 0) -> State:
    network = Network(build_encoder(SPEC, seed), build_head("mlp", 256, 16, seed))
    optimizer = torch.optim.SGD(network.parameters(), 0.1, 0.9)
    return State(network, optimizer, InstanceClassifier(30, 16, seed=seed), torch.zeros(30, 3, dtype=torch.int32), 0)


def advance(state: State) -> None:
    g = torch.Generator().manual_seed(state.step)
    views, ids = torch.rand(8, 3, 16, 16, generator=g), torch.randint(30, (8,), generator=g)
    options = {"alpha": 0.2, "lr": 0.1, "row_lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
    state.hardest = state.classifier.hardest(3)
    train_step(state.network, state.classifier, state.optimizer, views, ids, state.hardest, **options)
    state.step += 1


def everything(state: State) -> dict[str, torch.Tensor]:
    return {
        **checkpoint._model_tensors(state),
        **{f"c.{k}": v for k, v in checkpoint._classifier_tensors(state).items()},
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
    assert sorted(os.listdir(tmp_path)) == ["last", "step_00000003", "step_00000004"]
    assert (tmp_path / "last").read_text() == "step_00000004\n"


def test_what_was_just_saved_is_never_removed(tmp_path) -> None:
    state = new_state()
    state.step = 8
    damaged = checkpoint.save(tmp_path, state, "f", keep=1)
    (damaged / "state.json").unlink()
    state.step = 4  # the run fell back behind it
    checkpoint.save(tmp_path, state, "f", keep=1)
    assert sorted(os.listdir(tmp_path)) == ["last", "step_00000004"]


def test_rows_that_are_not_finite_are_seen() -> None:
    state = new_state()
    assert checkpoint.all_finite(state)
    state.classifier.momentum[3, 2] = torch.inf
    assert not checkpoint.all_finite(state)


@pytest.mark.parametrize("damage", ["flip a bit", "cut a file", "remove a file", "empty state", "half-written"])
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
    elif damage == "empty state":
        (newest / "state.json").write_text("")
    else:
        (tmp_path / ".step_00000003.tmp").mkdir()
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
    assert sorted(os.listdir(disk / "checkpoints")) == ["last", "step_00000000"]
    other = new_state(seed=3)
    assert checkpoint.load_newest(disk / "checkpoints", other, "f") and other.step == 0


def test_metrics_are_cut_back_on_resume(tmp_path) -> None:
    metrics = Metrics(tmp_path)
    for step in range(5):
        metrics.write("step", step, step / 2, loss=float(step))
    metrics.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "st')  # a line torn by a crash
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5
    metrics = Metrics(tmp_path, resume_at=(2, 1.0))
    metrics.write("step", 3, 1.5, loss=-1.0)
    metrics.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [0.0, 1.0, 2.0, -1.0]
