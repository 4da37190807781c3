"""The commands of `tools/benchmark.py`, a module each: `run(options)` measures, prints, writes, gives the exit code."""
