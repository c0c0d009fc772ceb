"""One command per row of ``docs/benchmarks.md``; see ``README.md`` beside this file."""
