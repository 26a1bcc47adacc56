"""Two real workers go on where one process was, with files of several kinds."""

from __future__ import annotations

import numpy as np
import sources_worker
import stored_sources
from paths import SUPPORT
from sources_worker import leaves_read, streams
from worker_jobs import run_job


def test_two_workers_go_on_with_what_one_began(job, mirrored, tmp_path):
    """In the middle of an epoch, and over its end; and in an evaluation, whose last batch leaves
    one worker without examples. Together they read each example once, and what one process reads.
    """
    root = tmp_path / "data"
    root.mkdir()
    stored_sources.write(root)
    run_job(job, tmp_path, str(root), program=SUPPORT / "sources_worker.py")
    for name, dataset, start, end in streams(root):
        first, second = (
            list(np.load(tmp_path / f"{name} {index}.npz").values()) for index in (0, 1)
        )
        whole = leaves_read(mirrored(1), dataset, 0, end)
        whole = [leaf[start * dataset.global_batch_size :] for leaf in whole]
        both = [np.concatenate(pair) for pair in zip(first, second, strict=True)]
        keys = both[0]
        assert len({tuple(key) for key in keys.tolist()}) == len(keys) == len(whole[0]), name
        rows, wanted_rows = (np.lexsort(of[:, ::-1].T) for of in (keys, whole[0]))
        for found, wanted in zip(both, whole, strict=True):
            wanted = wanted.astype("S") if wanted.dtype == object else wanted
            np.testing.assert_array_equal(found[rows], wanted[wanted_rows], err_msg=name)
        size = -(-dataset.global_batch_size // 2)
        np.testing.assert_array_equal(first[0][:size], whole[0][:size], err_msg=name)
        np.testing.assert_array_equal(second[0][: size - 1], whole[0][size:][: size - 1])
    assert sources_worker.START * 8 < stored_sources.COUNT < sources_worker.END * 8
