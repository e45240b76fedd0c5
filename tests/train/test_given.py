"""What leaves a run that began with given weights is the mean of these and of those that were learned."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import millionway
from millionway.model.encoder import Encoder, EncoderSpec, build_encoder
from millionway.model.encoder_file import START, load_encoder, save_encoder
from millionway.train.given import Given
from millionway.train.loop import Loop
from millionway.train.stops import RunStopped

SETTINGS = {"batch_size": 40, "image_size": 16, "threads": 1, "labels": "none", "keep": 99, "epochs": 3}


def encoder(seed: int) -> Encoder:
    return build_encoder(EncoderSpec("narrow-resnet", "small", 16, (0.5,) * 3, (0.5,) * 3), seed=seed)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_encoder(encoder(5), tmp_path / "given.safetensors")
    return tmp_path / "given.safetensors"


def test_an_encoder_is_the_mean_for_a_while_and_then_itself_to_the_bit() -> None:
    first, now = encoder(1).state_dict(), encoder(2)
    learned = {name: each.clone() for name, each in now.state_dict().items()}
    with Given.of(encoder(1), 0.25).mean_with(now):
        for name, each in now.state_dict().items():
            if each.is_floating_point():
                assert torch.allclose(each, 0.25 * first[name] + 0.75 * learned[name], atol=1e-6)
    assert all(each.equal(learned[name]) for name, each in now.state_dict().items())
    with pytest.raises(RuntimeError, match="in the middle"), Given.of(encoder(1), 0.25).mean_with(now):
        raise RuntimeError("in the middle")
    assert all(each.equal(learned[name]) for name, each in now.state_dict().items())


def test_training_does_not_see_the_mean_and_what_leaves_is_it(
    digit_folder: Path, weights: Path, tmp_path: Path
) -> None:
    runs = {
        share: millionway.pretrain(
            digit_folder, tmp_path / str(share), init_from=weights, given_share=share, **SETTINGS
        )
        for share in (0.0, 0.4)
    }
    ends = [load_file(run / "checkpoints" / "step_00000009" / "model.safetensors") for run in runs.values()]
    assert all(each.equal(ends[1][name]) for name, each in ends[0].items())
    given, learned, left = (load_encoder(each).state_dict() for each in (weights, runs[0.0], runs[0.4]))
    moved = [name for name, each in given.items() if not each.equal(learned[name])]
    assert "backbone.conv1.weight" in moved
    for name in moved:
        assert torch.allclose(left[name], 0.4 * given[name] + 0.6 * learned[name], atol=1e-6)
    assert not (runs[0.0] / START).exists()


def test_a_run_that_is_gone_on_with_needs_the_given_file_no_more(
    digit_folder: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = millionway.pretrain(digit_folder, tmp_path / "whole", init_from=weights, **SETTINGS)
    step = Loop._step

    def stop(self, *args):
        if self.state.step == 7:
            raise RunStopped("enough")
        return step(self, *args)

    with monkeypatch.context() as patch, pytest.raises(RunStopped, match="enough"):
        patch.setattr(Loop, "_step", stop)
        millionway.pretrain(digit_folder, tmp_path / "run", init_from=weights, save_every=1, **SETTINGS)
    weights.unlink()
    run = millionway.pretrain(out=tmp_path / "run", resume=True)
    assert (run / "encoder.safetensors").read_bytes() == (whole / "encoder.safetensors").read_bytes()
    (run / START).write_bytes(b"rubbish")
    with pytest.raises(ValueError, match=r"start\.safetensors.*not a safetensors file"):
        millionway.pretrain(out=run, resume=True, epochs=4)
    save_encoder(build_encoder(EncoderSpec("torchvision/resnet18", "small", 16, (0.5,) * 3, (0.5,) * 3)), run / START)
    with pytest.raises(ValueError, match=r"start\.safetensors.*conv1\.weight is not as this run's encoder has it"):
        millionway.pretrain(out=run, resume=True, epochs=4)


def test_a_share_of_nothing_is_refused(digit_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--given-share 0\.5 is a share of given weights: it needs --init-from"):
        millionway.pretrain(digit_folder, tmp_path / "run", given_share=0.5, **SETTINGS)
    assert not (tmp_path / "run").exists()
