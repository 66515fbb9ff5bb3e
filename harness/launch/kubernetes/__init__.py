"""Jobs of a plan as JobSets of Kubernetes. Written as files: converge itself never asks Kubernetes.

::

    pod_script.py  what every pod of a job runs; pure
    objects.py     a job as a JobSet; pure
    checking.py    whether Kubernetes would take an object, by the engine's own client
    written.py     these files as a scheduler: what ``slurm/detached.py`` submits, polls and cancels
"""
