"""Every form of a report. Renderers read the view model and compute nothing themselves.

::

    html_page.py       report.html; assets.py: the styles, scripts and plotly inside a page
    figures.py         the page's interactive figures, as data
    plots.py           PNG and SVG
    markdown.py        report.md and job summaries
    json_document.py   report.json, as report.schema.json has it
    junit.py           junit.xml
    npz_tables.py      report.npz, for programs and notebooks
    issue_draft.py     the draft of an issue about a failed set
    verdict_table.py   the verdict table as cells, for the terminal and Markdown
    palette.py, scales.py, downsample.py, marks.py   colours, axes, points and labels of figures
"""
