"""Parts of benchmarks that make decisions."""
