"""Measures how often the judge is wrong, on simulated runs and on real repeats of a control."""
