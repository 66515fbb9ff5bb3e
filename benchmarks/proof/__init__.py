"""The benchmark of injected bugs: its bugs, converge's verdicts on them, and their grades."""
