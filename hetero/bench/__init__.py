"""The benchmarks that users and we run."""
