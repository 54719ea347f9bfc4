"""The store: everything that must outlive the process."""
