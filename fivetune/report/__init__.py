"""The report of a run: one HTML file, made from the run directory alone, without torch.

Run -> pages.build_page -> Page -> render.render -> HTML; charts are Plotly figures as plain dicts.
"""

from __future__ import annotations

from fivetune.report.pages import build_page
from fivetune.report.render import render, write_report

__all__ = ["build_page", "render", "write_report"]
