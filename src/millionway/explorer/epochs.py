"""How the images come apart while a run trains: a map for each evaluation, from features that the run has saved."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from millionway.collection.neighbors import nearest
from millionway.collection.places import places
from millionway.evaluation.snapshots import Snapshot, read_snapshot, snapshot_epochs


@dataclass
class Epochs:
    run: Path
    place_of: dict[int, int]
    """instance id -> place in the collection"""
    num_threads: int
    made: dict[int, np.ndarray] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def known(self) -> list[int]:
        return snapshot_epochs(self.run)

    def get(self, epoch: int) -> bytes | None:
        """int32 [images] places in the collection, then float32 [images, 2]; None if there is no such epoch.

        Each map starts from the one before, so that an image moves no further than it must.
        """
        epochs = self.known()
        if epoch not in epochs:
            return None
        with self.lock:  # two tabs ask for the same
            for each in [each for each in epochs if each <= epoch]:
                if each not in self.made:
                    self.made[each] = self._place(read_snapshot(self.run, each), each)
        snapshot = read_snapshot(self.run, epoch)
        here = np.array([self.place_of.get(i, -1) for i in snapshot.ids.tolist()], "<i4")
        found = self.made[epoch][here >= 0].astype("<f4")
        return here[here >= 0].tobytes() + found.tobytes()

    def _place(self, snapshot: Snapshot, epoch: int) -> np.ndarray:
        unit = F.normalize(snapshot.features.float())
        before = [each for each in self.made if each < epoch and len(self.made[each]) == len(unit)]
        torch.set_num_threads(self.num_threads)
        return places(unit, nearest(unit), self.num_threads, self.made[max(before)] if before else None)
