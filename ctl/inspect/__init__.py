"""Sees through the all-reduce: what moves, how long it takes, who is late, where it hangs.

Nothing in ``ctl`` needs this package to train: it looks at the loop, the step and the graph from
outside, and through one hook, ``TrainStep.marks``, which is None when nobody looks.
"""
