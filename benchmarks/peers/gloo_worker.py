"""A worker that all-reduces with PyTorch's gloo over loopback, to compare.

Started by `all_reduce.py` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from lines import serve


def build() -> tuple[dict[str, Any], Any]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        why = f"PyTorch is not installed ({error}): pip install 'ctl[bench]'"
        return {"unavailable": why}, None
    dtype = getattr(torch, sys.argv[1], None)
    if dtype is None:
        return {"unavailable": f"PyTorch has no {sys.argv[1]}"}, None
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, replicas = dist.get_rank(), dist.get_world_size()

    def run(size: int, iterations: int) -> dict[str, Any]:
        pattern = (torch.arange(max(1, size // dtype.itemsize)) % 7).to(dtype)
        times: dict[str, Any] = {"ready": [], "done": [], "call": [], "wrong": 0}
        for iteration in range(iterations):
            mine = pattern + iteration % 5 + rank
            times["ready"].append(time.time())
            start = time.perf_counter()
            dist.all_reduce(mine)
            times["done"].append(times["ready"][-1] + time.perf_counter() - start)
            times["call"].append(0.0)
            right = (pattern + iteration % 5) * replicas + sum(range(replicas))
            times["wrong"] += int((mine != right).sum())
        return times

    return {"replicas": replicas, "device": f"torch {torch.__version__}"}, run


if __name__ == "__main__":
    serve(build)
