"""The steps of workers of parameter servers: leases, pushes, groups that are one to servers."""
