"""How the harness itself scales: plans of many sets, and clusters with many jobs."""
