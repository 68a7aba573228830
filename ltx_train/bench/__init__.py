"""Benchmarks anyone can rerun, each with its baseline in the same run."""
