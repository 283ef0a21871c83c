"""Pages: the report of a run, comparisons, searches, inspections, and the live view; without torch.

Run -> run.build.build_page -> Page -> page.render.render_html -> HTML; charts are plain dicts in Plotly's form.
"""

from __future__ import annotations

from fivetune.reading.report.page.render import render_html
from fivetune.reading.report.run.build import build_page, write_report

__all__ = ["build_page", "render_html", "write_report"]
