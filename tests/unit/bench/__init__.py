"""What benchmarks are made of, where it decides something."""
