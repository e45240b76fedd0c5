import torch
from hypothesis import given
from hypothesis import strategies as st

from millionway import randomness
from millionway.data.sampler import Sampler


@given(num=st.integers(2, 200), batch=st.integers(1, 50), seed=st.integers(0, 99), epoch=st.integers(0, 3))
def test_every_instance_at_most_once_per_epoch(num: int, batch: int, seed: int, epoch: int) -> None:
    ids = torch.arange(0, 3 * num, 3)
    sampler = Sampler(ids, min(batch, num), seed)
    steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
    visited = torch.cat([sampler.batch(step) for step in steps])
    assert len(set(visited.tolist())) == len(visited) and set(visited.tolist()) <= set(ids.tolist())
    assert num - len(visited) < sampler.batch_size
    # A new sampler asked for one step alone says the same.
    assert torch.equal(Sampler(ids, min(batch, num), seed).batch(steps[-1]), sampler.batch(steps[-1]))


def test_epochs_and_seeds_differ() -> None:
    ids = torch.arange(100)
    first, second = Sampler(ids, 100, 0), Sampler(ids, 100, 1)
    assert not torch.equal(first.batch(0), first.batch(1))
    assert not torch.equal(first.batch(0), second.batch(0))


def test_numbers_are_a_function_of_their_counters() -> None:
    key = randomness.key_of(0, "view", 3, 1)
    ids = torch.tensor([5, 900, 5])
    u = randomness.uniform(key, ids, 4)
    assert torch.equal(u[0], u[2]) and torch.equal(u[1], randomness.uniform(key, torch.tensor([900]), 7)[0, :4])
    assert key != randomness.key_of(0, "view", 31, 1) != randomness.key_of(0, "view", 3, 11)


def test_numbers_are_uniform_and_independent() -> None:
    u = randomness.uniform(randomness.key_of(1, "test"), torch.arange(20_000), 5)
    assert float(u.min()) >= 0 and float(u.max()) < 1
    assert torch.allclose(u.mean(0), torch.full((5,), 0.5), atol=0.01)
    assert torch.allclose(u.var(0), torch.full((5,), 1 / 12), atol=0.003)
    correlation = torch.corrcoef(torch.cat([u[:-1].T, u[1:].T]))
    assert float((correlation - torch.eye(10)).abs().max()) < 0.03
    n = randomness.normal(randomness.key_of(1, "test"), torch.arange(20_000), 3)
    assert abs(float(n.mean())) < 0.01 and abs(float(n.std()) - 1) < 0.01 and abs(float((n**4).mean()) - 3) < 0.1
