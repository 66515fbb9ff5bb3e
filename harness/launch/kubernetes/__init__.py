"""Kubernetes as a backend of ``launch/scheduler/``: files, since converge itself never asks it.

::

    written.py     objects in files, which somebody else creates, as a scheduler; why a job failed
    objects.py     a job as a JobSet; pure
    pod_script.py  what every pod of a job runs; pure
    checking.py    whether Kubernetes would take an object, by the engine's own client
"""
