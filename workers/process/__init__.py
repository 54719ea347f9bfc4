"""The three rings: guardian, orphans, registry. Together they leave no process behind."""
