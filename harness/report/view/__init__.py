"""The view: one frozen value with all that a report shows, and what makes it. Pure.

::

    build.py           build_view: verdicts and evidence to the view
    report_view.py     ReportView and its parts, which every renderer is given
    against.py         what a change did to every set, beside an earlier revision
    curves.py          curves for drawing
    in_force.py        what a set names beside what really ran
    gradient_map.py    every parameter's gradient over the sampled steps
    tensor_tables.py   tables of tensors and replicas
    resumed_run.py     runs made in several passes, and the faults that broke them
    tolerances.py      what a report says of a calibration
    counterfactual.py  what would change a verdict
    program_notes.py   how far verdicts reach on a user's programs
"""
