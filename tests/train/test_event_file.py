import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from millionway.train.event_file import EventFile


def read(folder) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_it_and_forgets_what_was_taken_back(tmp_path) -> None:
    first = EventFile(tmp_path)
    for step in range(1, 5):
        first.add_scalar("step/loss", 0.5 * step, step)
    first.close()
    assert read(tmp_path) == {"step/loss": [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]}
    for _ in range(12):  # starts that came to nothing
        EventFile(tmp_path).close()
    second = EventFile(tmp_path, purge_step=3)
    second.add_scalar("step/loss", 9.0, 3)
    second.add_scalar("evaluation/knn_20", 0.25, 3)
    second.flush()
    assert read(tmp_path) == {"step/loss": [(1, 0.5), (2, 1.0), (3, 9.0)], "evaluation/knn_20": [(3, 0.25)]}
    second.close()


def test_a_full_disk_is_told_to_who_writes(tmp_path) -> None:
    (tmp_path / "full").mkdir()
    events = EventFile(tmp_path / "full")
    events.file.close()
    events.file = open("/dev/full", "wb")  # noqa: SIM115
    events.records._writer = events.file
    events.add_scalar("step/loss", 1.0, 1)
    with pytest.raises(OSError, match="No space left"):
        events.flush()
    with pytest.raises(OSError, match="No space left"):
        events.close()
