"""How converge itself scales: plans with many sets, and clusters with many jobs."""
