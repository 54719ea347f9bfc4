"""Engine processes, their supervisors, their slots, and one request's life."""
