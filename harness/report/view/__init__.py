"""The view: one frozen value with all that a report shows, and the code that makes it. Pure.

::

    build.py           build_view: verdicts and evidence to the view
    report_view.py     ReportView and its parts, which every renderer is given
    against.py         what a change did to every set, beside an earlier revision
    curves.py          curves for drawing
    in_force.py        what a set names, beside what really ran
    gradient_map.py    every parameter's gradient over the sampled steps
    module_tree.py     the modules of a failed set, with the way to the first wrong one
    tensor_tables.py   tables of tensors and replicas
    resumed_run.py     runs made in several passes, and their faults
    tolerances.py      what a report says about a calibration
    counterfactual.py  what would change a verdict
    program_notes.py   what verdicts on a user's programs do not cover
"""
