"""How the program of a worker ends after an error of ctl: one line, and its exit code at once. A
collective that the watchdog would not end is an error, too."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tensorflow.python.eager import context, execute
from tensorflow.python.ops import gen_collective_ops

from ctl.distributed.watch import watchdog
from ctl.errors import CtlError
from ctl.phases import apply


def run_to_end(main: Callable[[], None]) -> None:
    """Calls ``main``. XLA compiles the update if an argument of the program is ``compiled=1``."""
    if "compiled=1" not in sys.argv:  # as in the process of the tests, see ctl_fixtures.py
        apply.is_compiled = lambda device: False
    try:
        with collectives_refused():
            main()
    except CtlError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(error.exit_code)


@contextlib.contextmanager
def collectives_refused() -> Iterator[None]:
    """While inside, raises AssertionError where a collective is launched while the watchdog runs
    and the main thread is in no section with a limit: an operation, or a function that has one."""
    with contextlib.ExitStack() as stack:
        for name in dir(gen_collective_ops):
            if name.startswith("collective_"):
                _hook(stack, gen_collective_ops, name, lambda *_: context.executing_eagerly())
        for name in ("execute", "execute_with_cancellation"):
            _hook(stack, execute, name, lambda name, *_: _has_collective(name))
        yield


def _hook(stack: contextlib.ExitStack, module: Any, name: str, launches: Callable) -> None:
    function = getattr(module, name)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if (running := watchdog._watchdog) and launches(*args):
            section = running._sections[-1]
            assert section.limit is not None, f"a collective without a limit, in {section.doing}"
        return function(*args, **kwargs)

    setattr(module, name, checked)
    stack.callback(setattr, module, name, function)


@functools.cache
def _has_collective(name: str) -> bool:
    """Whether ``name`` is a function that has a collective, or calls one that has."""
    if not context.context().has_function(name):
        return False
    for node in context.get_function_def(name).node_def:
        called = [f.name for a in node.attr.values() for f in (a.func, *a.list.func) if f.name]
        if node.op.startswith("Collective") or any(map(_has_collective, [node.op, *called])):
            return True
    return False
