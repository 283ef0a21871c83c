"""From files, folders, tables and hub names to raw records."""
