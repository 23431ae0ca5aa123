"""The command line `rollsync`, and the report that it makes of a run.

The top layer: it may import every other package, and none imports it. What needs torch is imported when a command needs it,
so that `--help` and `report` answer at once.
"""
