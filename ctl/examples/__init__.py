"""Programs to begin with: one short file each, without flags."""

import ctl

ctl.logs.console.load_tensorflow(errors=False)  # without what its C++ code writes at the start
