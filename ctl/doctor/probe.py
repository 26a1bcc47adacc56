"""The program that says what TensorFlow sees of this machine, and how fast the machine is."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version

from ctl.base import __version__, console
from ctl.doctor.report import PACKAGES


def main() -> None:
    """Prints a line of JSON, which `ctl.doctor.machine.Probe` describes."""
    console.load_tensorflow()
    import tensorflow as tf

    from ctl.base.peak import copied_bytes, peak_flops

    gpus = tf.config.list_physical_devices("GPU")
    names = [tf.config.experimental.get_device_details(gpu).get("device_name", "?") for gpu in gpus]
    versions = {"ctl": __version__, "python": platform.python_version()}
    facts = {
        "versions": versions | {name: version(name) for name in PACKAGES},
        "gpus": names,
        "cuda": tf.test.is_built_with_cuda(),
        "copied": copied_bytes() / 1e9,
        "gflops": peak_flops() / 1e9,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
