"""Do jobs survive what may happen to them? Random faults, and what must hold after each.

A schedule is a list of attempts of the same job: real processes of 1 to 4 workers, or with
parameter servers. Faults come at random moments in each attempt but the last, which must finish.
README.md says which faults there are, what is checked, and what was found. Files, in the order of
reading:

- `draw.py`: `Schedule` and `Fault` as JSON, drawn from a seed.
- `job.py`: what each task of the job runs.
- `attempt.py`: starts the tasks of an attempt, disturbs them, and notes what happens.
- `judge.py`: what must hold after an attempt, by what the pages of ctl promise.
- `run.py`: the command.
- `elastic.py`: another command: does a job go on without the workers that it loses?
- `hang.py`: another one: does `python -m ctl.inspect hang` name the worker that hangs, and where?
- `test_chaos.py`: what is drawn and judged, and six schedules.

    python -m tests.chaos.run --seed=1 --hours=1
"""
