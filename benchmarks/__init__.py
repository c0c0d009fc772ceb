"""One command per row of ``docs/explanation/benchmarks.md``; see ``README.md`` beside this file."""
