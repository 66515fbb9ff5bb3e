"""The view model in every form that a report has. They read the view and compute nothing of it.

::

    files.py           write_reports: all forms into a folder
    html_page.py       report.html; assets.py: styles, scripts and plotly, which pages hold inline
    figures.py         the page's interactive figures, as data
    plots.py           PNG and SVG
    markdown.py        report.md and job summaries
    json_document.py   report.json, as report.schema.json has it
    junit.py           junit.xml
    npz_tables.py      report.npz, for programs and notebooks
    verdict_table.py   the verdict table as cells, for the terminal and Markdown
    palette.py, scales.py, downsample.py, marks.py   colours, axes, points and labels of figures
"""
