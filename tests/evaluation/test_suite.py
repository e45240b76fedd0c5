"""Protocols on real images, for encoders of ours and of other libraries."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score

import millionway
from millionway import randomness
from millionway.cli import main
from millionway.data.dataset import open_dataset
from millionway.data.stores import FileStore
from millionway.evaluation import feature_cache
from millionway.evaluation.feature_cache import FeatureCache
from millionway.evaluation.features import labeled_split
from millionway.evaluation.few_labels import draw
from millionway.evaluation.linear import Fit, _random_view_features, accuracy, choose_lr, fit, linear
from millionway.evaluation.retrieval import retrieval
from millionway.evaluation.subject import open_subject, state_hash
from millionway.evaluation.work import Images, Work
from millionway.model.encoder import EncoderSpec, build_encoder
from millionway.model.encoder_file import save_encoder
from millionway.settings.evaluate import Evaluate
from millionway.settings.pretrain import IMAGENET_MEAN, IMAGENET_STD


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("MILLIONWAY_FEATURES", str(tmp_path / "features"))
    return tmp_path / "features"


@pytest.fixture(scope="module")
def encoder_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder") / "encoder.safetensors"
    save_encoder(build_encoder(EncoderSpec("narrow-resnet", "small", 16, IMAGENET_MEAN, IMAGENET_STD), 0), path)
    return path


@pytest.fixture(scope="module")
def pixels() -> tuple[torch.Tensor, torch.Tensor]:
    dataset = open_dataset("digits")
    assert dataset.labels is not None
    flat = torch.from_numpy(dataset.source.pixels).float().flatten(1)  # pyright: ignore[reportAttributeAccessIssue]
    return flat, torch.from_numpy(dataset.labels.ids)


# --- against others ---------------------------------------------------------------------------------------------------


def test_converged_linear_is_scikit_learns_with_the_same_penalty(pixels) -> None:
    features, labels = pixels
    train, test = slice(0, 1200), slice(1200, None)
    unit = torch.nn.functional.normalize(features)
    penalty = 1e-4  # of |w|^2 / 2 beside the mean loss
    how = Fit.for_images(1200, epochs=600, weight_decay=penalty)
    weight, bias = fit(lambda epoch: (features[train], labels[train]), 10, how, 0)
    theirs = LogisticRegression(C=1 / (1200 * penalty), max_iter=5000, tol=1e-8).fit(unit[train], labels[train])
    ours = accuracy(weight, bias, features[test], labels[test])
    assert ours == pytest.approx(theirs.score(unit[test], labels[test]), abs=0.005)
    centered = (weight - weight.mean(0)).numpy()
    assert np.abs(centered - theirs.coef_).max() < 0.03 * np.abs(theirs.coef_).max()


def test_the_written_out_gradient_is_autograds(pixels) -> None:
    features, labels = pixels[0][:256].double(), pixels[1][:256]
    how = Fit(epochs=3, batch_size=64, lr=2.0, weight_decay=1e-3)
    weight, bias = fit(lambda epoch: (features, labels), 10, how, 0)
    w, b = torch.zeros(10, 64).double().requires_grad_(), torch.zeros(10).double().requires_grad_()
    optimizer = torch.optim.SGD([{"params": [w], "weight_decay": 1e-3}, {"params": [b]}], 2.0, 0.9)
    unit = torch.nn.functional.normalize(features)
    for step in range(12):
        order = torch.randperm(256, generator=randomness.generator(0, "linear", step // 4))
        chosen = order[step % 4 * 64 :][:64]
        for group in optimizer.param_groups:
            group["lr"] = 2.0 * 0.5 * (1 + math.cos(math.pi * step / 12))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(unit[chosen] @ w.T + b, labels[chosen]).backward()
        optimizer.step()
    torch.testing.assert_close(weight, w.detach())
    torch.testing.assert_close(bias, b.detach())


def test_retrieval_is_the_plain_definition(pixels) -> None:
    features, labels = features_labels = (pixels[0][:300], pixels[1][:300])
    numbers = dict(retrieval(*features_labels))
    unit = torch.nn.functional.normalize(features.double())
    cosines = unit @ unit.T
    tops, precisions = {1: 0, 5: 0, 10: 0}, []
    for query in range(300):
        others = torch.tensor([n for n in range(300) if n != query])
        same = (labels[others] == labels[query]).numpy()
        scores = cosines[query, others].numpy()
        precisions.append(average_precision_score(same, scores))
        ranked = same[np.argsort(-scores, kind="stable")]
        for k in tops:
            tops[k] += ranked[:k].any()
    for k, hits in tops.items():
        assert numbers[f"retrieval_top{k}"] == pytest.approx(hits / 300, abs=0.004)
    assert numbers["retrieval_map"] == pytest.approx(np.mean(precisions), abs=1e-3)


def test_retrieval_perfect_and_impossible() -> None:
    labels = torch.tensor([0, 0, 1, 1, 2])
    numbers = dict(retrieval(torch.eye(3)[labels] + 0.01, labels))
    assert set(numbers.values()) == {1.0}
    with pytest.raises(ValueError, match="two images of a class"):
        list(retrieval(torch.eye(3), torch.arange(3)))


# --- linear -----------------------------------------------------------------------------------------------------------


def test_a_sweep_chooses_without_the_test_images(pixels) -> None:
    features, labels = pixels
    how = Fit.for_images(1200, epochs=5, lr=0.001)
    lr, reached = choose_lr(features[:1200], labels[:1200], how, 0)
    assert lr == pytest.approx(0.01) and len(reached) == 5  # ten times the poor one, the largest that was tried
    poor, good = (
        dict(linear(features[:1200], labels[:1200], features[1200:], labels[1200:], how=replace(how, lr=each)))
        for each in (0.001, lr)
    )
    assert good["linear_top1"] > poor["linear_top1"]


def test_random_views_train_a_linear_classifier(encoder_file: Path, tmp_path: Path) -> None:
    plain = millionway.evaluate("linear", encoder_file, "digits", epochs=5)
    augmented = millionway.evaluate("linear", encoder_file, "digits", epochs=5, augment=True, crop_min=0.8, flip=0.0)
    assert augmented != plain and augmented["linear_top1"] > 0.5


# --- labels -----------------------------------------------------------------------------------------------------------


def test_subsets_are_balanced_seeded_and_nested() -> None:
    split = labeled_split(open_dataset("digits"), None, 0)
    assert split is not None
    one, again, other = (draw(split.bank, seed, share=0.1) for seed in (0, 0, 1))
    assert torch.equal(one.instance_ids, again.instance_ids)
    assert not torch.equal(one.instance_ids, other.instance_ids)
    counts, all_counts = torch.bincount(one.labels), torch.bincount(split.bank.labels)
    assert torch.equal(counts, (0.1 * all_counts).round().long())
    few = draw(split.bank, 0, share=0.01)
    assert set(few.instance_ids.tolist()) < set(one.instance_ids.tolist())
    assert torch.bincount(draw(split.bank, 0, per_class=7).labels).tolist() == [7] * 10
    with pytest.raises(ValueError, match=r"--per-class 1000: class 0 has only 14\d images"):
        draw(split.bank, 0, per_class=1000, names=split.label_names)


def test_few_labels_and_finetune_learn(encoder_file: Path, tmp_path: Path) -> None:
    shared = {"data": "digits", "crop_min": 0.6, "flip": 0.0, "out": tmp_path / "out"}
    before = millionway.load_encoder(encoder_file)
    few = millionway.evaluate("few-labels", encoder_file, shares=(0.1,), **shared)
    assert few["few_labels_10%_top1"] > 0.5 and few["few_labels_10%_top5"] > few["few_labels_10%_top1"]
    stored = json.loads((tmp_path / "out" / "few-labels.json").read_text())
    assert len(stored["settings"]["10%"]["instance_ids"]) == stored["settings"]["10%"]["num_images"] > 100
    assert stored["settings"]["10%"]["classifier_lr"] == 10 and stored["settings"]["10%"]["encoder_lr"] == 0.001
    tuned = millionway.evaluate("finetune", encoder_file, epochs=6, **shared)
    assert tuned["finetune_top1"] > 0.9
    assert state_hash(before) == state_hash(millionway.load_encoder(encoder_file))


def test_seeds_give_mean_spread_and_interval(encoder_file: Path, tmp_path: Path) -> None:
    numbers = millionway.evaluate("knn", encoder_file, "digits", seeds=3, seed=5, out=tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "knn.json").read_text())
    each = [one["knn_20"] for one in stored["per_seed"]]
    assert stored["seeds"] == [5, 6, 7] and len(set(each)) > 1
    assert numbers["knn_20"] == pytest.approx(np.mean(each))
    assert stored["standard_deviation"]["knn_20"] == pytest.approx(np.std(each, ddof=1))
    # Student's t for two degrees of freedom
    expected = 4.302653 * np.std(each, ddof=1) / np.sqrt(3)
    assert stored["half_of_95_percent_interval"]["knn_20"] == pytest.approx(expected)
    for name in ("encoder_hash", "data_fingerprint", "k", "chance", "encoder"):
        assert name in stored["settings"]


def test_all_protocols_that_the_data_allows(encoder_file: Path, digit_folder: Path, tmp_path: Path, capsys) -> None:
    arguments = [
        "evaluate",
        "all",
        "--run",
        str(encoder_file),
        "--data",
        str(digit_folder),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main([*arguments, "--epochs", "1", "--shares", "0.2"]) == 0
    printed = capsys.readouterr().out
    for name in ("knn_200", "linear_top1", "few_labels_20%_top1", "finetune_top1", "retrieval_map"):
        assert name in printed
    files = {path.stem for path in (tmp_path / "out").iterdir()}
    assert files == {"knn", "linear", "few-labels", "finetune", "retrieval", "health", "all"}
    assert "| knn | knn_200 |" in (tmp_path / "out" / "all.md").read_text()


def test_an_untrained_encoder_stands_beside(encoder_file: Path, digit_folder: Path, tmp_path: Path, capsys) -> None:
    """What it scored when it was asked for alone; other encoders are not trained for it unless that is said."""
    arguments = ["evaluate", "all", "--run", str(encoder_file), "--data", str(digit_folder), "--out", str(tmp_path)]
    assert main([*arguments, "--seed", "3", "--epochs", "1", "--shares", "0.2"]) == 0
    assert "untrained encoder" in capsys.readouterr().out
    differ = False
    for protocol in ("knn", "linear", "retrieval", "health"):
        stored = json.loads((tmp_path / f"{protocol}.json").read_text())
        alone = {"encoder": "narrow-resnet", "image_size": 16, "data": digit_folder, "seed": 3, "epochs": 1}
        numbers = millionway.evaluate(protocol, **alone)
        assert "untrained" not in numbers
        assert stored["untrained"] == {name: numbers[name] for name in stored["numbers"]}
        differ |= stored["untrained"] != stored["numbers"]
    assert differ
    assert "untrained" not in json.loads((tmp_path / "finetune.json").read_text())
    assert "| protocol |  | value | untrained encoder |" in (tmp_path / "all.md").read_text()
    shared = {"data": digit_folder, "seed": 3, "epochs": 1}
    asked = millionway.evaluate("finetune", encoder_file, untrained="yes", **shared)
    assert 0 <= asked["untrained"]["finetune_top1"] <= 1


def test_the_first_weights_stand_beside(encoder_file: Path, digit_folder: Path, tmp_path: Path, caplog) -> None:
    weights = tmp_path / "first.safetensors"
    weights.write_bytes(encoder_file.read_bytes())
    run = millionway.pretrain(digit_folder, tmp_path / "run", init_from=weights, epochs=1, image_size=16, threads=1)
    scores = run.evaluate("knn", seed=1)  # the file's own encoder is the untrained one of seed 0
    alone = millionway.evaluate("knn", encoder_file, digit_folder, seed=1)
    assert scores["start"] == {name: alone[name] for name in scores["start"]} and scores["start"]
    assert scores["start"] != scores["untrained"]
    assert "first weights" in (run / "report.html").read_text()
    weights.unlink()
    assert "start" in run.evaluate("retrieval")  # the run has a copy
    (run / "start.safetensors").unlink()
    assert "start" not in run.evaluate("retrieval")
    assert "first.safetensors: no such file" in caplog.text


# --- features once ----------------------------------------------------------------------------------------------------


def test_features_are_kept_for_the_same_encoder_and_images_only(encoder_file: Path, own_cache: Path, tmp_path) -> None:
    first = millionway.evaluate("knn", encoder_file, "digits", untrained="no")
    files = {path: path.stat().st_ino for path in own_cache.iterdir()}
    assert len(files) == 1
    assert millionway.evaluate("knn", encoder_file, "digits", untrained="no") == first
    assert {path: path.stat().st_ino for path in own_cache.iterdir()} == files
    encoder = millionway.load_encoder(encoder_file)
    with torch.no_grad():
        next(encoder.backbone.parameters())[0, 0, 0, 0] += 0.5
    save_encoder(encoder, tmp_path / "changed.safetensors")
    millionway.evaluate("knn", tmp_path / "changed.safetensors", "digits", untrained="no")
    millionway.evaluate("knn", encoder_file, "digits", seed=1, untrained="no")  # another split of the same images
    assert len(list(own_cache.iterdir())) == 2
    for path in own_cache.iterdir():
        path.write_bytes(path.read_bytes()[:100])
    assert millionway.evaluate("knn", encoder_file, "digits", untrained="no") == first
    millionway.evaluate("linear", encoder_file, "digits", cache=False, epochs=1, untrained="no")
    assert len(list(own_cache.iterdir())) == 2


def test_the_cache_forgets_the_oldest(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(feature_cache, "MAX_BYTES", 10_000)
    cache = FeatureCache(tmp_path / "cache")
    for number in range(5):
        cache.get(str(number), "images", 16, torch.arange(5), lambda ids: (torch.zeros(5, 200), ids))
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_the_cache_asks_for_what_it_lacks(tmp_path: Path) -> None:
    cache, asked = FeatureCache(tmp_path), []

    def get(wanted: list[int], unreadable: tuple[int, ...] = ()) -> None:
        def compute(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            asked.append(ids.tolist())
            ids = torch.tensor([i for i in ids.tolist() if i not in unreadable], dtype=torch.int64)
            return ids[:, None] * torch.ones(3), ids

        features, ids = cache.get("encoder", "images", 16, torch.tensor(wanted), compute)
        assert ids.tolist() == [i for i in wanted if i not in unreadable]
        assert features[:, 1].tolist() == ids.tolist()

    get([7, 3, 5])
    get([3, 9, 1, 5], unreadable=(9,))
    get([1, 3, 7])
    get([9, 7])
    assert asked == [[7, 3, 5], [9, 1], [9]]


# --- encoders of others -----------------------------------------------------------------------------------------------


def resnet18(tmp_path: Path, change=None) -> tuple[torchvision.models.ResNet, Path]:
    torch.manual_seed(3)
    model = torchvision.models.resnet18(num_classes=7)
    path = tmp_path / "weights.pth"
    torch.save((change or (lambda state: state))(model.state_dict()), path)
    return model, path


@pytest.mark.parametrize(
    "change",
    [
        None,
        lambda state: {"state_dict": {f"module.encoder_q.{key}": value for key, value in state.items()}, "epoch": 3},
        lambda state: {"model": {f"backbone.{key}": value for key, value in state.items()}},
    ],
)
def test_weights_that_torchvision_saved(tmp_path: Path, change) -> None:
    model, path = resnet18(tmp_path, change)
    subject = open_subject(None, "torchvision/resnet18", str(path), 96, 0)
    model.fc = torch.nn.Identity()
    images = torch.rand(2, 3, 96, 96)
    spec = subject.encoder.spec
    mean, std = (torch.tensor(values)[:, None, None] for values in (spec.mean, spec.std))
    with torch.no_grad():
        torch.testing.assert_close(subject.encoder(images), model.eval()((images - mean) / std))


def test_weights_that_timm_saved(tmp_path: Path) -> None:
    import timm

    model = timm.create_model("resnet10t", num_classes=5)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "timm.safetensors")
    subject = open_subject(None, "timm/resnet10t", str(tmp_path / "timm.safetensors"), 96, 0)
    ours = subject.encoder.backbone.state_dict()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in ours.items())


def test_a_random_encoder_is_scored_by_the_same_code(digit_folder: Path) -> None:
    numbers = millionway.evaluate("knn", encoder="narrow-resnet", image_size=16, data=digit_folder)
    other = millionway.evaluate("knn", encoder="narrow-resnet", image_size=16, data=digit_folder, seed=1)
    assert numbers["knn_20"] > 0.3 and numbers != other
    both = millionway.evaluate("knn", encoder="narrow-resnet", image_size=16, data=digit_folder, seeds=2)
    assert both["knn_20"] == pytest.approx((numbers["knn_20"] + other["knn_20"]) / 2)
    assert both["half_of_95_percent_interval"]["knn_20"] > 0


def test_peers_see_the_colors_they_were_trained_with() -> None:
    spec = open_subject(None, "timm/vit_tiny_patch16_224", None, None, 0).encoder.spec
    assert spec.mean == spec.std == (0.5, 0.5, 0.5) and spec.image_size == 224
    assert open_subject(None, "timm/resnet18", None, 96, 0).encoder.spec.mean == (0.485, 0.456, 0.406)


def test_a_run_is_scored_at_another_size(encoder_file: Path) -> None:
    assert open_subject(encoder_file, None, None, 24, 0).encoder.spec.image_size == 24
    own = millionway.evaluate("knn", encoder_file, "digits")
    assert millionway.evaluate("knn", encoder_file, "digits", image_size=24) != own


class Foreign:
    def __reduce__(self):
        return (print, ("this must not run",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["knn"], "either --run"),
        (["knn", "--run", "x", "--encoder", "resnet18"], "either --run"),
        (["nn", "--encoder", "resnet18"], "no such protocol"),
        (["nn", "--encoder", "narrow-resnet", "--image-size", "16", "--data", "digits"], "no such protocol"),
        (["knn", "--encoder", "narrow-resnet", "--image-size", "16"], "--data is missing"),
        (["knn", "--encoder", "resnet18", "--weights", "none.pth", "--data", "digits"], "no such file"),
        (["linear", "--encoder", "narrow-resnet", "--image-size", "16", "--data", "digits", "--lr", "-1"], "--lr must"),
        (["knn", "--encoder", "narrow-resnet", "--image-size", "16", "--data", "digits", "--seeds", "0"], "--seeds"),
    ],
)
def test_bad_questions(arguments: list[str], message: str, capsys) -> None:
    assert main(["evaluate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_weights_of_another_architecture_say_which_keys_differ(tmp_path: Path) -> None:
    _, path = resnet18(tmp_path)
    with pytest.raises(
        ValueError, match=r"not of torchvision/resnet50.*conv3\.weight.*another shape.*not \[64, 64, 1, 1\]"
    ):
        open_subject(None, "torchvision/resnet50", str(path), 96, 0)
    assert open_subject(None, "torchvision/resnet18", str(path), 32, 0).encoder.spec.stem == "standard"
    torch.save({"weights": Foreign()}, path)
    with pytest.raises(ValueError, match="not a file of tensors alone"):
        open_subject(None, "torchvision/resnet18", str(path), 96, 0)
    path.write_bytes(b"rubbish")
    with pytest.raises(ValueError, match="not a file of tensors alone"):
        open_subject(None, "torchvision/resnet18", str(path), 96, 0)
    torch.save({"epoch": 3}, path)
    with pytest.raises(ValueError, match="no named tensors"):
        open_subject(None, "torchvision/resnet18", str(path), 96, 0)


def test_classes_without_a_training_image_are_named(encoder_file: Path, digit_folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(digit_folder, tmp_path / "data" / "train")
    shutil.copytree(digit_folder, tmp_path / "data" / "test")
    shutil.rmtree(tmp_path / "data" / "train" / "7")
    with pytest.raises(ValueError, match=r"1 classes have no training image \(7\)"):
        millionway.evaluate("knn", encoder_file, tmp_path / "data")
    with pytest.raises(ValueError, match=r"1 classes of the test images have no training image \(7\)"):
        millionway.evaluate("knn", encoder_file, tmp_path / "data" / "train", test_data=tmp_path / "data" / "test")
    # Fewer classes among those that ask are no mistake; labels go by name, not by number.
    shutil.rmtree(tmp_path / "data" / "test" / "7")
    shutil.rmtree(tmp_path / "data" / "test" / "0")
    numbers = millionway.evaluate("knn", encoder_file, digit_folder, test_data=tmp_path / "data" / "test")
    assert numbers["knn_20"] > 0.7  # the same images


def test_too_few_images_to_hold_some_out(encoder_file: Path, digit_folder: Path, tmp_path: Path) -> None:
    import shutil

    for name in "01":
        (tmp_path / name).mkdir()
        for path in sorted((digit_folder / name).iterdir())[:2]:
            shutil.copy(path, tmp_path / name)
    with pytest.raises(ValueError, match="needs three images of a class"):
        millionway.evaluate("knn", encoder_file, tmp_path)


def test_labels_stay_with_their_images_when_some_vanish(encoder_file: Path, digit_folder: Path, tmp_path) -> None:
    """Random crops of images that vanish are replaced by others of the batch: with the labels of those."""
    import shutil

    shutil.copytree(digit_folder, tmp_path / "data")
    dataset = open_dataset(str(tmp_path / "data"), max_unreadable=1.0)
    dataset = replace(dataset, store=FileStore(dataset.source, dataset.manifest, 1, max_failed=1.0))
    split = labeled_split(dataset, None, 0)
    assert split is not None
    for instance in split.bank.instance_ids[1::7].tolist():
        (tmp_path / "data" / dataset.manifest.keys[instance]).unlink()
    subject = open_subject(encoder_file, None, None, None, 0)
    asked = Evaluate("linear", encoder_file, str(tmp_path / "data"), augment=True, crop_min=1.0, flip=0.0)
    work = Work("linear", asked, Images.of(asked, 1), subject, 0, torch.device("cpu"))
    work.__dict__["split"] = split
    features, labels = _random_view_features(work, 0)
    assert len(features) == len(labels) == len(split.bank.labels)
    plain, plain_labels = work.features.bank, work.features.bank_labels
    nearest = torch.cdist(features, plain).argmin(dim=1)
    assert (plain_labels[nearest] == labels).float().mean() > 0.97  # a crop of all of the image is the image
