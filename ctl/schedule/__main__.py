"""The command ``python -m ctl.schedule``: prints and draws a learning rate schedule."""

from ctl.schedule.plot import run

if __name__ == "__main__":
    run()
