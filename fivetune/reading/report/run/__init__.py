"""The report page of one run, section by section."""
