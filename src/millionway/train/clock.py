"""Where the time of a step goes: data, encoder, classifier."""

import time

import torch

PARTS = ("data", "encoder", "classifier")
MUCH = 0.4  # of the time for data: then the encoder is what waits


class Clock:
    """lap(part) books the time since the last lap. On a GPU it waits for its work, so only some steps are measured."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.is_running = False
        self.last = 0.0

    def start(self, is_running: bool) -> None:
        self.is_running = is_running
        self.last = self._now() if is_running else 0.0

    def lap(self, part: str) -> None:
        """A part that is none of PARTS is not counted."""
        if self.is_running:
            now = self._now()
            if part in self.seconds:
                self.seconds[part] += now - self.last
            self.last = now

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def shares(self) -> dict[str, float]:
        """Of the time measured since the last call; empty if there was none."""
        total, seconds = sum(self.seconds.values()), self.seconds
        self.seconds = dict.fromkeys(PARTS, 0.0)
        return {part: value / total for part, value in seconds.items()} if total > 0 else {}
