"""Does this tree compute the same bits as an earlier commit?

    python benchmarks/same_bits.py --base REV

A fixed small run (digits, 3 epochs, one process and two under torchrun) with the code of REV and with the code here,
on this machine. Losses of all logged steps and all tensors of encoder.safetensors must be the same, bit for bit. Bits
depend on the processor and the versions of libraries, so both sides are run; those of REV are kept for the next time.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUN = ["--preset", "digits", "--epochs", "3", "--threads", "1", "--log-every", "1", "--eval-every", "3"]


def bits_of_run(source: Path, num_ranks: int, folder: Path) -> dict[str, str]:
    """Hashes of losses and of the encoder's tensors after the run with the package in `source`."""
    from safetensors import safe_open

    out = folder / f"ranks-{num_ranks}"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"] if num_ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "millionway", "pretrain", *RUN, "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["loss"].hex()) for line in lines if "loss" in line]
    assert losses, "the run logged no loss"
    weights = hashlib.sha256()
    with safe_open(out / "encoder.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return {"losses": hashlib.sha256(json.dumps(losses).encode()).hexdigest(), "encoder": weights.hexdigest()}


def bits(source: Path) -> dict[str, dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        return {f"{num} ranks": bits_of_run(source, num, Path(folder)) for num in (1, 2)}


def bits_of_commit(revision: str, keep: Path) -> dict[str, dict[str, str]]:
    command = ["git", "-C", str(ROOT), "rev-parse", revision]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    kept = keep / f"{commit}.json"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(
                ["git", "-C", str(ROOT), "archive", commit, "src"], check=True, capture_output=True
            ).stdout
            subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
            found = bits(Path(folder) / "src")
        keep.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found, indent=1) + "\n")
    return json.loads(kept.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", help="the commit to compare with")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "millionway-same-bits")
    chosen = parser.parse_args()
    then, now = bits_of_commit(chosen.base, chosen.keep), bits(ROOT / "src")
    for ranks, hashes in now.items():
        for what, hash in hashes.items():
            print(f"{ranks}, {what}: {'same' if hash == then[ranks][what] else 'DIFFERENT'} {hash[:16]}")
    sys.exit(now != then)


if __name__ == "__main__":
    main()
