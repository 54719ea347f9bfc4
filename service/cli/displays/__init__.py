"""The output of commands: live views, tables, and words that a terminal may take."""
