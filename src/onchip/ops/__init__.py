"""The public functions: build a Problem, select a kernel, launch it."""
