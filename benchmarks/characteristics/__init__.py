"""How often the judge is wrong, measured: on simulated runs, and on real repeats of a control."""
