"""A detector that is trained on real photos. Half an hour on 2 cores; MILLIONWAY_BCCD names the folder of photos."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.long
@pytest.mark.skipif("MILLIONWAY_BCCD" not in os.environ, reason="MILLIONWAY_BCCD names no folder")
def test_a_trained_detector_beats_an_untrained_one(tmp_path: Path) -> None:
    out = tmp_path / "detection.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "detection.py"), "--bccd", os.environ["MILLIONWAY_BCCD"]]
    subprocess.run([*command, "--out", str(out)], check=True)
    rows = json.loads(out.read_text())["rows"]
    assert rows["trained"]["AP50"] > rows["untrained"]["AP50"] + 0.20
    for row in rows.values():
        assert row["by_hand"]["AP"] == pytest.approx(row["AP"], abs=1e-9)
