"""From findings to verdicts: pure functions, each of which looks at one thing."""
