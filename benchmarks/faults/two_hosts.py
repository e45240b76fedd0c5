"""Two machines, one rank each, with a bad network between them: right numbers, or a clear end in time?

The machines are network namespaces with a cable (veth) between them; tc delays, doubles and loses packets, and the
cable is cut for good.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import scene

MUST = "the same bits, or one clear line within twice --timeout"
TIMEOUT = 30  # seconds, of the run
HOSTS = ("a", "b")
BAD = {
    "delayed by 40 ms": "delay 40ms 10ms",
    "10 % doubled": "duplicate 10%",
    "5 % lost": "loss 5%",
    "cut": "",
}


def measure(folder: Path, short: bool) -> dict:
    problem = _why_not()
    if problem:
        return {"result": f"not run: {problem}", "passed": None}
    hosts = {host: f"millionway-{os.getpid()}-{host}" for host in HOSTS}
    words, wrong = [], []
    try:
        _connect(hosts)
        _, reference, _ = _train(folder / "good", hosts, None)
        wanted = scene.bits(folder / "good")
        for name, netem in list(BAD.items())[-1 if short else 0 :]:
            if scene.time_is_up():
                break
            run = folder / name.replace(" ", "_")
            said, codes, seconds = _train(run, hosts, netem)
            if netem:
                right = codes == reference and scene.bits(run) == wanted
                words.append(f"{name}: {'the same bits' if right else 'wrong'}")
            else:
                right = all(codes) and seconds < 2 * TIMEOUT and all(_is_clear(text) for text in said)
                words.append(f"{name}: {'a clear line' if right else 'wrong'} after {seconds:.0f} s")
            wrong += [] if right else [f"{name}: exit codes {codes} after {seconds:.0f} s; {' '.join(said)[-1500:]}"]
    finally:
        for host in hosts.values():
            subprocess.run(["ip", "netns", "delete", host], capture_output=True)
    return {"result": "; ".join(words), "passed": not wrong, "timeout": TIMEOUT, "wrong": wrong}


def _why_not() -> str:
    if not (shutil.which("ip") and shutil.which("tc")):
        return "ip and tc (iproute2) are not there"
    name = f"millionway-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if done.returncode:
        return f"network namespaces are not allowed ({done.stderr.strip()})"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


def _connect(hosts: dict[str, str]) -> None:
    for host in hosts.values():
        subprocess.run(["ip", "netns", "add", host], check=True)
    cable = ["type", "veth", "peer", "name", "cable", "netns", hosts["b"]]
    subprocess.run(["ip", "link", "add", "cable", "netns", hosts["a"], *cable], check=True)
    for number, host in enumerate(hosts.values(), start=1):
        for command in (f"addr add 10.231.7.{number}/24 dev cable", "link set cable up", "link set lo up"):
            subprocess.run(["ip", "-n", host, *command.split()], check=True)


def _train(run: Path, hosts: dict[str, str], netem: str | None) -> tuple[list[str], list[int], float]:
    """(what each rank said, exit codes, seconds from the cut to the end). netem '': the cable is cut amid the steps."""
    for host in hosts.values():
        subprocess.run(["tc", "-n", host, "qdisc", "del", "dev", "cable", "root"], capture_output=True)
        if netem:
            command = ["tc", "-n", host, "qdisc", "add", "dev", "cable", "root", "netem", *netem.split()]
            subprocess.run(command, check=True)
    more = ["--timeout", str(TIMEOUT)] + (["--epochs", "100000", "--save-every", "50"] if netem == "" else [])
    args = ["-m", "millionway", *scene.start(run, scene.QUICK_TO_IMPORT), *more]
    processes, said = [], []
    for rank, host in enumerate(hosts.values()):
        where = ["--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1", "--master-addr=10.231.7.1"]
        command = ["ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run", *where, *args]
        said.append(Path(f"{run}.{rank}.said"))
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "cable"}
        with open(said[-1], "w") as file:
            processes.append(
                subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
            )
    try:
        if netem == "":
            _cut(run, hosts, processes)
        began, ended = time.monotonic(), [0.0, 0.0]
        while any(process.poll() is None for process in processes):
            for rank, path in enumerate(said):
                # torchrun's own goodbye to the other machine takes minutes; the rank's last words are what counts.
                if not ended[rank] and "millionway: " in path.read_text(errors="replace"):
                    ended[rank] = time.monotonic()
            if netem == "" and all(ended):
                break
            if netem == "" and time.monotonic() > began + 4 * TIMEOUT:
                break
            time.sleep(0.2)
    finally:
        codes = [process.poll() for process in processes]
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if netem == "":
            subprocess.run(["ip", "-n", hosts["b"], "link", "set", "cable", "up"], check=True)
    texts = [path.read_text(errors="replace") for path in said]
    return texts, [1 if code is None else code for code in codes], time.monotonic() - began


def _cut(run: Path, hosts: dict[str, str], processes: list[subprocess.Popen]) -> None:
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 20):
        assert all(process.poll() is None for process in processes)
        time.sleep(0.1)
    subprocess.run(["ip", "-n", hosts["b"], "link", "set", "cable", "down"], check=True)


def _is_clear(text: str) -> bool:
    return "millionway: " in text and "Go on with: " in text
