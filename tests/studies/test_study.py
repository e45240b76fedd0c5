import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import millionway
from millionway import randomness
from millionway.cli import main
from millionway.data.batches import plain_batches, view_batches
from millionway.data.dataset import open_dataset
from millionway.parallel.group import Group
from millionway.settings.presets import preset
from millionway.settings.pretrain import with_settings
from millionway.studies import markdown
from millionway.studies.grids import STUDIES, Setting, cell
from millionway.studies.similarity import prior_similarity
from millionway.studies.study import PAPER_LOSS, _compare_base, _table
from millionway.train.setup import build, resolve

SET = {"batch_size": 64, "image_size": 16}
SMALL = {"data": "digits", "preset": "digits", "max_images": 300, "seeds": (1,), "epochs": (1,), "set": SET}


def test_the_grids_are_the_papers() -> None:
    at = Setting(1_281_167, (200,))
    papers = {name: [each.paper for each in study.cells(at)] for name, study in STUDIES.items()}
    assert papers["components"] == [58.6, 67.3, 67.6, 68.2]
    assert papers["sampling"] == [64.8, 65.3, 65.4, 65.5, 67.3]
    assert papers["smoothing"][:6] == [67.6, 67.7, 68.2, 67.5, 68.0, 67.9]
    sampled = [each.settings["classes_per_step"] for each in STUDIES["sampling"].cells(at)]
    assert sampled == [2**10, 2**12, 2**14, 2**16, None]
    small = [each.settings["classes_per_step"] for each in STUDIES["sampling"].cells(Setting(10_000, (10,)))]
    assert small == [8, 32, 128, 512, None]


def test_studies_share_runs() -> None:
    at = Setting(10_000, (10,))
    labels = {name: {each.label for each in study.cells(at)} for name, study in STUDIES.items()}
    assert labels["instance-vs-semantic"] < labels["components"]
    assert len(labels["components"] & labels["initialization"]) == 2
    assert labels["sampling"] & labels["components"] and labels["smoothing"] & labels["components"]
    assert cell("", 5, lr=0.1).label != cell("", 5, lr=0.2).label


@pytest.mark.slow
def test_a_study_runs_writes_and_does_not_run_twice(tmp_path: Path) -> None:
    table = millionway.study("components", out=tmp_path, jobs=2, **SMALL)
    text = table.read_text()
    assert all(row in text for row in ("MLP head + prior + smoothing", "linear head + prior + smoothing", "68.2"))
    assert (tmp_path / "components.svg").read_text().startswith("<?xml")
    cells = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").glob("*.json")}
    assert len(cells) == 4
    numbers = json.loads(next(iter(cells)).read_text())
    assert 0 < numbers["knn_200"] <= 1 and [point["epoch"] for point in numbers["curve"]] == [0, 1]
    assert not [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]

    millionway.study("instance-vs-semantic", out=tmp_path, **SMALL)
    millionway.study("components", out=tmp_path, **SMALL)
    assert cells == {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").glob("*.json")}
    assert "correlation" in (tmp_path / "instance-vs-semantic.md").read_text()
    again = millionway.study("components", out=tmp_path, cells=["MLP head"], **SMALL)
    assert again.read_text() == text  # a row that was not asked for stays
    with pytest.raises(ValueError, match=r"other settings: --lr was 0\.06, now 0\.5"):
        millionway.study("components", out=tmp_path, **{**SMALL, "set": {**SET, "lr": 0.5}})


@pytest.mark.slow
def test_an_interrupted_study_goes_on(tmp_path: Path) -> None:
    arguments = ["study", "instance-vs-semantic", "--preset", "digits", "--out", str(tmp_path), "--seeds", "1"]
    arguments += ["--epochs", "3", "--max-images", "640", "--set", "batch_size=64"]
    process = subprocess.Popen(
        [sys.executable, "-m", "millionway", *arguments], stderr=subprocess.PIPE, start_new_session=True
    )
    run = tmp_path / "runs" / "e3_mlp_random_plain_full_s1"
    while process.poll() is None and '"step": 10,' not in _text(run / "metrics.jsonl"):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130, said
    assert list((run / "checkpoints").glob("step_*"))
    assert not list((tmp_path / "cells").glob("*.json"))
    assert main(arguments) == 0
    assert "going on from" in (tmp_path / "runs" / f"{run.name}.log").read_text()
    assert len(list((tmp_path / "cells").glob("*.json"))) == 2


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_similarity_of_rows_before_training(tmp_path: Path) -> None:
    table = millionway.study("prior-similarity", out=tmp_path, **SMALL)
    numbers = json.loads((tmp_path / "prior-similarity.json").read_text())["numbers"]
    for prior in ("fixed-bn", "batch-bn", "running-bn"):
        assert numbers[prior]["1"]["gap"] > 0.0
        assert numbers[prior]["1"]["retrieval"] > 3 * numbers[prior]["1"]["retrieval_by_chance"]
    assert abs(numbers["random"]["1"]["gap"]) < 0.05
    assert numbers["random"]["1"]["retrieval"] < 2 * numbers["random"]["1"]["retrieval_by_chance"]
    assert numbers["batch-bn"]["1"]["gap"] > 2 * numbers["fixed-bn"]["1"]["gap"]
    assert "| running-bn |" in table.read_text()


def test_cosines_are_those_of_all_pairs() -> None:
    from millionway.studies.similarity import _Cosines

    g = torch.Generator().manual_seed(0)
    rows, x = torch.randn(50, 8, generator=g), torch.randn(20, 8, generator=g)
    ids = torch.randperm(50, generator=g)[:20]
    cosines = _Cosines(torch.cat([rows, torch.randn(3, 8)]), torch.arange(50))  # the last three are nobody's
    for part in (slice(0, 7), slice(7, 20)):
        cosines.add(x[part], ids[part])
    every = torch.nn.functional.cosine_similarity(x[:, None], rows[None], dim=2)
    own = torch.zeros_like(every, dtype=torch.bool)
    own[torch.arange(20), ids] = True
    assert cosines.means()["intra"] == pytest.approx(float(every[own].mean()), abs=1e-6)
    assert cosines.means()["inter"] == pytest.approx(float(every[~own].mean()), abs=1e-6)


def test_what_is_undecided_is_called_so() -> None:
    better = {1: 0.52, 2: 0.53, 3: 0.51}
    worse = {1: 0.42, 2: 0.425, 3: 0.415}
    assert markdown.difference(better, worse).startswith("+10.0 ±")
    assert "undecided" not in markdown.difference(better, worse)
    assert "undecided" in markdown.difference(better, {1: 0.50, 2: 0.54, 3: 0.50})
    assert "undecided" in markdown.difference({1: 0.9}, {1: 0.1})
    assert markdown.mean_and_spread([0.5, 0.52]) == "51.0 ± 1.4"
    points = [{"instance_top1": x, "knn_200": 2 * x} for x in (0.1, 0.2, 0.4)]
    assert markdown.correlation(points) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["componants", "--preset", "digits"], "no such study. Did you mean 'components'"),
        (["components", "--preset", "digits", "--seeds", "1", "1"], "--seeds must be different"),
        (["components", "--preset", "digits", "--jobs", "0"], "--jobs must be positive"),
        (["components"], "--data is missing"),
        (["components", "--preset", "digits", "--set", "lr"], "write NAME=VALUE"),
        (["components", "--preset", "digits", "--set", "lrr=1"], "no setting is called 'lrr'"),
        (
            ["smoothing", "--preset", "digits", "--max-images", "2", "--set", "batch_size=2"],
            "must be smaller than the number",
        ),
        (["sampling", "--preset", "digits", "--max-images", "128"], "more than there are, 128"),
        (["components", "--preset", "digits", "--epochs"], "--epochs must be different"),
        (["components", "--preset", "digits", "--set", "epochs=3"], "use --epochs"),
        (["components", "--preset", "digits", "--set", "prior=random"], "the study itself chooses it"),
        (["components", "--preset", "digits", "--set", "lr=abc"], "--lr cannot be 'abc'"),
        (["components", "--preset", "digits", "--set", "mean=3"], "--mean cannot be 3"),
        (["components", "--preset", "digits", "--cells", "MLP heat"], "no such row. Did you mean 'MLP head'"),
        (["prior-similarity", "--preset", "digits", "--cells", "random"], "no such row. It always measures all"),
    ],
)
def test_bad_input_is_named_before_any_training(arguments: list[str], message: str, tmp_path: Path, capsys) -> None:
    assert main(["study", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_data_without_labels_is_refused(tmp_path: Path, digit_folder: Path, capsys) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text("\n".join(str(path) for path in sorted(digit_folder.rglob("*.png"))))

    def refused(data: Path, *more: str) -> str:
        assert main(["study", "components", "--data", str(data), "--out", str(tmp_path / "out"), *more]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "has no labels" in refused(listed)
    assert "has no labels" in refused(digit_folder, "--test-data", str(listed))
    shutil.copytree(digit_folder, tmp_path / "train")
    shutil.rmtree(tmp_path / "train" / "3")
    message = refused(tmp_path / "train", "--test-data", str(digit_folder))
    assert "1 of its classes" in message and "have no training image (3)" in message


def test_grids_of_few_images_have_no_row_twice() -> None:
    for study in STUDIES.values():
        labels = [cell.label for cell in study.cells(Setting(300, (2,)))]
        assert len(set(labels)) == len(labels)


def test_a_table_of_the_reference_alone_has_no_differences() -> None:
    cells = [each for each in STUDIES["sampling"].cells(Setting(10_000, (10,))) if each.name == "all classes"]
    results = {1: {"curve": [], "knn_200": 0.4, "linear_top1": 0.5}}
    table = _table("sampling", cells, {"all classes": results}, (10,))
    assert "| all classes | 40.0 | 50.0 | 67.3 |" in table and "difference" not in table


def test_a_folder_without_runs_takes_other_settings(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):  # nothing was run with the first
        _compare_base(tmp_path / "base.json", with_settings(preset("digits"), lr=lr))
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "one.json").write_text("{}")
    with pytest.raises(ValueError, match=r"--lr was 0\.2, now 0\.3"):
        _compare_base(tmp_path / "base.json", with_settings(preset("digits"), lr=0.3))
    # A preset is its values, and runs have epochs of their own.
    _compare_base(tmp_path / "base.json", with_settings(preset("digits"), lr=0.2, preset=None, epochs=3))


def test_a_folder_from_before_views_could_be_small_at_first_goes_on(tmp_path: Path) -> None:
    config, base = with_settings(preset("digits"), **PAPER_LOSS), tmp_path / "base.json"
    _compare_base(base, config)
    stored = json.loads(base.read_text())
    assert stored.pop("first_size") == "full" and stored["precision"] == "float32"
    base.write_text(json.dumps(stored))
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "one.json").write_text("{}")
    _compare_base(base, config)
    with pytest.raises(ValueError, match=r"--first-size was full, now 12"):
        _compare_base(base, with_settings(config, first_size=12))


def test_the_same_numbers_make_the_same_picture(tmp_path: Path) -> None:
    curve = [{"epoch": epoch, "knn_200": 0.3 + epoch / 10, "instance_top1": 0.1} for epoch in (0, 1)]
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in pictures:
        markdown.draw("components", "Which?", {"row": {1: {"curve": curve}}}, path)
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_pairs_are_rows_of_their_study() -> None:
    for study in STUDIES.values():
        names = [cell.name for cell in study.cells(Setting(10_000, (10,)))]
        assert {name for pair in study.pairs for name in pair} <= set(names)
        assert not study.reference or study.reference in names


def test_runs_of_different_length_are_compared_with_their_own_kind() -> None:
    def result(value: float) -> dict:
        curve = [{"epoch": 1, "knn_200": value, "instance_top1": 0.1}]
        return {"curve": curve, "knn_200": value, "linear_top1": value}

    cells = STUDIES["initialization"].cells(Setting(10_000, (1, 10)))
    base = {cell.name: (0.2 if ", 1 epochs" in cell.name else 0.3) for cell in cells}
    numbers = {
        name: {seed: result(value + 0.001 * seed + (0.05 if "batch-bn" in name else 0)) for seed in (1, 2, 3)}
        for name, value in base.items()
    }
    table = _table("initialization", cells, numbers, (1, 10))
    for epochs in (1, 10):
        (line,) = [
            line for line in table.splitlines() if line.startswith(f"| batch-bn, {epochs} epochs - random, {epochs} ")
        ]
        assert line.count("+5.0 ± 0.0") == 3


def test_views_of_fixed_bn_see_its_initial_statistics() -> None:
    config = with_settings(preset("digits"), max_images=300, batch_size=32, seed=1)
    dataset, cpu = open_dataset("digits", max_images=300), torch.device("cpu")
    numbers = prior_similarity(config, dataset, "fixed-bn", cpu, lambda items, total, what: items)
    resolved = resolve(config, dataset, cpu, Group.current())
    network = build(resolved, dataset, cpu, Group.current())[0].network.eval()
    size, views = resolved.images.image_size, resolved.augmentation.of_a_view
    assert size is not None
    ids = dataset.instance_ids
    keys = [randomness.key_of(1, "view", 0, 0)]
    with torch.no_grad():
        ((plain, order),) = plain_batches(dataset.store, ids, size, 300, cpu)
        ((random, also),) = view_batches(dataset.store, [(keys, ids)], size, cpu, **views)
        rows, seen = (torch.nn.functional.normalize(network(images)) for images in (plain, random))
    assert torch.equal(order, also)
    assert numbers["intra"] == pytest.approx(float((rows * seen).sum(dim=1).mean()), abs=0.005)  # a batch is filled up
    assert numbers["intra_training"] != pytest.approx(numbers["intra"], abs=0.02)


@pytest.mark.slow
def test_what_is_finished_is_written_though_a_run_fails(tmp_path: Path) -> None:
    """Also without a commit, as from a wheel."""
    millionway.study("components", out=tmp_path, cells=["MLP head"], **SMALL)
    for path in (tmp_path / "cells").iterdir():
        stored = json.loads(path.read_text())
        path.write_text(json.dumps({**stored, "environment": {**stored["environment"], "commit": None}}))
    blocked = tmp_path / "runs" / "e1_mlp_running-bn_plain_full_s1"
    blocked.parent.mkdir(exist_ok=True)
    blocked.write_text("in the way")
    with pytest.raises(RuntimeError, match=r"1 of 2 runs failed"):
        millionway.study("components", out=tmp_path, cells=["MLP head", "MLP head + prior"], **SMALL)
    assert "| MLP head |" in (tmp_path / "components.md").read_text()


@pytest.mark.slow
def test_a_failing_run_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"2 of 2 runs failed.*lower --lr"):
        millionway.study("instance-vs-semantic", out=tmp_path, **{**SMALL, "set": {**SET, "lr": 1e20, "row_lr": 1e18}})


def test_the_study_of_views_takes_as_many_in_all_and_in_a_step() -> None:
    cells = STUDIES["views"].cells(Setting(10_000, (10,), batch_size=64))
    assert [cell.name for cell in cells] == ["1 view", "2 views", "4 views"]
    settings = [cell.settings for cell in cells]
    assert {each["views"] * each["epochs"] for each in settings} == {20}
    assert {each["views"] * each["batch_size"] for each in settings} == {128}
    # An odd number of views cannot be shared out by four.
    assert [cell.name for cell in STUDIES["views"].cells(Setting(10_000, (5,), batch_size=64))] == ["1 view", "2 views"]


def test_rows_of_different_numbers_of_views_share_an_axis(tmp_path: Path) -> None:
    numbers = {
        f"{num}": {1: {"settings": {"views": num}, "curve": [{"epoch": 4 // num, "knn_200": 0.3}]}} for num in (1, 2)
    }
    markdown.draw("views", "How many?", numbers, tmp_path / "views.svg")
    markdown.draw("views", "How many?", {"2": numbers["2"]}, tmp_path / "epochs.svg")
    assert (tmp_path / "views.svg").read_bytes() != (tmp_path / "epochs.svg").read_bytes()


@pytest.mark.slow
def test_the_study_of_views_runs(tmp_path: Path) -> None:
    millionway.study("views", out=tmp_path, cells=("1 view", "2 views"), **SMALL)
    text = (tmp_path / "views.md").read_text()
    assert "| 1 view - 2 views | undecided (one seed) | undecided (one seed) |" in text and "paper" not in text
    with pytest.raises(ValueError, match=r"--set views: the study itself chooses it"):
        millionway.study("views", out=tmp_path, **{**SMALL, "set": {**SET, "views": 4}})
