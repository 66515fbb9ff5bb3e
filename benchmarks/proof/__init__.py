"""The benchmark of injected bugs: what there is, what the harness said, and how good that is."""
