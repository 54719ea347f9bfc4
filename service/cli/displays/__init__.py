"""The output of commands: live views, tables, and text that is safe for a terminal."""
