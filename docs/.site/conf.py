"""Sphinx's configuration of the site: MyST reads Markdown as GitHub does; furo, with the system's fonts."""

project = "FiveTune"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "FiveTune"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
myst_heading_anchors = 4
myst_enable_extensions = []
pygments_style = "friendly"
pygments_dark_style = "github-dark"
suppress_warnings = ["misc.highlighting_failure", "myst.header"]
