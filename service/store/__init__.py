"""What must outlive the process."""
