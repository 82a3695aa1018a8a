"""One worker process of `gctutor.distributed.run_workers`, started by torchrun: runs the job and leaves its result.

`python -m gctutor.distributed_worker FOLDER` reads `FOLDER/job.json` and writes `FOLDER/rankN.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    """Run the job of `folder` as the rank that the environment says, and write its result or its error."""
    rank = os.environ["RANK"]
    (folder / f"rank{rank}.pid").write_text(str(os.getpid()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer = folder / f"rank{rank}.json"
    try:
        job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        with process_group():
            _write(answer, {"result": _function(job)(**job["arguments"])})
    except BaseException as error:
        _write(answer, {"error": f"{type(error).__name__}: {error}", "at": time.time()})
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a clean exit could wait for the other workers


def _end_with_parent() -> None:
    """End this process when the one that started the workers closes their common standard input, or dies."""
    os.read(0, 1)
    os._exit(1)


def _function(job: dict[str, Any]) -> Any:
    space: dict[str, Any] = {"__name__": "job"}
    exec(compile(job["source"], "job", "exec"), space)
    return space[job["name"]]


def _write(path: Path, answer: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(answer), encoding="utf-8")
    part.replace(path)


def local_device() -> str:
    """The device of this worker: a GPU of its own where the machine has one for each worker, else `cpu`."""
    import torch

    enough = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if enough else "cpu"


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """torchrun's process group for the block: NCCL on GPUs, gloo on a CPU."""
    import torch
    import torch.distributed as dist

    device = local_device()
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    try:
        yield
    finally:
        if sys.exc_info()[0] is None:
            dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
