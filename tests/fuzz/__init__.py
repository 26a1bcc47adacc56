"""A differential fuzzer: random trainings by ctl, each beside a plain loop on one device.

An evening of attacks by hand finds what somebody thought of. This package draws trainings instead:
a model, batches, options of the step, and a step at which to pause. Files, in the order of reading:

- `cases.py`: `Case`, one training as JSON, and hypothesis strategies that draw valid ones.
- `models.py`: the model, the data and the optimizer of a case. Both sides build them here.
- `oracle.py`: trains a case without ctl, on the whole global batch, and predicts how ctl ends.
- `trial.py`: trains the case with ctl, and compares.
- `checked.py`: is `ctl.testing.check_step` right about steps that are right, and about mistakes?
- `run.py`: draws cases, judges each in a child process, and counts.
- `kept.json`: cases that failed once, by name. They run in every test run.
- `test_fuzz.py`: drawn cases, always the same, that differ most; and all that were kept.

The verdict on a case is one of these. The oracle predicts which, and any other end is a **bug**:

- **equal**: weights, statistics, slots of the optimizer, averages, counters, loss and metrics are
  those of the oracle, within a tolerance (see below). All replicas have the same bits. If the case
  has a pause, a checkpoint was saved there and restored into new objects, which then ended with the
  bits of the training that went on.
- **refused**: a `UsageError` with the predicted message, at the predicted place.
- **diverged**: a `DivergedError` that names the predicted step.

A case with a checked step is **equal** if `check_step` accepts the right one, or names the mistake.

**The tolerance** follows from the data type. ctl and the oracle sum the same terms in another
order, so their gradients differ by a small multiple of u, the unit roundoff of the type that the
model computes in (2^-24 for float32, 2^-11 for float16, 2^-8 for bfloat16; the loss is float32 even
if the model is float64). What this does to the weights depends on the optimizer: Adam divides by
the gradient's size, and Lion takes its sign. So the oracle measures it. It trains twice more, with
the loss of every example multiplied by 1 + e or 1 - e at random, where e = `NOISE` * u, and with
every gradient moved by e times the largest one; the second time with the opposite signs. A variable
may differ by `MARGIN` times what this has changed, plus the rounding of the variable itself. With
a margin of 4, 2 of 60 cases differed by 1.1 and 1.7 times as much as that, by rounding alone (a
float16 Embedding under Adadelta, a float32 head under Ftrl); what were bugs, by thousands of times.

    python -m tests.fuzz.run --cases=5000 --seed=1     # ends with a table; exit code 1 for bugs
    python -m tests.fuzz.run --case='{"replicas": 2}'  # one case; what is left out is simplest
    python -m tests.fuzz.run --case='{...}' --shrink   # the simplest case with the same bug

A bug is printed as a JSON case and one line. Shrink it, mend the cause, and add it to `kept.json`.
"""
