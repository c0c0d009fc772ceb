"""The job's key-value store, in memory: where its tasks find each other and agree."""
