"""Building blocks of all pages: parts, charts, wording, HTML and terminal rendering."""
