"""MLflow, fed from files by a thread: a step never waits for it, and an outage loses nothing.

`sender` is the thread, `run` what it sends of a run, `names` what MLflow calls it.
"""
